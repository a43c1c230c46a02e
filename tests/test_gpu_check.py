"""make gpu-check: that each check's end is told. CI carries out the checks by ARGS=--dry."""

import contextlib
import json
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import ROOT

from benchmarks import gpu_check
from benchmarks.gpu_check import CHECKS, NotPossibleError, Setting, carry_out
from compare.running.checks import Finding
from recipe.errors import UserError


def raises(error: Exception) -> Any:
    def check(setting: Setting) -> dict[str, Any]:
        raise error

    return check


@pytest.mark.parametrize(
    ("run", "gpus", "status", "reason"),
    [
        (lambda setting: {"value": 1}, 1, "ok", ""),
        (lambda setting: {"value": 1}, 2, "not possible", "2 GPUs are needed"),
        (raises(NotPossibleError("no nvidia-smi")), 1, "not possible", "no nvidia-smi"),
        (raises(UserError("they differ")), 1, "failed", "UserError: they differ"),
        (raises(KeyError("dur")), 1, "failed", "KeyError: 'dur'"),
    ],
)
def test_how_a_check_ends(
    run: Any, gpus: int, status: str, reason: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = carry_out(run, gpus, Setting(tmp_path, dry=False))
    assert result["status"] == status and result["reason"].startswith(reason)
    assert bool(result["figures"]) == (status == "ok")


def test_what_is_skipped_or_not_seen_does_not_pass(tmp_path: Path, monkeypatch: Any) -> None:
    """Of pytest: what it skips. Of torch: GPUs that nvidia-smi sees and it does not."""
    setting = Setting(tmp_path, dry=False)
    (tmp_path / "output.log").write_text("SKIPPED [2] tests/x.py:1: no Apex\n3 passed, 2 skipped\n")
    monkeypatch.setattr(Setting, "start", lambda *_, **__: tmp_path)
    result = carry_out(gpu_check.gpu_tests, 0, setting)
    assert result["status"] == "not possible" and "2 skipped" in result["reason"]
    monkeypatch.setattr(gpu_check, "ask_nvidia_smi", lambda field: ["H200"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert carry_out(gpu_check.facts, 0, setting)["status"] == "failed"


# What a GPU's tools write: torch's warning of a call that waits, NCCL's transports, nvidia-smi.
WAITS = (
    "/x/recipe/record/meter.py:128: UserWarning: called a synchronizing CUDA operation (Triggered "
    "internally at /pytorch/c10/cuda/CUDAFunctions.cpp:300.)\n"
)
NCCL = (
    "host:71:84 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
    "host:72:85 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM\n"
)
SMI = {"name": "NVIDIA H100 80GB HBM3\n", "driver_version": "580.95.05\n"}


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: Any) -> Setting:
    """As on one GPU, whose programs have left what they leave there."""
    (tmp_path / "output.log").write_text(WAITS * 3 + "step 10\n")
    log = tmp_path / "runs/block-1/torch.distributed/output.log"
    log.parent.mkdir(parents=True)
    log.write_text(NCCL)
    (tmp_path / "collectives.json").write_text("{}")
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(Setting, "start", lambda *_, **__: tmp_path)

    def nvidia_smi(words: list[str], **_: Any) -> Any:
        field = words[1].removeprefix("--query-gpu=")
        return SimpleNamespace(stdout=SMI[field])

    monkeypatch.setattr(gpu_check.subprocess, "run", nvidia_smi)
    gpu = SimpleNamespace(uuid="6a1b", name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        gpu_check, "versions", lambda: {"gpus": ["NVIDIA H100 80GB HBM3"], "torch": "2"}
    )
    return Setting(tmp_path, dry=False)


def trains(monkeypatch: Any, *summaries: dict[str, Any]) -> list[str]:
    """Have trainings end with these summaries, one after the other; the flags that they get."""
    left, flags = list(summaries), list[str]()

    def train(self: Setting, words: str, *_: str, look: Any = None, **__: Any) -> dict[str, Any]:
        flags.append(words)
        (self.folder / "run/metrics.jsonl").touch()
        if look is not None:
            look(self.folder)
        return left.pop(0) | {"folder": self.folder}

    monkeypatch.setattr(Setting, "train", train)
    return flags


def test_nccl_s_transport_and_what_nvidia_smi_sees(on_gpu: Setting, monkeypatch: Any) -> None:
    found = gpu_check.all_reduce(on_gpu)
    assert found["nccl_via"] == {"P2P/CUMEM": 2}
    monkeypatch.setattr(gpu_check.checks, "check_host", lambda: [Finding("torch", "ok", "")])
    facts = gpu_check.facts(on_gpu)
    assert (facts["nvidia_smi"], facts["driver"]) == (["NVIDIA H100 80GB HBM3"], ["580.95.05"])


def test_calls_that_wait_are_counted(on_gpu: Setting, monkeypatch: Any) -> None:
    trains(monkeypatch, {}, {})
    found = gpu_check.synchronising_calls(on_gpu)
    assert found["calls_per_step"] == 0  # both runs have left the same three
    assert found["where"] == [(WAITS.strip(), 3)]


@pytest.mark.parametrize(
    ("wall", "own", "status"),
    [(99.0, 100.0, "ok"), (97.0, 100.0, "failed"), (None, 100.0, "failed"), (99.0, None, "failed")],
)
def test_the_clocks_are_compared_in_large_batches(
    wall: float | None, own: float | None, status: str, on_gpu: Setting, monkeypatch: Any
) -> None:
    small = {"wall_images_per_second": 90.0, "images_per_second": 100.0}
    large = {"wall_images_per_second": wall, "images_per_second": own}
    flags = trains(monkeypatch, small, large)
    monkeypatch.setattr(gpu_check, "product", lambda kinds, sizes: product(kinds[:1], sizes))
    assert carry_out(gpu_check.speed, 1, on_gpu)["status"] == status
    assert ["--batch-size 32 " in flags[0], "--batch-size 256 " in flags[1]] == [True, True]


@pytest.mark.parametrize(
    ("watts", "shown", "status"),
    [
        (600.0, "612.33\n", "ok"),
        (400.0, "612.33\n", "failed"),
        (None, "612.33\n", "not possible"),
        (600.0, "[N/A]\n", "not possible"),
    ],
)
def test_energy_is_that_of_the_power_which_nvidia_smi_shows(
    watts: float | None, shown: str, status: str, on_gpu: Setting, monkeypatch: Any
) -> None:
    monkeypatch.setitem(SMI, "power.draw", shown)
    trains(monkeypatch, {"energy": {"gpu_watts": watts}})
    assert carry_out(gpu_check.energy, 1, on_gpu)["status"] == status


@pytest.mark.parametrize(
    ("speeds", "status"),
    [([100, 101, 99], "ok"), ([97, 98, 96], "failed"), ([80, 110, 100], "ok")],
)
def test_a_neighbours_cost_is_judged_by_more_than_its_noise(
    speeds: list[float], status: str, on_gpu: Setting, monkeypatch: Any
) -> None:
    class Turns(contextlib.nullcontext[Any]):
        started = 0

        def start(self, *sides: Any) -> None:
            self.started += 1
            self.speeds = cycle([100, 101, 99] if self.started == 1 else speeds)

        def take_turn(self, *_: Any) -> Any:
            return SimpleNamespace(images_per_second=next(self.speeds))

        def __enter__(self) -> "Turns":
            return self

    monkeypatch.setattr(gpu_check, "Scheduler", Turns)
    assert carry_out(gpu_check.stopped_neighbour, 1, on_gpu)["status"] == status


def test_two_engines_need_horovod(on_gpu: Setting, monkeypatch: Any) -> None:
    monkeypatch.setattr(gpu_check.checks, "has_horovod", lambda: False)
    result = carry_out(gpu_check.two_workers, 2, on_gpu)
    assert result["status"] == "not possible" and "Horovod is not installed" in result["reason"]


def test_what_fails_is_in_the_file_and_in_the_exit_code(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_check, "CHECKS", {raises(UserError("alas")): 1})
    assert gpu_check.check_gpus(dry=True, out=tmp_path / "found.json") == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["versions"]["torch"] and found["checks"][0]["reason"] == "UserError: alas"
    with pytest.raises(UserError, match="there is no such check"):
        gpu_check.check_gpus(only=("facts",))


def test_the_page_names_each_check() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    assert all(f"| `{check.__name__}` |" in page for check in CHECKS)
