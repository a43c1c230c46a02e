"""The rungs in baselines/ learn, and train exactly as DDP or a single process does, if they can."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torchvision
from launching import (
    BIN,
    SMALL,
    TRAINERS,
    change_on_rank,
    launch,
    losses,
    rarely,
    read_json,
    resumed_at,
    run,
    train,
    wait_until,
)
from torch import nn

from baselines import parameter_server
from recipe.errors import UserError
from recipe.rendezvous import bind_rpc
from recipe.settings.config import Config
from recipe.training.model import build_optimizer

Trained = Callable[..., Path]
KEPT = "--log-interval 1 --checkpoint-steps 7 --keep-checkpoints 5"
FEW = f"--max-steps 12 {KEPT}"
# shufflenet is no chain of layers.
RESNET = f"--arch resnet18 --batch-size 6 {FEW}"
MICRO_BATCHES = f"{RESNET} --batches-per-allreduce 4"


@dataclass(frozen=True)
class Rung:
    """How it is started here, what trains the same as it, and whether the bits are equal."""

    flags: str = FEW
    ranks: int = 2
    workers: int = 2  # of DDP that train the same; 0: single_process.py does
    launcher: str = "torchrun"
    is_exact: bool = True
    to_learn: str = ""  # flags for the digits


RUNGS = {
    "data_parallel": Rung(launcher="python", ranks=1, workers=1),
    "parameter_averaging": Rung(),  # during its warm-up
    "zero_optimizer": Rung(),
    "fsdp": Rung(is_exact=False),
    "model_parallel": Rung(),
    "pipeline": Rung(
        MICRO_BATCHES,
        workers=0,
        to_learn="--batch-size 10 --batches-per-allreduce 4 --base-lr 0.0025",
    ),
    "parameter_server": Rung(f"--synchronous {FEW}", 3),
    "ddp_with_rpc": Rung(ranks=3),
    "rpc_pipeline": Rung(RESNET, workers=0),
}
RPC = ("parameter_server", "ddp_with_rpc", "rpc_pipeline")
OFTEN = ("zero_optimizer", "fsdp")  # what make test tries


def start(name: str) -> tuple[str, str, int]:
    """Launcher, trainer and ranks of a rung; "ddp": of DDP with two workers."""
    rung = RUNGS.get(name, Rung())
    return rung.launcher, name, rung.ranks


def trained_as(name: str, trained: Trained, arguments: str = FEW) -> Path:
    launcher, engine, ranks = start(name)
    return trained(launcher, engine, arguments, ranks)


def check_losses(first: Path, second: Path, is_exact: bool) -> None:
    """Assert that two runs have equal losses; if not `is_exact`, up to rounding."""
    assert losses(first) == (
        losses(second) if is_exact else pytest.approx(losses(second), rel=1e-3)
    )


@pytest.mark.launch
@pytest.mark.parametrize("name", [name if name in OFTEN else rarely(name) for name in RUNGS])
def test_a_rung_trains_as_its_reference(name: str, trained: Trained) -> None:
    """The reference is DDP, or single_process.py."""
    rung, mine = RUNGS[name], trained_as(name, trained, RUNGS[name].flags)
    summary = read_json(mine / "summary.json")
    if rung.workers == 0:
        plain = trained("python", "single_process", rung.flags, ranks=1)
        assert summary["weights_sha256"] == read_json(plain / "summary.json")["weights_sha256"]
        return
    flags = rung.flags.removeprefix("--synchronous ")
    ddp = trained("torchrun" if rung.workers > 1 else "python", "ddp", flags, rung.workers)
    ddp_summary = read_json(ddp / "summary.json")
    check_losses(mine, ddp, rung.is_exact)
    # On some processors rounding is the same for sharded weights: then these are equal, too.
    if rung.is_exact:
        assert summary["weights_sha256"] == ddp_summary["weights_sha256"]
    assert summary["fingerprint"] == ddp_summary["fingerprint"]


@pytest.mark.launch
@pytest.mark.full
def test_a_sharded_optimizer_may_be_another_than_sgd(trained: Trained) -> None:
    adamw = f"{FEW} --optimizer adamw"
    zero, ddp = trained_as("zero_optimizer", trained, adamw), trained_as("ddp", trained, adamw)
    check_losses(zero, ddp, is_exact=True)


LOCAL = f"{FEW} --warmup-epochs 0.1"  # gradients are averaged in six steps, then weights


@pytest.mark.launch
@pytest.mark.parametrize(
    ("first", "second", "arguments"),
    [
        ("fsdp", "ddp", FEW),
        rarely("ddp", "fsdp", FEW),
        rarely("fsdp", "fsdp", FEW),
        rarely("zero_optimizer", "ddp", FEW),
        rarely("zero_optimizer", "zero_optimizer", f"{FEW} --optimizer adamw"),
        rarely("ddp", "zero_optimizer", FEW),
        rarely("ddp", "model_parallel", FEW),
        rarely("parameter_averaging", "parameter_averaging", LOCAL),
        *(rarely(name, name, RUNGS[name].flags) for name in ("pipeline", *RPC)),
    ],
)
def test_a_rung_resumes_from_another_s_checkpoint(
    first: str, second: str, arguments: str, trained: Trained, tmp_path: Path
) -> None:
    whole, folder = trained_as(first, trained, arguments), tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "checkpoints" / "step-000000012.pt").unlink()
    launcher, engine, ranks = start(second)
    summary = train(folder, launcher, engine, f"{arguments} --resume auto", ranks)
    assert summary["steps"] == 12
    assert resumed_at(folder) == [7]
    check_losses(folder, whole, is_exact=first == second or "fsdp" not in (first, second))


@pytest.mark.launch
@pytest.mark.full
def test_averaging_weights_only_at_times_is_another_training(trained: Trained) -> None:
    local, ddp = (trained_as(name, trained, LOCAL) for name in ("parameter_averaging", "ddp"))
    assert losses(local)[:7] == losses(ddp)[:7], (
        "the seventh loss is that of the sixth step's weights"
    )
    assert losses(local)[8] != losses(ddp)[8]


@pytest.mark.launch
@pytest.mark.parametrize("name", OFTEN)
def test_each_rank_holds_a_part_of_the_optimizer(name: str, trained: Trained) -> None:
    held = read_json(trained_as(name, trained) / "summary.json")["rung"]
    network = torchvision.models.shufflenet_v2_x0_5(num_classes=10)
    everything = 4 * sum(weight.numel() for weight in network.parameters())
    shared = ["optimizer_bytes", *(["weight_bytes"] if name == "fsdp" else [])]
    for kind in shared:
        assert sum(held[kind]) == everything
        assert max(held[kind]) < 0.6 * everything
    assert name == "fsdp" or held["weight_bytes"] == [everything] * 2


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        *((name, rung.to_learn) for name, rung in RUNGS.items()),
        ("rpc_pipeline", "--batch-size 20 --batches-per-allreduce 2 --base-lr 0.005"),
    ],
)
def test_a_rung_learns_the_digits(name: str, flags: str, tmp_path: Path) -> None:
    launcher, _, ranks = start(name)
    words = f"{flags} --log-dir {tmp_path} --name run"
    launch(launcher, name, words, ranks, warm=True).checked()
    assert read_json(tmp_path / "run" / "summary.json")["top1"] > 96


# -- Pipelines -------------------------------------------------------------------------------------
# A network whose normalisation is over all channels of each image alone.
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
        run(command.split()).checked()
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
    for second in others:
        assert all(map(torch.equal, first, second))


@pytest.mark.launch
@pytest.mark.full
def test_an_asynchronous_server_counts_staleness(tmp_path: Path) -> None:
    flags = f"{SMALL} {FEW} --log-dir {tmp_path} --name run"
    finished = launch("torchrun", "parameter_server", flags, ranks=3, warm=True).checked()
    figures = read_json(tmp_path / "run" / "summary.json")["rung"]
    mean, largest = figures["staleness"], figures["largest_staleness"]
    assert f"\nstaleness: {mean}\n" in finished.output
    # Both trainers' first gradients are of the first weights, so the later ones are stale.
    assert largest >= 1
    assert 0 < mean <= largest


# -- What RPC opens --------------------------------------------------------------------------------
def listening_at(launcher: subprocess.Popen) -> list[set[str]]:
    """Of each rank below a launcher: the addresses at which it listens."""
    return [
        {
            socket.laddr.ip
            for socket in rank.net_connections("tcp")
            if socket.status == psutil.CONN_LISTEN
        }
        for rank in psutil.Process(launcher.pid).children()
    ]


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize("name", RPC)
def test_ranks_on_one_host_listen_at_the_loopback_only(name: str, tmp_path: Path) -> None:
    rung, found = RUNGS[name], []

    def look(launcher: subprocess.Popen) -> None:
        wait_until((tmp_path / "run" / "metrics.jsonl").exists)  # RPC has started long before
        found.extend(listening_at(launcher))

    place = f"{SMALL} {rung.flags} --log-dir {tmp_path} --name run"
    command = f"{BIN}/torchrun --nproc-per-node {rung.ranks} {TRAINERS[name]} {place}"
    run(command.split(), meanwhile=look).checked()
    assert found == [{"127.0.0.1"}] * rung.ranks


def test_rpc_between_hosts_needs_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # which counts as not set
    with pytest.raises(UserError, match=r"RPC runs any code .* set GLOO_SOCKET_IFNAME"):
        bind_rpc()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("TP_SOCKET_IFNAME", "")
    bind_rpc()
    assert os.environ["TP_SOCKET_IFNAME"] == "eth7"


# Changes the weights of one rank after a step; ZeRO would make them equal again in the next.
DRIFT = """
real_update = module.update_ema
def update_ema(ema, model, config, step):
    if step == 6:
        next(model.parameters()).data.add_(1)
    real_update(ema, model, config, step)
module.update_ema = update_ema
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    "name",
    ["zero_optimizer", *(rarely(name) for name in ("mpi4py", "model_parallel", "ddp_with_rpc"))],
)
def test_weights_that_drift_apart_are_found(name: str, tmp_path: Path) -> None:
    """By the next check, and not by an earlier one."""
    changed = change_on_rank(1, "recipe.training.model", DRIFT, tmp_path)
    launcher, ranks = ("mpirun", 2) if name == "mpi4py" else start(name)[::2]
    flags = f"{SMALL} --arch resnet18 --weight-check-steps 3 --log-dir {tmp_path}"
    finished = launch(launcher, name, flags, ranks, warm=True, **changed)
    assert finished.returncode != 0
    assert "after step 6 the ranks hold different weights in conv1" in finished.output


# -- What is refused, and what is only told --------------------------------------------------------
TRY = f"{SMALL} --max-steps 1 --no-cuda"


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(
    ("rung", "ranks", "flags", "message"),
    [
        ("data_parallel", 1, TRY, "runs on one device, the CPU"),
        ("model_parallel", 2, TRY, "without GPUs both halves of the network are on the CPU"),
        ("pipeline", 2, "", "--batches-per-allreduce 1: is the number of micro-batches"),
        ("parameter_server", 1, "", "1 rank: the last one only serves; start at least 2"),
        ("ddp_with_rpc", 2, "--arch mobilenet_v2", "last layer is `fc`; choose a resnet"),
        ("rpc_pipeline", 2, "--arch mobilenet_v2", "this script can split only a ResNet"),
    ],
)
def test_what_cannot_be_done_is_refused_or_told(
    rung: str, ranks: int, flags: str, message: str, tmp_path: Path
) -> None:
    finished = launch(start(rung)[0], rung, f"{flags} --log-dir {tmp_path}", ranks, warm=True)
    assert (finished.returncode == 0) == (flags == TRY)
    assert message in finished.output
