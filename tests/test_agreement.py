"""Whether the ranks train the same thing, and what they say if not."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import (
    SMALL,
    TRAINERS,
    Finished,
    before_the_launchers_words,
    change_on_rank,
    launch,
    rarely,
    run,
    warm_python,
)
from making import CPU, TinyNet, a_config, a_world, folder_config, in_ranks, write_images

from recipe.data.batches import Data, open_data
from recipe.errors import UserError
from recipe.ranks import Collective, Ranks
from recipe.record import fingerprint as agreement
from recipe.record.fingerprint import check_same_training, check_same_weights, comparison_keys

HOSTS = ["node0", "node0", "node1"]
SYNTHETIC = Data(None, None, 100, 10, 1000)


def messages(act: Callable[[Ranks], None]) -> list[str]:
    """What three ranks raise, each a thread that acts as `act`; "" where nothing is wrong."""

    def as_rank(rank: int, sum_over_ranks: Collective) -> str:
        try:
            act(Ranks(a_world(rank, 3, host=HOSTS[rank]), sum_over_ranks))
        except UserError as error:
            return str(error)
        return ""

    return in_ranks(3, as_rank)


def disagreement(*facts: dict[str, str]) -> str:
    """The one message of ranks that have these facts."""
    told = messages(lambda ranks: check_same_training(facts[ranks.world.rank], ranks))
    assert len(set(told)) == 1, "all ranks say the same, and one of them prints it"
    return told[0]


def facts(data: Data = SYNTHETIC, **settings: Any) -> dict[str, str]:
    return comparison_keys("ddp", a_config(**settings), data, CPU)


def test_hosts_may_have_their_own_folders_and_cores() -> None:
    here = facts(weights="/scratch/a.pt")
    there = facts(weights="/b.pt", cache_dir="/x", log_dir="/y", threads=7, workers=3, cuda=False)
    assert disagreement(here, there, here) == ""
    assert "--seed: 42 on rank 1 (node0) and 1 more, 7 on rank 0 (node0)." in disagreement(
        facts(seed=7), here, here
    ), "the minority comes last"
    assert "--resume: given on rank 0 (node0) and 1 more, not given on rank 2 (node1)" in (
        disagreement(facts(resume="a"), facts(resume="b"), facts())
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"seed": 7}, "--seed: 42 on rank 0 (node0) and 1 more, 7 on rank 2 (node1)."),
        ({"base_lr": 0.5}, "--base-lr: 0.005 on rank 0 (node0) and 1 more, 0.5 on rank 2"),
        ({"name": "b"}, "--name: None on rank 0 (node0) and 1 more, b on rank 2"),
        ({"max_steps": 3}, "--max-steps: None on"),
    ],
)
def test_settings(settings: dict[str, Any], told: str) -> None:
    message = disagreement(facts(), facts(), facts(**settings))
    assert message.startswith("the ranks would not train the same thing: --")
    assert told in message


def test_versions_and_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = facts()
    version = agreement.metadata.version
    monkeypatch.setattr(
        agreement.metadata, "version", lambda name: "9.9" if name == "torch" else version(name)
    )
    monkeypatch.setattr(agreement.platform, "python_version", lambda: "3.99.0")
    message = disagreement(here, here, facts())
    ranks = "on rank 0 (node0) and 1 more"
    python, torch_s = here["python's version"], version("torch")
    assert f"python's version: {python} {ranks}, 3.99.0 on rank 2 (node1); torch's" in message
    assert f"; torch's version: {torch_s} {ranks}, 9.9 on rank 2 (node1)." in message
    monkeypatch.undo()
    for name in ("recipe/data/batches.py", "recipe/new.py", "ddp_train/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("other")
    monkeypatch.setattr(agreement, "ROOT", tmp_path)
    message = disagreement(here, here, facts())
    assert "the source recipe/" in message
    assert "missing on rank 2 (node1)" in message
    assert "; and " in message, "not one line for each file"
    assert len(message) < 800


def test_horovods_version_counts_under_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement.metadata, "version", lambda name: "1")
    assert "horovod's version" in comparison_keys("horovod", a_config(), SYNTHETIC, CPU)
    assert "horovod's version" not in facts()


def test_data(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "lacking", "renamed", "moved", "other")]
    for folder in folders:
        for split in ("train", "val"):
            write_images(folder / split, 4)
    (folders[1] / "train" / "b" / "2.png").unlink()
    (folders[2] / "val" / "c" / "0.png").rename(folders[2] / "val" / "c" / "00.png")
    (folders[3] / "train" / "a" / "3.png").rename(folders[3] / "train" / "b" / "9.png")
    (folders[4] / "val" / "a" / "1.png").write_bytes(b"other contents")
    whole, lacking, renamed, moved, other_contents = (
        facts(open_data(folder_config(folder, tmp_path / "cache"))) for folder in folders
    )
    one_less = "training images: 12 on rank 0 (node0) and 1 more, 11 on rank 2 (node1);"
    assert one_less in disagreement(whole, whole, lacking)
    for other in (renamed, moved):
        message = disagreement(whole, whole, other)
        assert ": names, labels and classes of the images: " in message
        assert "training images" not in message
    assert "names, labels and classes of the images: " in disagreement(whole, facts(), whole)
    assert "same thing: sizes of the image files: " in disagreement(whole, whole, other_contents)


def test_weights() -> None:
    torch.manual_seed(0)
    models = [TinyNet() for _ in range(3)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    models[1].norm.running_mean += 1  # each rank's own until aligned

    def act(ranks: Ranks) -> None:
        check_same_weights(models[ranks.world.rank], 70, ranks)

    assert messages(act) == ["", "", ""]
    with torch.no_grad():  # in the last bit
        models[2].head.bias[0] = models[2].head.bias[0].nextafter(torch.tensor(9.0))
    (message,) = set(messages(act))
    assert re.search(
        r"^after step 70 the ranks hold different weights in head\.bias: .* on rank 0 \(node0\) "
        r"and 1 more, .* on rank 2 \(node1\)\. ",
        message,
    )


def check_refused(finished: Finished, folder: Path, *words: str) -> None:
    """It ended with one message that has all of the words, and trained or wrote nothing."""
    assert finished.returncode != 0
    said = before_the_launchers_words(finished.output)
    assert said.count("the ranks would not train the same thing") == 1
    assert all(word in finished.output for word in words), finished.output
    assert "Traceback" not in said
    assert not (folder / "runs").exists()


@pytest.mark.launch
@pytest.mark.parametrize("engine", ["horovod", rarely("ddp")])
def test_ranks_of_other_data_and_seeds_do_not_train(engine: str, tmp_path: Path) -> None:
    """Two that mpirun started by two commands; the second's data lack an image."""
    for folder in ("whole", "lacking"):
        for split in ("train", "val"):
            write_images(tmp_path / folder / split, 12)
    (tmp_path / "lacking" / "train" / "b" / "3.png").unlink()
    common = f"{SMALL} --base-lr 0.1 --log-dir {tmp_path}/runs --cache-dir {tmp_path}/cache"
    start = f"-np 1 {warm_python()} {TRAINERS[engine]} {common}"
    finished = run(
        f"mpirun {start} --data {tmp_path}/whole --seed 1 "
        f": {start} --data {tmp_path}/lacking --seed 2".split(),
        120,
    )
    check_refused(finished, tmp_path, "--seed: 1 on rank 0", "training images: 36 on rank 0")


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(("launcher", "engine"), [("torchrun", "ddp"), ("mpirun", "horovod")])
def test_a_host_whose_cuda_is_broken_does_not_hang(
    launcher: str, engine: str, tmp_path: Path
) -> None:
    """Rank 0 finds a GPU (here a pretended one, with a pretended NCCL), and rank 1 none."""
    changed = change_on_rank(0, "recipe.device", PRETENDED_GPU, tmp_path)
    arguments = f"{SMALL} --log-dir {tmp_path}/runs"
    finished = launch(launcher, engine, arguments, warm=True, **changed)
    check_refused(finished, tmp_path, "type of device: cuda on rank 0", "cpu on rank 1")


PRETENDED_GPU = """
import sys, types, torch, torch.distributed as dist
real_init = dist.init_process_group
def init(backend, **others):
    import torch.testing._internal.distributed.fake_pg
    real_init(backend.replace("nccl", "fake"), **others)
def choose_device(config, world):
    if hvd := sys.modules.get("horovod.torch"):
        hvd.nccl_built = hvd.cuda_built = lambda: True
    return torch.device("cuda", 0)
module.choose_device = choose_device
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="GPU-0")
dist.init_process_group = init
"""
