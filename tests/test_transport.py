"""What carries the gradients, in which number format, and which choices are refused."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock, patch

import needs
import pytest
import torch
from launching import SMALL, change_on_rank, launch, rarely
from making import CPU, a_config, a_world
from torch import nn

from ddp_train.rendezvous import choose_transport
from recipe.errors import UserError
from recipe.ranks import Ranks
from recipe.settings.config import Config
from recipe.settings.flags import WIRE_FORMATS, WireFormat
from recipe.training import wire_trial
from recipe.training.wire_trial import settle_wire_format

GPU = torch.device("cuda", 0)


def mpi(monkeypatch: pytest.MonkeyPatch, level: int, size: int = 2) -> None:
    """Stand in for an MPI with this level of thread support, and for the backend that needs it."""
    module = SimpleNamespace(
        COMM_WORLD=SimpleNamespace(size=size),
        THREAD_MULTIPLE=3,
        pickle=SimpleNamespace(__init__=lambda *_: None),
        Query_thread=lambda: level,
        Get_library_version=lambda: "Open MPI v4.1.8, package: ...\0",
    )
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=module))
    monkeypatch.setitem(sys.modules, "ddp_train.mpi_backend", SimpleNamespace())


@pytest.mark.parametrize(
    ("wanted", "device", "chosen"),
    [
        ("auto", CPU, ("Gloo", "gloo")),
        ("gloo", CPU, ("Gloo", "gloo")),
        ("mpi", CPU, ("MPI", "mpi4py")),
        ("auto", GPU, ("NCCL", "cpu:gloo,cuda:nccl")),
        ("nccl", GPU, ("NCCL", "cpu:gloo,cuda:nccl")),
        ("gloo", GPU, ("Gloo", "gloo")),
    ],
)
def test_transport_of_ddp(
    wanted: str, device: torch.device, chosen: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi(monkeypatch, level=3)
    world = a_world(1, 2, launcher="mpirun")
    assert choose_transport(a_config(transport=wanted), world, device) == chosen


@pytest.mark.parametrize(
    ("launcher", "device", "level", "size", "said"),
    [
        ("torchrun", CPU, 3, 2, "torchrun started this process, not MPI; .* mpirun or"),
        ("horovodrun", CPU, 3, 2, "horovodrun over Gloo started .* horovodrun --mpi$"),
        ("mpirun", GPU, 3, 2, "is on GPUs; use nccl, or add --no-cuda"),
        ("mpirun", CPU, 2, 2, "Open MPI v4.1.8 gives MPI_THREAD_SERIALIZED, .* MPI_THREAD_MULTIPL"),
        ("mpirun", CPU, 3, 1, "one of 2, but the engine sees a world of 1.* leave out --transport"),
    ],
)
def test_ddp_over_mpi_is_refused(
    launcher: str,
    device: torch.device,
    level: int,
    size: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mpi(monkeypatch, level, size)
    with pytest.raises(UserError, match=said):
        choose_transport(a_config(transport="mpi"), a_world(1, 2, launcher=launcher), device)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """horovod_train.engine with a stand-in for Horovod, whose properties a test chooses."""
    compression = SimpleNamespace(none=None, fp16=None)
    hvd = SimpleNamespace(
        size=lambda: 2, nccl_built=lambda: 0, cuda_built=lambda: False, Compression=compression
    )
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=hvd))
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    monkeypatch.delitem(sys.modules, "horovod_train.engine", raising=False)
    engine = importlib.import_module("horovod_train.engine")
    monkeypatch.delitem(sys.modules, "horovod_train.engine")
    environ = {}
    met = lambda world: environ.update(met_by=world.launcher)  # noqa: E731
    monkeypatch.setattr(engine, "rendezvous_through_mpi", met)
    monkeypatch.setattr(engine, "os", SimpleNamespace(environ=environ))
    monkeypatch.setattr(engine, "prepare_mpi", lambda world: None)

    def says(
        built: str = "gloo mpi",
        enabled: str = "",
        nccl: bool = False,
        adasum: bool = False,
        cuda: bool = False,
        **others: str,
    ) -> Any:
        for name in ("gloo", "mpi"):
            setattr(hvd, f"{name}_built", lambda name=name: name in built)
            setattr(hvd, f"{name}_enabled", lambda name=name: name in enabled)
        hvd.nccl_built, hvd.cuda_built = lambda: nccl, lambda: cuda or nccl
        environ.clear()
        environ.update(others)
        return engine

    return says


@pytest.mark.parametrize(
    ("wanted", "launcher", "enabled", "device", "nccl", "recorded"),
    [
        ("auto", "mpirun", "mpi", CPU, False, "MPI"),
        ("mpi", "mpirun", "mpi", CPU, False, "MPI"),
        ("auto", "horovodrun", "gloo", CPU, False, "Gloo"),
        ("gloo", "horovodrun", "gloo", CPU, False, "Gloo"),
        ("gloo", "none", "gloo", CPU, False, "Gloo"),
        ("gloo", "mpirun", "gloo", CPU, False, "Gloo"),
        ("auto", "mpirun", "gloo mpi", CPU, False, "Gloo"),  # MPI only for what they agree on
        ("auto", "mpirun", "mpi", GPU, True, "NCCL"),
        ("nccl", "mpirun", "mpi", GPU, True, "NCCL"),
    ],
)
def test_transport_of_horovod(
    wanted: str,
    launcher: str,
    enabled: str,
    device: torch.device,
    nccl: bool,
    recorded: str,
    engine: Any,
) -> None:
    config, world = a_config(transport=wanted), a_world(1, 2, launcher=launcher)
    module = engine(enabled=enabled, nccl=nccl)
    module.prepare(config, world)
    asked = {wanted} if wanted in ("gloo", "mpi") else set()
    assert {module.os.environ.get(name) for name in module.SELECTORS} - {None} == asked
    assert ("met_by" in module.os.environ) is (wanted == "gloo" and launcher == "mpirun")
    assert module.check_transport(config, world, device) == recorded


def test_a_horovod_for_gpus_without_nccl_is_warned_of(engine: Any, capsys: Any) -> None:
    module = engine(enabled="mpi", cuda=True)
    assert module.check_transport(a_config(), a_world(0, 2, launcher="mpirun"), GPU) == "MPI"
    assert "no NCCL, gradients go through the CPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wanted", "launcher", "horovod", "device", "said"),
    [
        (
            "auto",
            "horovodrun",
            {"enabled": "gloo", "adasum": True},
            CPU,
            "--use-adasum: needs MPI, not Gloo: start it with horovodr",
        ),
        ("mpi", "horovodrun", {}, CPU, "horovodrun over Gloo .* mpirun or horovodrun --mpi$"),
        ("mpi", "mpirun", {"built": "gloo"}, CPU, "was built without it; build it again"),
        ("mpi", "mpirun", {"enabled": "mpi", "nccl": True}, GPU, "by NCCL; use nccl, or add --no"),
        ("nccl", "mpirun", {"enabled": "mpi"}, GPU, "has no NCCL: make setup NCCL=1"),
        ("auto", "mpirun", {"enabled": "mpi"}, GPU, "was built for CPUs: .* setup NCCL=1, or add"),
        (
            "mpi",
            "mpirun",
            {"enabled": "gloo mpi", "HOROVOD_CPU_OPERATIONS": "gloo"},
            CPU,
            "mpi: HOROVOD_CPU_OPERATIONS says otherwise; unset it",
        ),
        (
            "auto",
            "mpirun",
            {"enabled": "mpi", "nccl": True, "half": True},
            GPU,
            "no fp16 statistics; add --keep-batchnorm-fp32 True",
        ),
    ],
)
def test_transport_of_horovod_is_refused(
    wanted: str,
    launcher: str,
    horovod: dict[str, Any],
    device: torch.device,
    said: str,
    engine: Any,
) -> None:
    config = a_config(transport=wanted, use_adasum="adasum" in horovod)
    if horovod.pop("half", False):
        config = replace(config, precision="O3", batch_norm="sync")
    world, module = a_world(1, 2, launcher=launcher), engine(**horovod)
    with pytest.raises(UserError, match=said):
        module.prepare(config, world)
        module.check_transport(config, world, device)


@pytest.mark.parametrize(
    ("asleep", "device", "sleeps"), [(True, CPU, 2), (False, CPU, 0), (True, GPU, 0)]
)
def test_on_a_cpu_waiting_for_horovod_sleeps_unless_turned_off(
    asleep: bool, device: torch.device, sleeps: int, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, clock, looks = engine(), Mock(), iter([False, False, True])
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module.hvd, "poll", lambda handle: next(looks), raising=False)
    optimizer = Mock(_handles={"not sent yet": (None, None), "sent": (7, None)})
    own = optimizer.synchronize
    module.waiting_asleep(optimizer, a_config(sleeping_poll=asleep), device).synchronize()
    assert clock.sleep.call_count == sleeps
    own.assert_called_once()


# Prints at the end of the trial whether Horovod was asked if a gradient is there.
POLLS = """
from types import SimpleNamespace
from recipe.training import wire_trial
real, asked = module.hvd.poll, []
module.hvd.poll = lambda handle: asked.append(handle) or real(handle)
wire_trial.gc = SimpleNamespace(collect=lambda: print("the trial slept:", bool(asked)))
"""


@pytest.mark.launch
@pytest.mark.parametrize("flag", ["", rarely("--no-sleeping-poll")])
def test_the_trial_of_wire_formats_waits_as_training_does(flag: str, tmp_path: Path) -> None:
    changed = change_on_rank(0, "horovod_train.engine", POLLS, tmp_path)
    words = f"{SMALL} --max-steps 1 --wire-format auto {flag} --log-dir {tmp_path}"
    finished = launch("mpirun", "horovod", words, warm=True, **changed).checked()
    assert f"the trial slept: {not flag}" in finished.output


COLLECTIVES = """
import sys
import torch
import torch.distributed as dist
from ddp_train.rendezvous import choose_transport, rendezvous_arguments
from recipe.ranks import Ranks
from recipe.settings.config import Config
from recipe.world import read_world

world = read_world()
_, backend = choose_transport(Config(transport="mpi"), world, torch.device("cpu"))
from mpi4py import MPI
assert MPI.COMM_WORLD.allgather((world.rank,)) == [[0], [1]], "as JSON: nothing is unpickled"
dist.init_process_group(backend, **rendezvous_arguments(world, backend))
rank, other = world.rank, 1 - world.rank
torch.set_num_threads(1)

values = torch.arange(6.0).view(2, 3) + rank
later = [torch.full((), rank + 1, dtype=torch.int64), torch.randn(70_000).half() * 100]
mine = later[1].clone()
works = [dist.all_reduce(tensor, async_op=True) for tensor in [values, *later]]
[work.wait() for work in works]
assert values.tolist() == [[1, 3, 5], [7, 9, 11]] and later[0].item() == 3

halves = [torch.empty_like(mine), torch.empty_like(mine)]
dist.all_gather(halves, mine)
assert torch.equal(halves[rank], mine) and not torch.equal(*halves)
assert torch.equal(later[1], halves[0] + halves[1]), "rounded once, to the nearest half"

parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
dist.broadcast(parameter, src=1)
assert parameter.tolist() == [1, 1, 1, 1]

errors = []
for wrong in (lambda: dist.all_reduce(torch.zeros(4, 4).t()[1:]),
              lambda: dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)):
    try:
        wrong()
        raise AssertionError("no error came back")
    except (RuntimeError, NotImplementedError) as error:
        errors.append(type(error))
assert errors == [RuntimeError, NotImplementedError]
dist.all_reduce(values)  # and all goes on
assert values[0].tolist() == [2, 6, 10]
dist.destroy_process_group()
sys.stdout.write("the end" + chr(10))
"""


@pytest.mark.launch
def test_collectives_over_mpi(tmp_path: Path) -> None:
    script = tmp_path / "collectives.py"
    script.write_text(COLLECTIVES)
    finished = launch("mpirun", str(script), "", warm=True).checked()
    assert finished.output.count("the end") == 2, finished.output


# ---- --wire-format auto takes what trains faster, and all ranks take the same ----


MODEL = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
AUTO = a_config(wire_format="auto", train_crop_size=8, batches_per_allreduce=3)


def settle(
    slow: str,
    others: list[float] | None = None,
    config: Config = AUTO,
    rounds_seen: list[int] | None = None,
) -> tuple[Config, list[Config]]:
    """Rank 0 of two, whose steps are slow with one number format, by a clock that the steps alone
    move; `others` are the seconds of the other rank, which is ready at once if they are left out.
    Also what was distributed; `rounds_seen` gets the rounds after which the ranks compared."""
    distributed: list[Config] = []
    now = 0.0

    def distribute(model: nn.Module, config: Config) -> tuple[nn.Module, torch.optim.Optimizer]:
        assert model is not MODEL  # which must not be trained
        distributed.append(config)

        def pass_time(*_: object) -> None:
            nonlocal now
            now += 0.02 if config.wire_format == slow else 0.001

        model.register_forward_pre_hook(pass_time)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        if others is not None and len(values) > 1:
            rounds = values.numel() // 4  # of two ranks and two formats
            if rounds_seen is not None:
                rounds_seen.append(rounds)
            row = torch.tensor(others * rounds, dtype=torch.float64)
            return values + Ranks(a_world(1, 2)).rows(row)
        return values

    with patch.object(wire_trial.time, "perf_counter", lambda: now):
        chosen = settle_wire_format(
            config, Ranks(a_world(0, 2), sum_over_ranks), MODEL, CPU, distribute
        )
    return chosen, distributed


def test_the_faster_format_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: value.clone() for name, value in MODEL.state_dict().items()}
    chosen, distributed = settle(slow="fp32")
    assert all(torch.equal(before[name], value) for name, value in MODEL.state_dict().items())
    assert all(parameter.grad is None for parameter in MODEL.parameters())
    assert chosen.wire_format == "fp16" and chosen.batches_per_allreduce == 3
    assert [config.wire_format for config in distributed] == list(WIRE_FORMATS)
    assert all(config.batches_per_allreduce == 1 for config in distributed)
    assert settle(slow="fp16")[0].wire_format == "fp32"
    lines = capsys.readouterr().out.splitlines()
    assert [line[:17] for line in lines] == ["wire format: fp16", "wire format: fp32"]


def test_each_step_of_the_trial_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow network the whole trial may take longer than --stall-timeout."""
    heartbeat = Mock()
    monkeypatch.setattr(wire_trial, "heartbeat", heartbeat)
    settle(slow="fp32")
    assert heartbeat.call_count == 6 * 2 * len(WIRE_FORMATS)  # rounds of two steps


@pytest.mark.parametrize(
    "settings", [{"evaluate": True}, *({"wire_format": name} for name in WIRE_FORMATS)]
)
def test_what_is_not_measured(settings: dict[str, Any]) -> None:
    chosen, distributed = settle(slow="fp32", config=replace(AUTO, **settings))
    assert chosen.wire_format == settings.get("wire_format", "fp32") and not distributed


def test_one_worker_sends_nothing() -> None:
    chosen = settle_wire_format(AUTO, Ranks(a_world(0, 1)), MODEL, CPU, Mock())
    assert chosen.wire_format == "fp32"


@pytest.mark.parametrize(
    ("slow", "others", "chosen"),
    [
        # fp16 rounds: of two that are equally fast, as far as timing can tell, fp32 is taken.
        ("none", [1.0, 0.992], "fp32"),
        ("none", [1.0, 0.98], "fp16"),
        ("fp32", [0.001, 5.0], "fp32"),  # the slowest rank, not this one, decides for all
    ],
)
def test_what_the_other_rank_measured_counts(slow: str, others: list[float], chosen: str) -> None:
    assert settle(slow, others)[0].wire_format == chosen


def test_close_formats_are_measured_longer() -> None:
    for seconds, rounds in ((0.95, [6, 21]), (0.5, [6])):  # the first of each does not count
        seen: list[int] = []
        settle(slow="none", others=[1.0, seconds], rounds_seen=seen)
        assert seen == rounds


def test_each_format_is_known_to_both_engines() -> None:
    """A format that is only in the table would be an error, not silently fp32."""
    pytest.importorskip("horovod", reason=needs.HOROVOD)
    from ddp_train.buckets import HOOKS
    from horovod_train.engine import COMPRESSION

    assert set(get_args(WireFormat)) == WIRE_FORMATS.keys() == HOOKS.keys() == COMPRESSION.keys()
    for wire in WIRE_FORMATS.values():
        dtype = getattr(torch, wire.dtype)
        assert wire.bytes == torch.empty(0, dtype=dtype).element_size()
        exact = torch.tensor([wire.exact_integers, wire.exact_integers + 1]).to(dtype).long()
        assert exact.tolist() == [wire.exact_integers, wire.exact_integers]
