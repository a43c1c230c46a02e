"""Row 10 of the benchmarks: its arithmetic, what it says where it cannot be measured, and
that it runs on hosts of its own and removes them. No test asserts a speed."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from launching import ROOT, read_json, run, wait_until
from records import a_block

from benchmarks import record, wire_format
from benchmarks.record import MISSED, REACHED, Options, Row
from compare.evidence.turns import Block
from compare.running.sides import MeasurementError
from tools import namespaces
from tools.namespaces import Host


def block(fp16: float, auto: float) -> Block:
    """Two rounds; the speed of fp16 as a multiple of fp32's, and of auto of the better one's."""
    return a_block({"fp32": [1] * 2, "fp16": [fp16] * 2, "auto": [max(1, fp16) * auto] * 2})


def worst(rates: dict[float | None, list[float]], chosen: str = "fp16", fp16: float = 1.5) -> Row:
    """The row of an engine whose auto did so in three blocks at each rate, against fp16."""
    blocks = [
        {rate: (block(fp16, autos[n]), chosen) for rate, autos in rates.items()} for n in range(3)
    ]
    return wire_format.worst_row("DDP, Gloo", blocks, 0.95)


@pytest.mark.parametrize(("fp16", "chosen"), [(1.5, "fp16"), (0.8, "fp32")])
def test_auto_is_held_against_the_better_one(fp16: float, chosen: str) -> None:
    row = worst({0.2: [0.99, 0.991, 0.992]}, chosen, fp16)
    assert row.value == pytest.approx(0.991, abs=0.002) and row.verdict == REACHED
    assert row.notes[1].startswith("0.2 Gb/s: 0.991 (")
    assert f"auto took {chosen} in 3 of 3 starts; fp16 / fp32 {fp16:.3f}" in row.notes[1]


@pytest.mark.parametrize(
    ("cores", "expected"),
    [({0, 1}, ([0], [1])), ({2, 3, 5, 7, 8}, ([2, 3], [5, 7])), ({4}, ([4], [4]))],
)
def test_each_host_has_cores_of_its_own(
    cores: set[int], expected: tuple[list[int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    assert tuple(wire_format.cores_of(host) for host in (0, 1)) == expected


def test_the_worst_rate_is_the_slowest_and_its_interval_is_for_all_rates() -> None:
    """Not the one whose interval is widest; upper ends are corrected, lower ends need not be."""
    slow, wide = [0.950, 0.952, 0.954], [0.90, 1.0, 1.1]
    row = worst({1: slow, 5: wide, None: [0.99, 1.0, 1.01]})
    assert "worst: 1 Gb/s" in row.notes[0] and row.notes[3].startswith("no limit: ")
    assert row.value == pytest.approx(0.952, abs=0.001) and row.verdict == MISSED
    alone = {rate: worst({rate: values}) for rate, values in ((1, slow), (5, wide))}
    assert row.low == pytest.approx(alone[5].low)
    assert alone[1].high < row.high < alone[5].high


def test_what_auto_chose_is_read_from_its_output(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_text("x\r\nwire format: fp16 (fp32 422 ms, fp16 212 ms for 8.69 MiB)\r\n")
    assert wire_format.read_choice(log) == "fp16"
    log.write_text("x\n")
    with pytest.raises(MeasurementError, match="does not say what it chose"):
        wire_format.read_choice(log)


def test_commands_can_be_pasted_on_a_host(tmp_path: Path) -> None:
    sides = wire_format.sides_at("horovod-mpi", 3, wire_format.START, Options(tmp_path))
    assert [side.name for side in sides] == ["fp32", "fp16", "auto"]
    shown = sides[2].shown()
    assert shown.startswith("mpirun -np 2 -H node0,node1 --bind-to none")
    assert "horovod_train/train.py" in shown and "--wire-format auto" in shown


def test_without_root_the_row_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
    rows = wire_format.measure(Options(tmp_path)).rows
    assert [row.verdict for row in rows] == ["needs root, tc"] * 2
    error = capsys.readouterr().err
    assert error.startswith("row 10 needs root, tc: ") and error.count("\n") == 1


def test_links_are_limited_on_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(
        namespaces, "call", lambda *words, check=True: called.append(" ".join(words))
    )
    made = [Host(name, "", name, None) for name in ("a", "b")]  # type: ignore[arg-type]
    namespaces.limit_rate(made, 0.2)
    namespaces.limit_rate(made[:1], 5)
    namespaces.limit_rate(made[:1], None)
    assert called[1] == (
        "tc -n b qdisc replace dev eth0 root tbf rate 200mbit burst 131072 latency 50ms"
    )
    assert "rate 5000mbit burst 625000" in called[2]
    assert called[3] == "tc -n a qdisc delete dev eth0 root"


# ---------------------------------------------------------------------------------------- on hosts


def told(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    if missing := namespaces.missing_tools("tc"):
        pytest.skip(f"hosts with slow links need {', '.join(missing)}")
    words = ["--quick", "--only", "10", "--out", str(tmp_path / "out")]
    return [sys.executable, "benchmarks/run.py", *words]


@pytest.mark.cluster
@pytest.mark.full
def test_the_benchmark_runs(command: list[str], tmp_path: Path) -> None:
    done = run(command, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.output
    (row,) = record.read_record(tmp_path / "out", "wire_format").rows
    assert row.value and row.value > 0, done.output
    kept = read_json(tmp_path / "out" / "wire_format.json")
    turns = kept["blocks"]["10 DDP, Gloo 0.5 Gb/s"][0]["turns"]
    assert sorted({turn["side"] for turn in turns}) == ["auto", "fp16", "fp32"]
    assert len(kept["commands"]) == 3
    again = run([*command, "--again"], PYTHONPATH=str(ROOT))
    assert again.returncode == 0 and "is there already" in again.output


@pytest.mark.cluster
@pytest.mark.full
def test_interrupted_it_leaves_nothing(command: list[str], tmp_path: Path) -> None:
    """In the middle of a block, with both hosts up and sides training or stopped on them."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    auto = tmp_path / "out" / "blocks" / "10-ddp-torchrun" / "1-0.5" / "auto"
    try:
        wait_until(lambda: auto.exists() or process.poll() is not None)
        own = psutil.Process(process.pid).children(recursive=True)
        cores = set()
        for one in own:
            with suppress(psutil.NoSuchProcess):  # helpers come and go
                command = one.cmdline()
                if "ddp_train/train.py" in command and "mpirun" not in command:
                    cores.add(tuple(one.cpu_affinity()))
        # Others may have hosts on this machine, too.
        names = {told("ip", "netns", "identify", str(one.pid)).strip() for one in own} - {""}
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted" in error
    assert auto.exists() and len(names) == 2
    assert cores == {tuple(wire_format.cores_of(host)) for host in (0, 1)}
    (mark,) = {name.split("-")[1] for name in names}
    assert mark not in told("ip", "netns", "list") + told("ip", "-o", "link")
    _, alive = psutil.wait_procs(own, timeout=5)  # an orphan's end is for init to note
    assert [one.cmdline() for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
