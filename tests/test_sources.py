"""Wherever the images come from, the training is the same, and goes on where it stopped."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import ENGINES, losses, read_json, train
from test_dali import needs_dali

from recipe.data.digits import prepare_digits
from recipe.flags import DataFlags
from recipe.make_shards import make_shards

pytestmark = [pytest.mark.launch, pytest.mark.timeout(600)]

CACHE = Path(os.path.expanduser(DataFlags.cache_dir))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as shards."""
    folder = tmp_path_factory.mktemp("data") / "shards"
    make_shards(prepare_digits(CACHE), folder, CACHE, images_per_shard=100)
    return folder


# What each needs of flags.
SOURCES = {"shards": "--preset digits --data {shards} --workers 1"}


@pytest.mark.full
@pytest.mark.parametrize("source", SOURCES)
def test_resume_in_mid_epoch_under_the_other_engine(
    source: str, trained: Callable[..., Path], shards: Path, tmp_path: Path
) -> None:
    """35 of 70 steps, and then the rest from step 20 on: step by step as from files in one go."""
    arguments = SOURCES[source].format(shards=shards)
    folder = tmp_path / "run"
    started = train(
        folder, *ENGINES[0],
        f"{arguments} --checkpoint-steps 20 --max-steps 35 --keep-checkpoints 5",
    )  # fmt: skip
    (folder / "checkpoints" / "step-000000035.pt").unlink()  # as if killed before it got there
    summary = train(folder, *ENGINES[1], f"{arguments} --resume auto")
    whole = trained(*ENGINES[0])  # which reads files
    plain = read_json(whole / "summary.json")
    assert losses(folder) == losses(whole)
    assert summary["weights_sha256"] == plain["weights_sha256"]
    prints = plain["fingerprint"], started["fingerprint"]
    differing = {key for key in prints[0] if prints[0][key] != prints[1][key]}
    assert differing == {"max_steps", "workers"}, "compare would not see equal work"
    assert summary["input"]["files_per_second"] > 0


@needs_dali
@pytest.mark.full
def test_resume_with_dali(trained: Callable[..., Path], tmp_path: Path) -> None:
    """Which has pixels of its own, and so a training of its own; the order is the same."""
    arguments = "--dali --workers 1"
    in_one_go = train(tmp_path / "whole", *ENGINES[0], arguments)
    folder = tmp_path / "run"
    train(folder, *ENGINES[0], f"{arguments} --max-steps 20")
    summary = train(folder, *ENGINES[1], f"{arguments} --resume auto")
    assert summary["weights_sha256"] == in_one_go["weights_sha256"]
    assert losses(folder) == losses(tmp_path / "whole")
    plain = read_json(trained(*ENGINES[0]) / "summary.json")
    assert in_one_go["weights_sha256"] != plain["weights_sha256"]
    same = in_one_go["fingerprint"]["data_order_sha256"]
    assert same == plain["fingerprint"]["data_order_sha256"]
    assert abs(in_one_go["top1"] - plain["top1"]) < 15  # it learns as well
