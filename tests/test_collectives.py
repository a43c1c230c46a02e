"""The all-reduce alone: the loop on each rank, the plan, the table, and real launchers."""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from records import MadeUpBlocks

from compare import collectives
from compare.collectives import BACKENDS, main
from compare.evidence.record import Record, read_comparison
from compare.page.allreduce import figures_of
from compare.plan.configurations import ENGINES
from compare.plan.plan import Run
from compare.running.scheduler import MeasurementError
from recipe import allreduce_loop
from recipe.allreduce_loop import Backend, Message, elements_of, pattern_of
from recipe.errors import UserError
from recipe.world import World

ROOT = Path(__file__).resolve().parent.parent
TRANSPORTS = dict(zip(BACKENDS, ("Gloo", "MPI", "MPI", "Gloo", "MPI"), strict=True))


def world_of(rank: int, size: int) -> World:
    return World(rank, size, rank, size, "mpirun", "here")


# -- The loop on each rank -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 64, 293, 2048])
def test_sums_are_exact_on_the_fp16_wire_in_any_order(size: int) -> None:
    rows = torch.stack([pattern_of(world_of(rank, size), [rank])[:7] for rank in range(size)])
    for order in (torch.arange(size), torch.randperm(size)):
        total = torch.zeros(7, dtype=torch.float16)
        for row in rows[order]:
            total += row.half()
        assert torch.equal(total.float(), pattern_of(world_of(0, size), range(size))[:7])


def test_a_missing_or_doubled_rank_changes_the_sum() -> None:
    expected = pattern_of(world_of(0, 4), range(4))
    for rank in range(4):
        own = pattern_of(world_of(rank, 4), [rank])
        assert own.any(), "it is missed, and counts twice if it comes twice"
        assert not torch.equal(expected, pattern_of(world_of(0, 4), {*range(4)} - {rank}))
    with pytest.raises(UserError, match="2049 ranks"):
        pattern_of(world_of(0, 2049), [0])


@dataclass
class OtherRank:
    """Rank 1 of two, as rank 0 sees it; its clock shows what the sums and barriers took."""

    wrong_from: float = float("inf")  # the number of the sum from which it brings nothing
    now: float = 0.0
    sums: int = 0
    wires: list[str] = field(default_factory=list)

    def backend(self) -> Backend:
        return Backend("thin air", torch.device("cpu"), self.prepare, self.wait)

    def prepare(self, tensors: Any, wire: str) -> Any:
        self.wires.append(wire)
        return lambda: self.reduce(tensors)

    def reduce(self, tensors: Any) -> None:
        self.sums, self.now = self.sums + 1, self.now + 3.0
        pattern = pattern_of(world_of(1, 2), [1])
        for tensor in tensors if self.sums < self.wrong_from else ():
            tensor += pattern.repeat(len(tensor) // len(pattern) + 1)[: len(tensor)]

    def wait(self) -> None:
        self.now += 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> OtherRank:
    other = OtherRank()
    monkeypatch.setattr(allreduce_loop, "time", other)
    return other


def test_the_sum_alone_is_timed(other: OtherRank) -> None:
    for case, num_bytes in (("4-fp32", 4), ("64K-fp16", 65536)):  # less and more than the pattern
        message = Message(case, other.backend(), world_of(0, 2))
        assert message.sum() == message.sum() == 3.0 and message.bytes == num_bytes
    assert other.wires == ["fp32", "fp16"]


def test_each_sum_is_checked_afresh(other: OtherRank) -> None:
    """An engine that is right at first, and then hands back what it had, must not pass."""
    other.wrong_from = 2
    message = Message("4K-fp16", other.backend(), world_of(0, 2))
    message.sum()
    with pytest.raises(UserError, match=r"4K-fp16 \(4096 bytes\) is wrong on rank 0, in \d+ elem"):
        message.sum()


class Turns:
    """Asks for these cases, one sum of each, and notes what the loop says of them."""

    transport = ""
    ranks_per_gpu: int | None = None
    weights: Any = None

    def __init__(self, *cases: str) -> None:
        self.case, self.cases, self.done = "", list(cases), list[tuple[str, float, float]]()

    def step_ended(self, *, unit: str, amount: float, seconds: float) -> None:
        assert unit == "bytes"
        self.done.append((self.case, amount, seconds))
        if not self.cases:
            raise EOFError
        self.case = self.cases.pop(0)


def test_the_loop_sums_what_each_turn_asks_for(other: OtherRank) -> None:
    turns = Turns("8K-fp32", "squeezenet1_1.layers-fp16", "8K-fp32")
    with pytest.raises(EOFError):
        allreduce_loop.sum_for_ever(lambda *_: other.backend(), world_of(0, 2), turns)
    layers = 4 * sum(elements_of("squeezenet1_1.layers")) / 2  # each of two ranks brings a half
    first, *others = turns.done
    assert first == ("", 2048.0, 3.0)
    assert [amount for _, amount, _ in others] == [4096.0, layers, 4096.0]
    assert turns.transport == "thin air" and turns.weights().keys() == {"sum"}


def test_a_model_s_gradients_come_last_layer_first() -> None:
    from torchvision.models import squeezenet1_1

    sizes = [parameter.numel() for parameter in squeezenet1_1().parameters()]
    assert elements_of("squeezenet1_1.layers") == sizes[::-1]
    assert elements_of("squeezenet1_1.fused") == [sum(sizes)]
    with pytest.raises(UserError, match="--model resnet51"):
        elements_of("resnet51.fused")


def test_sizes_are_read_as_they_are_written() -> None:
    assert [elements_of(text) for text in ("4096", "4K", "1G")] == [[1024], [1024], [1 << 28]]
    for text in ("0", "6", "4T", "K"):
        with pytest.raises(UserError, match=f"^--sizes {text}: is no size; write 4096, 4K"):
            elements_of(text)


# -- Measured, recorded and shown ------------------------------------------------------------------


# The bytes/s at which each backend sums, and how long it takes at least, in s: on the fp16 wire it
# is half as fast. mpi4py is ten times as fast as torch.distributed, Horovod half as fast.
SPEEDS = {"torch.distributed": 1e9, "horovod-mpi": 0.5e9, "horovod-gloo": 1e9, "mpi4py": 1e10}


def bytes_per_second(side: Run) -> float:
    return SPEEDS[side.side] / (2 if side.case.endswith("-fp16") else 1)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MadeUpBlocks:
    """Stands for real launches of these backends."""
    blocks = MadeUpBlocks(bytes_per_second, 0.01, unit="bytes")
    monkeypatch.setattr("compare.running.comparison.run_blocks", blocks)
    monkeypatch.setattr("compare.running.checks.missing_for", lambda configuration: "")
    monkeypatch.setattr("compare.running.checks.warn", lambda plan, folder: [])
    monkeypatch.chdir(tmp_path)
    return blocks


def collect(*words: str) -> int:
    return main(["--backends", *SPEEDS, "--out", "out", "--model", "none", *words])


def test_one_launch_a_block_measures_all_cases(measured: MadeUpBlocks) -> None:
    assert collect("--sizes", "4K", "1M") == 0
    record = read_comparison(Path("out"))
    assert [group.case for group in record.groups] == ["4K-fp32", "4K-fp16", "1M-fp32", "1M-fp16"]
    assert [group.num_blocks for group in record.groups] == [3] * 4
    assert measured.folders == [Path(f"out/turns/4K-fp32/block-{number}") for number in (1, 2, 3)]


def test_figures(measured: MadeUpBlocks) -> None:
    """Bandwidths are those of nccl-tests."""
    measured.ranks = 4
    assert collect("--sizes", "64", "--workers", "4") == 0
    figures = {(one.wire, one.backend): one for one in figures_of(read_comparison(Path("out")))}
    first, half = figures["fp32", "torch.distributed"], figures["fp16", "horovod-mpi"]
    assert first.algbw == pytest.approx(1e9, rel=0.05) and first.message == "64 B"
    assert first.busbw == pytest.approx(first.algbw * 2 * 3 / 4)
    assert first.seconds == pytest.approx(64 / first.algbw)
    assert first.against_first is first.against_fp32 is None and first.decision == "undecided"
    assert half.bytes == 64, "the payload as the user sees it"
    assert half.against_first and half.against_first.ratio == pytest.approx(0.5, rel=0.05)
    assert half.against_fp32 and half.against_fp32.ratio == pytest.approx(0.5, rel=0.05)
    assert half.decision == "slower" and figures["fp32", "mpi4py"].decision == "faster"
    assert figures["fp32", "horovod-gloo"].decision != "faster"


def test_the_table_and_the_file_hold_the_figures(
    measured: MadeUpBlocks, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect("--sizes", "64", "--json", "figures.json") == 0
    shown = capsys.readouterr().out
    assert re.search(r"64 B +fp32 +torch.distributed +0\.0000\d+ +(1\.0|0\.9)\d+ ", shown)
    assert re.search(r"\n +horovod-mpi .* 0\.\d+ \(0\.\d+ to 0\.\d+\) \*", shown)
    written = json.loads(Path("figures.json").read_text())
    assert len(written["figures"]) == 2 * len(SPEEDS) and written["blocks"] == 3
    assert {"low", "high", "ratio"} <= written["figures"][-1]["against_fp32"].keys()
    assert main(["--show", "out"]) == 0
    assert capsys.readouterr().out.strip() in shown


def test_what_is_unfinished_decides_nothing(
    measured: MadeUpBlocks, capsys: pytest.CaptureFixture[str]
) -> None:
    measured.error, measured.error_after = MeasurementError("mpi4py ended"), 2
    assert collect("--sizes", "64") == 1
    assert "mpi4py ended" in capsys.readouterr().out
    assert main(["--show", "out"]) == 0
    shown = capsys.readouterr().out
    assert "warning: unfinished, so nothing is decided: 2 of 3 blocks" in shown
    assert not re.search(r"\d\) \*", shown)


def test_one_backend_alone_is_measured(
    measured: MadeUpBlocks, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--backends", "mpi4py", "--sizes", "64", "--wires", "fp32", "--model", "none"]
    assert main([*words, "--blocks", "1"]) == 0
    assert re.search("64 B +fp32 +mpi4py", capsys.readouterr().out)


def test_another_comparison_is_not_shown(measured: MadeUpBlocks, refusal: Any) -> None:
    measured.unit = "images"
    assert collect("--sizes", "64") == 2
    assert "holds no measurement of all-reduces" in refusal(main, ["--show", "out"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workers", "1"], "--workers 1"),
        (["--blocks", "0"], "--blocks, "),
        (["--hosts", "a:1,b:1", "--workers", "3"], "fewer slots"),
        (["--json", "nowhere/at/all.json"], "nowhere/at"),
        (["--sizes", "6"], "--sizes 6: is no size"),
        (["--model", "resnet51"], "--model resnet51"),
        (["--backends", "gloo"], "--backends gloo"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(
    words: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder_for_the_record(tmp_path: Path, refusal: Any) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory" in refusal(main, ["--out", str(tmp_path / "file")])


def test_what_is_not_installed_is_told_and_never_left_out_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("compare.running.checks.has_horovod", lambda: False)
    with pytest.raises(UserError, match="horovod_train/build_horovod"):
        collectives.available(["horovod-mpi"])
    names, warnings = collectives.available([])
    assert names == ["torch.distributed", "torch-mpi", "mpi4py"]
    assert [text.partition(":")[0] for text in warnings] == ["horovod-mpi", "horovod-gloo"]


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("torch.distributed", {"workers": 3, "hosts": "a:2,b:1"}, "mpirun .*-np 3 -H a:2,b:1 "),
        ("torch-mpi", {}, "allreduce_side.py ddp_train/torch_allreduce.py .* mpi --no-cuda$"),
        ("torch-mpi", {"share_gpu": True}, " --transport mpi --no-cuda$"),
        ("horovod-mpi", {"share_gpu": True}, " --threads 1 --share-gpu$"),
        ("horovod-gloo", {"network_interface": "eth1"}, " GLOO_SOCKET_IFNAME=eth1 "),
    ],
)
def test_commands(name: str, given: dict[str, Any], told: str) -> None:
    settings = collectives.Measuring(**given)
    assert re.search(told, " ".join(collectives.command(name, settings)))


# -- Real launchers --------------------------------------------------------------------------------


# Rank 1 throws its sum away, as a build with a broken copy would.
SABOTAGE = """
from dataclasses import replace
from {module} import connect as connect_well
def connect(config, world):
    backend = connect_well(config, world)
    def prepare(tensors, wire):
        reduce = backend.prepare(tensors, wire)
        def sabotaged():
            reduce()
            if world.rank == 1 and wire == "fp16":
                tensors[0][3] = 99.0
        return sabotaged
    return replace(backend, prepare=prepare)
"""


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "engine", "module"),
    [
        ("torch.distributed", "ddp", "ddp_train.torch_allreduce"),
        ("horovod-mpi", "horovod", "horovod_train.horovod_allreduce"),
    ],
)
def test_a_wrong_sum_on_any_rank_fails_the_launch(
    name: str,
    engine: str,
    module: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "bad" / "sabotage.py"
    script.parent.mkdir()
    script.write_text(SABOTAGE.format(module=module))
    monkeypatch.setitem(ENGINES, engine, replace(ENGINES[engine], allreduce=str(script)))
    words = ["--backends", name, "--sizes", "4K", "--model", "none", "--no-cuda"]
    assert main([*words, "--blocks", "1", "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().out
    for part in (name, "4K-fp16 (4096 bytes) is wrong on rank 1, in 1 elements"):
        assert part in told
    assert not list(Record.open(tmp_path / "out").groups[0].blocks)


@pytest.mark.launch
@pytest.mark.full
def test_every_engine_sums_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compare.running.scheduler.PATIENCE", 0.0)
    monkeypatch.setattr("compare.running.scheduler.TURN_SECONDS", 0.05)
    folder, sizes = tmp_path / "out", ("4", "4096", "4194308")
    words = ["--sizes", *sizes, "--model", "squeezenet1_1", "--blocks", "1", "--no-cuda"]
    assert main([*words, "--out", str(folder)]) == 0
    record = read_comparison(folder)
    used = {side.configuration: side.environment.transport for side in record.sides}
    assert used == TRANSPORTS
    messages = ["4 B", "4 KiB", "4 MiB", "squeezenet1_1 fused", "squeezenet1_1 layers"]
    figures = figures_of(record)
    assert [*dict.fromkeys(figure.message for figure in figures)] == messages
    assert len(figures) == 5 * 5 * 2 and {figure.wire for figure in figures} == {"fp32", "fp16"}
    for block in (block for group in record.groups for block in group.blocks):
        assert len({*block.weights.values()}) == 1, "all backends come to the same bits"
