"""The rungs that divide the network or its weights among ranks: pipelines, parameter servers."""

import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from launching import (
    BIN,
    SMALL,
    TRAINERS,
    launch,
    losses,
    read_json,
    resumed_at,
    run,
    wait_until,
)
from torch import nn

from baselines import parameter_server
from recipe.config import Config
from recipe.errors import UserError
from recipe.ranks import bind_rpc
from recipe.training.model import build_optimizer

pytestmark = pytest.mark.timeout(600)

Trained = Callable[..., Path]
FEW = "--max-steps 6"
# shufflenet is no chain of layers.
RESNET = f"--arch resnet18 --batch-size 6 {FEW}"
MICRO_BATCHES = f"{RESNET} --batches-per-allreduce 4"
# A rung, its flags and its ranks, and what computes the same: DDP on two workers, or one process.
EQUAL = [
    ("pipeline", MICRO_BATCHES, 2, "one process"),
    ("parameter_server", f"--synchronous {FEW}", 3, "DDP"),
    ("ddp_with_rpc", FEW, 3, "DDP"),
    ("rpc_pipeline", RESNET, 2, "one process"),
]
RPC = [case for case in EQUAL if case[0] != "pipeline"]


def digest_of(same: str, flags: str, trained: Trained) -> str:
    """The digest of the weights that it has to be, computed without the rung."""
    if same == "DDP":
        folder = trained("torchrun", "ddp", flags.removeprefix("--synchronous "))
        return read_json(folder / "summary.json")["weights_sha256"]
    plain = run(["python", TRAINERS["single_process"], *f"{SMALL} {flags}".split()])
    assert plain.returncode == 0, plain.output
    return plain.output.split("weights ")[-1].strip()


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(("rung", "flags", "ranks", "same"), EQUAL)
def test_weights_are_equal(rung: str, flags: str, ranks: int, same: str, trained: Trained) -> None:
    summary = read_json(trained("torchrun", rung, flags, ranks) / "summary.json")
    assert summary["weights_sha256"] == digest_of(same, flags, trained)


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(("rung", "flags", "ranks", "same"), EQUAL)
def test_a_run_goes_on_from_its_checkpoint(
    rung: str, flags: str, ranks: int, same: str, trained: Trained, tmp_path: Path
) -> None:
    place = f"--log-dir {tmp_path} --name run"
    for more in (
        f"{flags.replace(FEW, '--max-steps 3')} {place}",
        f"{flags} {place} --resume auto",
    ):
        finished = launch("torchrun", rung, f"{SMALL} {more}", ranks)
        assert finished.returncode == 0, finished.output
    assert resumed_at(tmp_path / "run") == [3]
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["weights_sha256"] == digest_of(same, flags, trained)


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(
    ("rung", "flags", "ranks"),
    [
        ("pipeline", "--batch-size 10 --batches-per-allreduce 4 --base-lr 0.0025", 2),
        ("parameter_server", "", 3),
        ("ddp_with_rpc", "", 3),
        ("rpc_pipeline", "", 2),
        ("rpc_pipeline", "--batch-size 20 --batches-per-allreduce 2 --base-lr 0.005", 2),
    ],
)
def test_it_learns_the_digits(rung: str, flags: str, ranks: int, tmp_path: Path) -> None:
    finished = launch("torchrun", rung, f"{flags} --log-dir {tmp_path} --name run", ranks)
    assert finished.returncode == 0, finished.output
    assert read_json(tmp_path / "run" / "summary.json")["top1"] > 96


# -- Pipelines -------------------------------------------------------------------------------------
# A network whose normalisation, over all channels of an image, knows no other image.
WITHOUT_BATCH_NORM = """
import runpy, sys
from torch import nn

class Norm(nn.GroupNorm):
    def __init__(self, channels):
        super().__init__(1, channels)

nn.BatchNorm2d = Norm
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize("batch_norm", [False, True])
def test_micro_batches_equal_the_whole_batch_without_batch_norm(
    batch_norm: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_BATCH_NORM)
    for name, ranks, trainer, arguments in [  # the rate of a step is the same
        ("micro", 2, "pipeline", "--base-lr 0.001"),
        ("whole", 1, "ddp", "--base-lr 0.004 --batch-size 24 --batches-per-allreduce 1"),
    ]:
        program = f"{'' if batch_norm else script} {TRAINERS[trainer]}"
        flags = f"{SMALL} {MICRO_BATCHES} --warmup-epochs 0 {arguments}"
        command = f"{BIN}/torchrun --nproc-per-node {ranks} {program} {flags}"
        command += f" --log-dir {tmp_path} --name {name}"
        finished = run(command.split())
        assert finished.returncode == 0, finished.output
    figures = read_json(tmp_path / "micro" / "summary.json")["rung"]
    assert figures["equal_bubble_share"] == pytest.approx(0.2)  # (2 - 1) / (4 + 2 - 1)
    assert 0 < figures["bubble_share"] < 1
    micro, whole = losses(tmp_path / "micro"), losses(tmp_path / "whole")
    assert (micro == pytest.approx(whole, rel=1e-4)) is not batch_norm


# -- Parameter servers -----------------------------------------------------------------------------
def weights_after(order: tuple[int, ...]) -> list[torch.Tensor]:
    """What a synchronous server has after a push of each trainer, in this order."""
    torch.manual_seed(0)
    model, generator = nn.Linear(5, 3), torch.Generator().manual_seed(1)
    gradients = torch.randn(3, 18, generator=generator)
    server = parameter_server.Server(model, build_optimizer(model, Config()), 3, group=3)
    answers = [server.take(trainer, 0, gradients[trainer], rate=0.1) for trainer in order]
    assert all(answer.done() for answer in answers)
    assert server.version == 1
    return [weight.detach() for weight in model.parameters()]


def test_a_synchronous_update_does_not_depend_on_who_comes_first() -> None:
    first, *others = (weights_after(order) for order in itertools.permutations(range(3)))
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.launch
@pytest.mark.full
def test_an_asynchronous_server_counts_staleness(tmp_path: Path) -> None:
    flags = f"{SMALL} {FEW} --log-dir {tmp_path} --name run"
    finished = launch("torchrun", "parameter_server", flags, ranks=3)
    assert finished.returncode == 0, finished.output
    figures = read_json(tmp_path / "run" / "summary.json")["rung"]
    mean, largest = figures["staleness"], figures["largest_staleness"]
    assert f"staleness: {mean:.2f} updates in the mean" in finished.output
    # Both trainers' first gradients are of the first weights, so the later ones are stale.
    assert largest >= 1
    assert 0 < mean <= largest


# -- What RPC opens --------------------------------------------------------------------------------
def listening_at(launcher: subprocess.Popen) -> list[set[str]]:
    """Of each rank below a launcher: the addresses at which it listens."""
    return [
        {one.laddr.ip for one in rank.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
        for rank in psutil.Process(launcher.pid).children()
    ]


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(("rung", "flags", "ranks", "same"), RPC)
def test_ranks_on_one_host_listen_at_the_loopback_only(
    rung: str, flags: str, ranks: int, same: str, tmp_path: Path
) -> None:
    found = []

    def look(launcher: subprocess.Popen) -> None:
        wait_until((tmp_path / "run" / "metrics.jsonl").exists)  # RPC has started long before
        found.extend(listening_at(launcher))

    place = f"{SMALL} {flags} --log-dir {tmp_path} --name run"
    command = f"{BIN}/torchrun --nproc-per-node {ranks} {TRAINERS[rung]} {place}"
    finished = run(command.split(), meanwhile=look)
    assert finished.returncode == 0, finished.output
    assert found == [{"127.0.0.1"}] * ranks


def test_rpc_between_hosts_needs_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(UserError, match=r"RPC runs any code .* set GLOO_SOCKET_IFNAME"):
        bind_rpc()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("TP_SOCKET_IFNAME", "")
    bind_rpc()
    assert os.environ["TP_SOCKET_IFNAME"] == "eth7"


# -- What is refused -------------------------------------------------------------------------------
@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(
    ("rung", "ranks", "flags", "message"),
    [
        ("pipeline", 2, "", "--batches-per-allreduce 1: is the number of micro-batches"),
        ("parameter_server", 1, "", "1 rank: the last one only serves; start at least 2"),
        ("ddp_with_rpc", 2, "--arch mobilenet_v2", "which it lacks; choose a resnet"),
        ("rpc_pipeline", 2, "--arch mobilenet_v2", "this script knows how to cut a resnet"),
    ],
)
def test_what_cannot_be_done_is_refused(
    rung: str, ranks: int, flags: str, message: str, tmp_path: Path
) -> None:
    finished = launch("torchrun", rung, f"{flags} --log-dir {tmp_path}", ranks)
    assert finished.returncode != 0
    assert message in finished.output
