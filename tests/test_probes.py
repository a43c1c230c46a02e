"""Tensors of the first steps, and the profile."""

from pathlib import Path

import numpy as np
import pytest
import torch
from launching import read_json
from making import TinyNet, a_config, a_world

from recipe.errors import UserError
from recipe.files import partial_name
from recipe.record.probes import StepProfiler, write_trace
from recipe.record.schema import WARM_UP_STEPS


def test_a_trace_holds_what_the_step_computed(tmp_path: Path) -> None:
    model = TinyNet()
    loss = model(torch.rand(2, 3, 8, 8)).square().mean()
    loss.backward()
    for step in (7, 8):
        write_trace(a_config(tensor_steps=7), a_world(1, 2), tmp_path, step, model, loss)
    (path,) = tmp_path.rglob("*.*")
    assert path == tmp_path / "trace/rank-1/step-000007.npz"
    arrays = np.load(path)
    names = [name for name, _ in model.named_parameters()]
    assert set(arrays) == {
        "loss",
        *(f"{kind}/{name}" for kind in ("gradient", "weight") for name in names),
        *(f"buffer/norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
    }
    assert arrays["loss"] == loss.item()
    assert np.array_equal(arrays["gradient/head.weight"], model.head.weight.grad.numpy())
    assert np.array_equal(arrays["weight/head.weight"], model.head.weight.detach().numpy())


def profiled(folder: Path, steps: int, ended: int) -> list[str]:
    """What the engine's timeline was asked for, and what was said at the end."""
    calls: list[str] = []
    model = TinyNet()
    begin, end = lambda path: calls.append(Path(path).name), lambda: calls.append("end")
    config, timeline = a_config(profile_steps=steps), ("engine", begin, end)
    profiler = StepProfiler(config, a_world(), folder, 0, model, timeline)
    for step in range(1, ended + 1):
        for _ in range(2):  # passes of accumulation
            model(torch.rand(2, 3, 8, 8)).square().mean().backward()
        profiler.end_step(step)
    profiler.close(calls.append)
    return calls


def test_a_profile_covers_the_steps_after_the_first_few(tmp_path: Path) -> None:
    assert profiled(tmp_path, 2, WARM_UP_STEPS + 5) == ["engine-timeline.json", "end"]
    trace = read_json(tmp_path / "profile/rank-0.json")
    marks = {e["name"] for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep")}
    times = read_json(tmp_path / "profile/gradients-rank-0.json")
    assert (len(marks), len(times["steps"])) == (2, 2)
    assert times["elements"] == {n: p.numel() for n, p in TinyNet().named_parameters()}
    for step in times["steps"]:
        assert step["ready"].keys() == times["elements"].keys()
        assert all(step["backward"] <= ready <= step["end"] for ready in step["ready"].values())


def test_a_profile_on_a_full_disk_is_one_message(tmp_path: Path) -> None:
    times = tmp_path / "profile/gradients-rank-0.json"
    times.parent.mkdir()
    partial_name(times).symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"the run cannot be written there \(No space left"):
        profiled(tmp_path, 2, WARM_UP_STEPS + 5)


def test_a_profile_that_the_end_cuts_short_is_said(tmp_path: Path) -> None:
    *_, end, said = profiled(tmp_path / "short", 9, WARM_UP_STEPS + 2)
    assert end == "end" and "the profile is shorter" in said
    assert (tmp_path / "short/profile/rank-0.json").exists()
    (said,) = profiled(tmp_path / "none", 9, 2)
    assert "no profile" in said
    assert profiled(tmp_path / "not asked for", 0, 2) == []
