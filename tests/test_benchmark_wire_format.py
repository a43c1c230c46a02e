"""Row 10 of the benchmarks: its arithmetic, its plot, what it says where it cannot be measured, and
that it runs on hosts of its own and removes them. No test asserts a speed."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
from launching import ROOT, run, wait_until

from benchmarks import wire_format
from benchmarks.harness import bench, namespaces
from benchmarks.harness.bench import Row
from benchmarks.harness.blocks import MISSED, REACHED, Options
from benchmarks.harness.namespaces import Host
from benchmarks.wire_format import AtRate, Rate
from compare.evidence.turns import Block, Turn
from compare.running.sides import MeasurementError


def block(fp32: float, fp16: float, auto: float) -> Block:
    speeds = {"fp32": fp32, "fp16": fp16, "auto": auto}
    turns = [Turn(name, round_, 1.0, v, 1 / v) for round_ in (0, 1) for name, v in speeds.items()]
    return Block(1, tuple(speeds), 0.0, tuple(turns))


def at(gigabits: float | None, fp16: float, auto: float, chosen: str = "fp16") -> AtRate:
    blocks = [block(10, 10 * fp16, 10 * max(1, fp16) * auto * (1 + n / 1000)) for n in range(3)]
    return wire_format.at_rate("ddp", Rate(gigabits, 3), blocks, [chosen] * 3)


def test_auto_is_held_against_the_better_one() -> None:
    slow, fast = at(0.2, 1.5, 0.99), at(5, 0.8, 0.99, "fp32")
    assert (slow.better, fast.better) == ("fp16", "fp32")
    for one in (slow, fast):
        assert one.auto.value == pytest.approx(0.99, abs=0.002)
        assert one.auto.verdict == REACHED
    assert slow.fp16.ratio == pytest.approx(1.5)
    assert slow.told().startswith("0.2 Gb/s: 0.991 (")
    assert "auto took fp16 in 3 of 3 starts; fp16 / fp32 1.500" in slow.told()


@pytest.mark.parametrize(
    ("cores", "expected"),
    [({0, 1}, ([0], [1])), ({2, 3, 5, 7, 8}, ([2, 3], [5, 7])), ({4}, ([4], [4]))],
)
def test_each_host_has_cores_of_its_own(
    cores: set[int], expected: tuple[list[int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    assert tuple(wire_format.cores_of(host) for host in (0, 1)) == expected


def test_the_worst_rate_decides() -> None:
    found = [at(0.2, 1.5, 1.0), at(1, 1.1, 0.90), at(5, 0.8, 0.98)]
    assert wire_format.worst(found).rate.gigabits == 1
    row = wire_format.summary("ddp", found, wire_format.QUICK)
    assert row.verdict == MISSED and "worst of 3 rates" in row.name
    assert "the worst is 1 Gb/s" in row.notes
    assert row.notes[-1] == "fp16 pays below some 1.7 Gb/s"


def test_the_worst_rate_is_the_slowest_and_its_interval_is_for_all_rates() -> None:
    """Not the one whose interval is widest; upper ends are corrected, lower ends need not be."""

    def noisy(gigabits: float, values: tuple[float, ...]) -> AtRate:
        blocks = [block(10, 8, 10 * value) for value in values]
        return wire_format.at_rate("ddp", Rate(gigabits, 3), blocks, ["fp32"] * 3, num_rates=2)

    slow, wide = noisy(1, (0.950, 0.952, 0.954)), noisy(5, (0.90, 1.0, 1.1))
    row = wire_format.summary("ddp", [slow, wide], wire_format.QUICK)
    assert "the worst is 1 Gb/s" in row.notes
    assert row.value == pytest.approx(0.952, abs=0.001)
    assert (row.low, row.high) == (wide.auto.low, slow.auto.high)
    assert row.verdict == MISSED
    alone = wire_format.at_rate("ddp", Rate(5, 3), [block(10, 8, v) for v in (9, 10, 11)], ["fp32"])
    assert wide.auto.low == pytest.approx(alone.auto.low)
    assert alone.auto.high < wide.auto.high


def test_the_crossover_lies_between_two_rates() -> None:
    assert wire_format.crossover([at(1, 1.2, 1), at(4, 0.8, 1)]) == pytest.approx(2.0)
    assert wire_format.crossover([at(1, 1.2, 1), at(4, 1.1, 1), at(None, 0.8, 1)]) is None
    assert wire_format.no_crossover([at(1, 1.2, 1), at(None, 0.8, 1)]) == "at all limited rates"
    assert "none" in wire_format.no_crossover([at(1, 0.9, 1), at(4, 0.8, 1)])


def test_the_plot() -> None:
    found = {
        "ddp": [at(0.2, 1.5, 1), at(1, 0.9, 1, "fp32"), at(None, 0.8, 1, "fp32")],
        "horovod": [at(0.2, 1.8, 1), at(1, 1.2, 1), at(None, 0.8, 1)],
    }
    svg = wire_format.standalone(wire_format.draw(found))
    texts = [element.text for element in ElementTree.fromstring(svg).iter() if element.text]
    for expected in ("0.2", "no limit", "DDP, Gloo", "Horovod, MPI", "auto took fp32"):
        assert expected in texts
    assert any(text.startswith("DDP, 1 Gb/s: 1.00") for text in texts)


def test_what_auto_chose_is_read_from_its_output(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_text(
        "x\r\nwire format: fp16 (fp32 422 ms, fp16 212 ms for 8.69 MiB of gradients)\r\n"
    )
    assert wire_format.read_choice(log) == "fp16"
    log.write_text("x\n")
    with pytest.raises(MeasurementError, match="does not say what it chose"):
        wire_format.read_choice(log)


def test_commands_can_be_pasted_on_a_host() -> None:
    shown = wire_format.a_side("horovod", "auto", wire_format.QUICK, 3).shown()
    assert shown.startswith("mpirun -np 2 -H node0,node1 --bind-to none")
    assert "horovod_train/train.py" in shown and "--wire-format auto" in shown


def test_without_root_the_row_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
    rows = bench.measure_and_keep(
        "wire_format", wire_format.measure, Options(out=tmp_path, blocks=1, turns=1)
    )
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
    return [sys.executable, "benchmarks/wire_format.py", "--quick", "--out", str(tmp_path / "out")]


@pytest.mark.cluster
@pytest.mark.full
def test_the_benchmark_runs(command: list[str], tmp_path: Path) -> None:
    done = run(command, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.output
    (row,) = bench.read_rows(tmp_path / "out", "wire_format") or [Row(10, "none", None)]
    assert row.value and row.value > 0, done.output
    record = json.loads((tmp_path / "out" / "wire_format.json").read_text())
    (found,) = record["details"]["ddp"]
    assert found["chosen"][0] in wire_format.FORMATS
    turns = record["blocks"]["10 ddp 0.5 Gb/s"][0]["turns"]
    assert sorted({turn["side"] for turn in turns}) == ["auto", "fp16", "fp32"]
    assert sorted(record["commands"]) == ["ddp auto", "ddp fp16", "ddp fp32"]
    ElementTree.parse(tmp_path / "out" / "wire_format.svg")
    again = run(command, PYTHONPATH=str(ROOT))
    assert again.returncode == 0 and "is there already" in again.output


@pytest.mark.cluster
@pytest.mark.full
def test_interrupted_it_leaves_nothing(command: list[str], tmp_path: Path) -> None:
    """In the middle of a block, with both hosts up and sides training or stopped on them."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    auto = tmp_path / "out" / "blocks" / "10-ddp" / "block-1" / "auto-0.5-Gbps"
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
