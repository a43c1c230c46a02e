"""A training's weights for other tools, and back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from making import TinyNet
from safetensors import safe_open
from test_checkpoint import CONFIG, DATA, PROGRESS, bits, trainables

from recipe.record.checkpoint import (
    contents_of,
    finish_checkpoint,
    load_weights,
    mark_best,
    save_checkpoint,
    step_path,
)
from recipe.record.export import main
from recipe.training.state import Progress, Trainables


def save(folder: Path, parts: Trainables, step: int, is_best: bool = False) -> Path:
    """A run's checkpoint."""
    path = step_path(folder / "checkpoints", step)
    save_checkpoint(path, contents_of(parts, Progress(step, 4 * step), CONFIG, DATA))
    if is_best:
        mark_best(path)
        finish_checkpoint()
    return path


def read_back(file: Path) -> dict[str, tuple]:
    """The weights that a network gets from a file."""
    model = TinyNet()
    load_weights(model, replace(CONFIG, weights=str(file)), 3)
    return {name: bits(value) for name, value in model.state_dict().items()}


def weights_of(model: torch.nn.Module) -> dict[str, tuple]:
    return {name: bits(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("evaluations", "whose"),
    [
        ([], "model"),
        ([(3, "model", 50), (3, "ema", 60)], "ema"),
        ([(3, "model", 60), (3, "ema", 50)], "model"),
        ([(2, "ema", 90), (3, "model", 50), (3, "ema", 40), (4, "ema", 90)], "model"),
    ],
)
def test_the_better_weights_come_back(
    evaluations: list[tuple[int, str, float]], whose: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Under the network's own names, however they are wrapped in training."""
    parts, run, out = trainables(steps=3), tmp_path / "run", tmp_path / "w.safetensors"
    save(run, parts, 3)
    lines = [
        json.dumps({"kind": "eval", "step": step, "weights": weights, "top1": top1})
        for step, weights, top1 in evaluations
    ]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "eval", "st']))
    assert main([str(run), str(out)]) == 0
    assert f"tiny, the weights of {whose} after step 3" in capsys.readouterr().out
    assert parts.ema is not None
    expected, other = parts.ema.module, parts.model
    if whose == "model":
        expected, other = other, expected
    assert read_back(out) == weights_of(expected) != weights_of(other)
    with safe_open(out, "pt") as file:
        assert set(file.keys()) == set(TinyNet().state_dict())
        told = {"format": "pt", "arch": "tiny", "step": "3", "weights": whose}
        assert file.metadata() == told


def test_the_best_checkpoint_is_taken_or_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "w.safetensors"
    models = {step: trainables(seed=step) for step in (3, 6, 9)}
    for step, parts in models.items():
        path = save(run, parts, step, is_best=step == 6)
    monkeypatch.chdir(path.parent)
    for source, step in ((run, 6), (path, 9), (path.name, 9)):
        assert main([str(source), str(out)]) == 0
        assert read_back(out) == weights_of(models[step].model)
    (run / "checkpoints" / "best.pt").unlink()
    assert main([str(run), str(out)]) == 0
    assert read_back(out) == weights_of(models[9].model)


@pytest.mark.parametrize(
    ("run", "out", "words"),
    [
        ("empty", "w.safetensors", "empty: neither a checkpoint nor the folder of a run"),
        ("run", "w.pt", "w.pt: give it a name that ends in .safetensors"),
        ("bare.pt", "w.safetensors", "bare.pt: is not a checkpoint of this project"),
        ("text.pt", "w.safetensors", "text.pt: is damaged, or is no file that torch.save wrote"),
        ("run", "nowhere/w.safetensors", "cannot be read or written (No such file or directory)"),
    ],
)
def test_what_cannot_be_exported(
    run: str, out: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    save(tmp_path / "run", trainables(), PROGRESS.step)
    torch.save(TinyNet().state_dict(), tmp_path / "bare.pt")
    (tmp_path / "text.pt").write_text("weights")
    assert main([str(tmp_path / run), str(tmp_path / out)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("python -m recipe.record.export: ") and words in error
    assert error.count("\n") == 1
    assert not (tmp_path / out).exists()
