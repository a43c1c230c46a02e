"""The benchmark of collectives: its measuring loop, its reading of folders, and real launches."""

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import LAUNCHERS, marked, run, wait_until

from compare import collectives
from compare.collectives import BACKENDS, main, size_bytes
from compare.evidence.paired import Estimate, estimate_ratio
from compare.page.collectives import (
    read_measurement,
    sentences,
    size_text,
    table,
    time_text,
    verdict,
)
from recipe import allreduce
from recipe.allreduce import Backend, Message, fill, first_difference, pattern_of
from recipe.errors import UserError
from recipe.world import World

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {
    "torch.distributed": "ddp_train/allreduce.py",
    "torch-mpi": "ddp_train/allreduce.py",
    "horovod": "horovod_train/allreduce.py",
    "mpi4py": "baselines/mpi_allreduce.py",
}


def world_of(rank: int, size: int) -> World:
    return World(rank, size, rank, size, "mpirun", "here")


# -- The measuring loop ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 64, 293, 2048])
def test_sums_are_exact_on_the_fp16_wire_in_any_order(size, monkeypatch):
    monkeypatch.setattr(allreduce, "CHUNK_ELEMENTS", 7)  # patterns of their shortest length
    rows = torch.stack([pattern_of(world_of(rank, size), [rank]) for rank in range(size)])
    for order in (torch.arange(size), torch.randperm(size)):
        total = torch.zeros(7, dtype=torch.float16)
        for row in rows[order]:
            total += row.half()
        assert torch.equal(total.float(), pattern_of(world_of(0, size), range(size)))


def test_a_missing_or_doubled_rank_changes_the_sum():
    expected = pattern_of(world_of(0, 4), range(4))
    for rank in range(4):
        own = pattern_of(world_of(rank, 4), [rank])
        assert first_difference(expected - own, expected) is not None
        assert first_difference(expected + own, expected) is not None


def test_too_many_ranks_for_an_exact_sum_are_refused():
    with pytest.raises(UserError, match="2049 ranks"):
        pattern_of(world_of(0, 2049), [0])


@pytest.mark.parametrize("length", [1, 1000, allreduce.CHUNK_ELEMENTS + 3])
def test_every_wrong_element_is_found(length):
    pattern = pattern_of(world_of(0, 2), range(2))
    tensor = torch.full((length,), -1.0)
    fill(tensor, pattern)
    assert first_difference(tensor, pattern) is None
    for element in {0, length // 2, length - 1}:
        wrong = tensor.clone()
        wrong[element] += 1
        found = first_difference(wrong, pattern)
        assert found == (element, wrong[element].item(), tensor[element].item())


def test_halves_that_changed_places_are_found():
    pattern = pattern_of(world_of(0, 2), range(2))
    tensor = torch.empty(1 << 16)
    fill(tensor, pattern)
    assert first_difference(tensor.roll(1 << 15), pattern) is not None


def pair_of_ranks(prepare, slower_by: float = 0.0) -> Backend:
    """Rank 0 of two, of which the other exists only in what the sums bring in."""

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        values[1] = values[0] + slower_by
        return values

    return Backend(
        name="made-up",
        transport="thin air",
        device=torch.device("cpu"),
        versions={},
        wires=("fp32", "fp16"),
        prepare=prepare,
        barrier=lambda: None,
        sum_over_ranks=sum_over_ranks,
    )


def adding_the_other(tensors, wire):
    other = pattern_of(world_of(1, 2), [1])

    def reduce() -> None:
        for tensor in tensors:
            tensor += other[: len(tensor)]

    return reduce


def test_a_repetition_takes_as_long_as_its_slowest_rank():
    backend = pair_of_ranks(adding_the_other, slower_by=100.0)
    line = allreduce.time_message(backend, world_of(0, 2), Message("44", (11,)), "fp32", 0.01)
    assert line["bytes"] == 44
    assert line["repetitions"] == len(line["seconds"]) == allreduce.MIN_REPETITIONS
    assert all(seconds >= 100 for seconds in line["seconds"])
    assert line["seconds_median"] >= 100


def test_short_messages_get_more_repetitions_within_a_limit():
    backend = pair_of_ranks(adding_the_other)
    line = allreduce.time_message(backend, world_of(0, 2), Message("4", (1,)), "fp32", 10.0)
    assert line["repetitions"] == allreduce.MAX_REPETITIONS


def test_a_wrong_sum_is_an_error_that_names_backend_size_wire_and_rank():
    def wrong(tensors, wire):
        reduce = adding_the_other(tensors, wire)

        def reduce_but_forget_one() -> None:
            reduce()
            tensors[1][5] -= 1

        return reduce_but_forget_one

    message = Message("model layers", (10, 20))
    with pytest.raises(UserError) as caught:
        allreduce.time_message(pair_of_ranks(wrong), world_of(0, 2), message, "fp16", 0.01)
    told = str(caught.value)
    for part in ("made-up", "model layers", "120 bytes", "fp16", "rank 0", "element 5 of tensor 1"):
        assert part in told


def test_sums_are_checked_afresh_after_the_last_repetition():
    """An engine that is right at first, and then hands back what it had, must not pass."""
    calls = []

    def right_once(tensors, wire):
        reduce = adding_the_other(tensors, wire)
        return lambda: reduce() if not calls and not calls.append(1) else None

    with pytest.raises(UserError, match="wrong on rank 0"):
        allreduce.time_message(
            pair_of_ranks(right_once), world_of(0, 2), Message("4096", (1024,)), "fp32", 0.01
        )


def test_a_copied_byte_counts_as_read_and_as_written(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(allreduce.time, "perf_counter", lambda: next(now))  # a copy takes 1 s
    line = allreduce.time_copies(pair_of_ranks(adding_the_other), world_of(0, 2), 4096)
    assert line["alone_bytes_per_second"] == 2 * 4096
    assert line["together_bytes_per_second"] == [2 * 4096, 2 * 4096]


def test_a_model_s_gradients_come_last_layer_first():
    from torchvision.models import squeezenet1_1

    fused, layers = allreduce.model_messages("squeezenet1_1")
    sizes = [parameter.numel() for parameter in squeezenet1_1().parameters()]
    assert layers.elements == tuple(reversed(sizes))
    assert fused.elements == (sum(sizes),)
    assert fused.bytes == layers.bytes == 4 * sum(sizes)
    with pytest.raises(UserError, match="--model resnet51"):
        allreduce.model_messages("resnet51")


# -- Reading a folder and showing it ---------------------------------------------------------------


def write_folder(
    folder: Path,
    times: dict[str, list[float]],
    workers: int = 4,
    sizes: tuple[int, ...] = (4096, 1 << 28),
    status: dict[tuple[int, str], str] | None = None,
    load: float = 0.1,
) -> Path:
    """Write a folder as a measurement leaves it. `times`: each block's seconds of the smallest
    message; others take longer in proportion, the fp16 wire twice as long."""
    blocks = max(map(len, times.values()))
    plan = {
        "backends": list(times), "workers": workers, "blocks": blocks, "wires": ["fp32", "fp16"],
        "sizes": sizes, "model": "resnet50", "cores": 8, "warnings": ["the machine is busy"],
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "collectives.json").write_text(json.dumps(plan))
    for name, of_blocks in times.items():
        for block, seconds in enumerate(of_blocks, start=1):
            wires = ["fp32"] if name == "mpi4py" else ["fp32", "fp16"]
            lines = [{
                "kind": "world", "backend": name, "transport": "MPI", "device": "cpu",
                "device_name": "A processor", "hosts": ["a", "b"], "versions": {"x": "1"},
            }]  # fmt: skip
            messages = [(str(size), size, 1) for size in sizes]
            for message, size, tensors in [*messages, ("model layers", 1 << 26, 161)]:
                for wire in wires:
                    value = seconds * size / sizes[0] * (2 if wire == "fp16" else 1)
                    lines.append({
                        "kind": "allreduce", "message": message, "bytes": size, "wire": wire,
                        "tensors": tensors, "repetitions": 3, "seconds_median": value,
                        "seconds": [value, value, value * (9 if name == "horovod-gloo" else 1)],
                    })  # fmt: skip
            lines.append({
                "kind": "copy", "bytes": 1 << 28, "alone_bytes_per_second": 10e9,
                "together_bytes_per_second": [4e9] * workers,
            })  # fmt: skip
            place = folder / f"block-{block}" / name
            place.mkdir(parents=True)
            ended = (status or {}).get((block, name), "completed")
            (place / "outcome.json").write_text(json.dumps({"status": ended, "other_load": load}))
            if ended == "completed":
                text = "".join(json.dumps(line) + "\n" for line in lines)
                (place / "measurements.jsonl").write_text(text)
    return folder


TIMES = {
    "torch.distributed": [1.0e-3, 2.0e-3, 4.0e-3],
    "horovod-mpi": [2.0e-3, 4.2e-3, 8.1e-3],
    "horovod-gloo": [1.1e-3, 1.8e-3, 4.0e-3],
    "mpi4py": [0.1e-3, 0.21e-3, 0.39e-3],
}


def test_bandwidths_are_those_of_nccl_tests(tmp_path):
    measurement = read_measurement(write_folder(tmp_path / "m", TIMES))
    cell = measurement.figures["torch.distributed", "4096", "fp32"]
    assert cell.median_seconds == 2.0e-3
    assert cell.algbw == pytest.approx(4096 / 2.0e-3)
    assert cell.busbw == pytest.approx(4096 / 2.0e-3 * 2 * 3 / 4)
    half = measurement.figures["torch.distributed", "4096", "fp16"]
    assert half.bytes == 4096  # the payload as the user sees it
    assert half.algbw == pytest.approx(cell.algbw / 2)


def test_ratios_are_paired_by_block(tmp_path):
    """Times drift fourfold from block to block; the ratio hardly does."""
    figures = read_measurement(write_folder(tmp_path / "m", TIMES)).figures
    first = figures["torch.distributed", "4096", "fp32"]
    mine = figures["horovod-mpi", "4096", "fp32"]
    speed = mine.speed_against(first)
    assert speed.ratios == pytest.approx((1 / 2, 1 / 2.1, 1 / 2.025))
    assert speed.high < 0.6
    assert first.speed_against(first) is None
    assert figures["horovod-mpi", "4096", "fp16"].speed_against(mine).ratio == pytest.approx(0.5)


def test_what_is_said_is_narrow_and_names_what_is_not_available(tmp_path):
    measurement = read_measurement(write_folder(tmp_path / "m", TIMES))
    lines = sentences(measurement)
    assert max(map(len, lines)) <= 100
    assert (
        sum(line.endswith(" -") for line in table(measurement).splitlines()) == 3
    )  # mpi4py on the fp16 wire: a message each
    text = "\n".join(lines)
    assert "horovod-mpi is 0.49 times as fast (0.4" in text
    assert "not decided for horovod-gloo" in text
    assert "warning: the machine is busy" in text
    assert "10.0 GB/s by one rank alone, 4.0 GB/s by each of 4 at once" in text.replace("\n ", "")


def test_figures_that_jump_are_told(tmp_path):
    times = {"torch.distributed": [1e-3] * 3, "horovod-gloo": [1e-3] * 3, "mpi4py": [1e-3, 9e-3]}
    times["mpi4py"].append(1e-3)  # steady within a launch, and not from launch to launch
    lines = sentences(read_measurement(write_folder(tmp_path / "m", times)))
    told = " ".join(line for line in lines[lines.index("", -12) :])
    assert "repetitions on torch.distributed" not in told
    assert "on horovod-gloo" in told  # within each launch
    assert "on mpi4py" in told


def test_other_load_during_the_launches_is_told(tmp_path):
    quiet, busy = (write_folder(tmp_path / str(load), TIMES, load=load) for load in (0.3, 1.5))
    assert "kept cores busy" not in " ".join(sentences(read_measurement(quiet)))
    told = " ".join(sentences(read_measurement(busy)))
    assert "in 12 of 12 launches other processes kept cores busy, 1.5 of 8 at worst" in told


def test_a_backend_of_which_a_launch_failed_has_no_figures(tmp_path, capsys):
    status = {(3, "horovod-mpi"): "failed"}
    folder = write_folder(tmp_path / "m", TIMES, status=status)
    assert main(["--show", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "horovod-mpi: FAILED" in shown
    assert "mpi4py is" in shown


def test_an_interrupted_measurement_shows_its_complete_blocks(tmp_path):
    times = {name: values[: 3 if name == "mpi4py" else 2] for name, values in TIMES.items()}
    measurement = read_measurement(write_folder(tmp_path / "m", times))
    assert measurement.complete_blocks == 2
    assert all(len(one.seconds) == 2 for one in measurement.figures.values())
    told = "\n".join(sentences(measurement))
    assert "no interval below 3 blocks" in told
    assert "2 of 3 blocks are complete" in told


def test_a_folder_without_figures_is_refused(tmp_path, capsys):
    assert main(["--show", str(tmp_path)]) == 2
    assert "holds no measurement" in capsys.readouterr().err
    status = {(1, "mpi4py"): "timed out"}
    folder = write_folder(tmp_path / "m", {"mpi4py": [1e-3]}, status=status)
    with pytest.raises(UserError, match=r"output\.log"):
        read_measurement(folder)


def test_files_hold_the_figures_of_the_table(tmp_path):
    folder = write_folder(tmp_path / "m", TIMES)
    words = [f"--{kind}={tmp_path / 'figures.'}{kind}" for kind in ("json", "svg")]
    assert main(["--show", str(folder), *words]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert len(figures) == 3 * 2 * 3 + 3
    assert figures[0]["speed_against_first"] is None
    assert {"low", "high", "ratio"} <= figures[-1]["speed_against_first"].keys()
    svg = ElementTree.parse(tmp_path / "figures.svg").getroot()
    text = " ".join(svg.itertext())
    for name in (*TIMES, "fp16 wire", "memory copy", "4 KiB", "256 MiB"):
        assert name in text
    assert "var(--" not in (tmp_path / "figures.svg").read_text()


@given(st.floats(min_value=1e-7, max_value=999))
def test_times_fit_their_column(seconds):
    text = time_text(seconds)
    assert len(text) <= 7
    number, unit = text.split()
    factor = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    assert float(number) * factor == pytest.approx(seconds, rel=0.01, abs=1e-8)


def test_sizes_are_read_as_they_are_written():
    assert [size_bytes(text) for text in ("4096", "4K", "256M", "1g")] == [
        4096, 4096, 256 << 20, 1 << 30,
    ]  # fmt: skip
    assert [size_text(size) for size in (512, 4096, 256 << 20)] == ["512 B", "4 KiB", "256 MiB"]


def test_verdicts_say_which_is_faster():
    fast = estimate_ratio([2.0, 2.1, 2.2], [1.0, 1.0, 1.1])
    assert verdict("x", fast, True).startswith("x is 2.0")
    assert "times as fast (" in verdict("x", fast, True)
    assert "x is 0.4" in verdict("x", fast.inverse(), True)
    assert verdict("x", fast, False).startswith("not decided for x (2.0")
    barely = Estimate(1.02, 1.0004, 1.045, ())
    assert verdict("x", barely, True) == "x is 1.0200 times as fast (1.0004 to 1.0450)"
    assert verdict("x", estimate_ratio([2.0], [1.0]), False) == "x is 2.00 times as fast"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workers", "1"], "--workers 1"),
        (["--seconds", "0"], "--seconds 0"),
        (["--hosts", "a:1,b:1", "--workers", "3"], "fewer slots"),
        (["--json", "nowhere/at/all.json"], "nowhere/at"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(words, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_installed_is_told_and_never_left_out_in_silence(monkeypatch, capsys):
    monkeypatch.setitem(BACKENDS, "horovod-mpi", replace(BACKENDS["horovod-mpi"], module="nowhere"))
    assert main(["--backends", "horovod-mpi", "--dry-run"]) == 2
    assert "horovod_train/build_horovod.py" in capsys.readouterr().err
    able, missing = collectives.installed(None)
    assert "horovod-mpi" not in able
    assert any(line.startswith("horovod-mpi: not available") for line in missing)


def test_hosts_are_reached_by_launchers_that_can(capsys):
    assert main(["--hosts", "a:1,b:1", "--backends", "torch.distributed", "--dry-run"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert command.startswith("mpirun -np 2 -H a:1,b:1")


def test_ddp_over_mpi_is_ddp_s_script_on_the_cpu(capsys):
    assert main(["--backends", "torch-mpi", "--dry-run"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert "ddp_train/allreduce.py" in command and "--no-cuda --transport mpi" in command


def test_it_starts_without_torch():
    code = "import compare.collectives, sys; print({'torch', 'horovod', 'mpi4py'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "set()", done.stderr


# -- Starting and ending, with a made-up launcher --------------------------------------------------

DRIVER = """
import os, subprocess, sys, time
from compare import collectives
from compare.running import launch
LAUNCHER = '''
import os, subprocess, sys, time
if os.environ["DEED"] == "fail":
    sys.exit("the wire is cut")
# As horovodrun on Gloo does it: a worker in a session of its own.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
time.sleep(300)
'''
collectives.Backend.command = lambda *_: [sys.executable, "-c", LAUNCHER]
launch.GRACE_SECONDS = 1.0
sys.exit(collectives.main(sys.argv[1:]))
"""


def start_driver(folder: Path, deed: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, "--out", str(folder / "out"), *words],
        env=os.environ | {"DEED": deed, "LAUNCH_MARK": str(folder), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_failed_launch_is_shown_and_not_tried_again(tmp_path):
    driver = start_driver(tmp_path, "fail", "--backends", "torch.distributed", "--blocks", "3")
    out, err = driver.communicate(timeout=60)
    assert driver.returncode == 2
    assert "FAILED: no more launches of torch.distributed" in out
    assert "| the wire is cut" in out
    assert "no launch has ended well" in err
    assert "Traceback" not in out + err
    assert not (tmp_path / "out" / "block-2").exists()


def test_a_launch_that_hangs_is_ended_with_all_its_processes(tmp_path):
    driver = start_driver(tmp_path, "hang", "--backends", "torch.distributed", "--timeout", "2")
    out, _ = driver.communicate(timeout=60)
    assert "TIMED OUT" in out
    wait_until(lambda: marked(str(tmp_path)) == [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_an_interruption(tmp_path, number):
    driver = start_driver(tmp_path, "hang", "--backends", "torch.distributed")
    wait_until(lambda: len(marked(str(tmp_path))) >= 4)  # driver, watchdog, launcher, worker
    driver.send_signal(number)
    _, err = driver.communicate(timeout=60)
    wait_until(lambda: marked(str(tmp_path)) == [])
    if number == signal.SIGINT:
        assert driver.returncode == 130
        assert "interrupted" in err
        assert "Traceback" not in err


# -- Real launchers --------------------------------------------------------------------------------


def measured(launcher: str, script: str, out: Path, *words: str) -> list[dict]:
    command = LAUNCHERS[launcher].format(python=sys.executable, trainer=script, ranks=2).split()
    done = run([*command, "--seconds", "0.01", "--no-cuda", "--out", str(out), *words])
    assert done.returncode == 0, done.output
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "engine", "name", "transport", "wires"),
    [
        ("torchrun", "torch.distributed", "torch.distributed", "Gloo", ["fp32", "fp16"]),
        ("mpirun", "torch.distributed", "torch.distributed", "Gloo", ["fp32", "fp16"]),
        ("horovodrun --mpi", "horovod", "horovod-mpi", "MPI", ["fp32", "fp16"]),
        ("horovodrun --gloo", "horovod", "horovod-gloo", "Gloo", ["fp32", "fp16"]),
        ("mpirun", "torch-mpi", "torch-mpi", "MPI", ["fp32", "fp16"]),
        ("mpirun", "mpi4py", "mpi4py", "MPI", ["fp32"]),
    ],
)
def test_every_engine_sums_right(launcher, engine, name, transport, wires, tmp_path):
    lines = measured(
        launcher, SCRIPTS[engine], tmp_path / "lines.jsonl",
        "--sizes", "4", "4096", "4194308", "--model", "squeezenet1_1",
        "--transport", "mpi" if name == "torch-mpi" else "auto",
    )  # fmt: skip
    world, copy = lines[0], lines[-1]
    assert (world["backend"], world["transport"]) == (name, transport)
    assert (world["ranks"], world["threads"], world["wires"]) == (2, 1, wires)
    cells = [(line["message"], line["wire"]) for line in lines[1:-1]]
    messages = ["4", "4096", "4194308", "model fused", "model layers"]
    assert cells == [(message, wire) for message in messages for wire in wires]
    assert all(len(line["seconds"]) == line["repetitions"] >= 3 for line in lines[1:-1])
    assert all(value > 0 for line in lines[1:-1] for value in line["seconds"])
    assert copy["bytes"] == max(line["bytes"] for line in lines[1:-1])
    assert len(copy["together_bytes_per_second"]) == 2
    assert all(rate > 0 for rate in copy["together_bytes_per_second"])


# Rank 1 throws its sum away, as a build with a broken copy would.
SABOTAGE = """
import sys
sys.path.insert(0, {root!r})
from {module} import main, prepare, read_world
import {module} as module
from recipe.errors import one_message
from recipe.allreduce import parse_options
world = read_world()
def broken(tensors, wire):
    reduce = prepare(tensors, wire)
    def sabotaged():
        reduce()
        if world.rank == 1 and wire == "fp16":
            tensors[0][3] = 99.0
    return sabotaged
module.prepare = broken
with one_message(world):
    main(parse_options(""), world)
"""


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "module", "name"),
    [
        ("torchrun", "ddp_train.allreduce", "torch.distributed"),
        ("horovodrun --mpi", "horovod_train.allreduce", "horovod-mpi"),
    ],
)
def test_a_wrong_sum_on_any_rank_fails_the_launch(launcher, module, name, tmp_path):
    script = tmp_path / "sabotage.py"
    script.write_text(SABOTAGE.format(root=str(ROOT), module=module))
    command = LAUNCHERS[launcher].format(python=sys.executable, trainer=script, ranks=2).split()
    out = tmp_path / "lines.jsonl"
    done = run([*command, "--sizes", "4096", "--seconds", "0.01", "--no-cuda", "--out", str(out)])
    assert done.returncode != 0
    for part in (name, "4096 bytes", "fp16 wire", "wrong on rank 1", "element 3", "is 99"):
        assert part in done.output
    assert not out.exists()


@pytest.mark.launch
@pytest.mark.full
def test_the_whole_command(tmp_path):
    folder = tmp_path / "out"
    done = run([
        sys.executable, "compare/collectives.py", "--sizes", "4K", "64K", "--model", "none",
        "--blocks", "1", "--seconds", "0.01", "--no-cuda", "--out", str(folder),
        "--json", str(tmp_path / "a.json"), "--svg", str(tmp_path / "a.svg"),
    ])  # fmt: skip
    assert done.returncode == 0, done.output
    figures = json.loads((tmp_path / "a.json").read_text())
    assert set(figures["backends"]) == set(BACKENDS)
    assert len(figures["figures"]) == 2 * (2 * 5 - 1)
    threads = {world["threads"] for world in figures["backends"].values()}
    assert threads == {1}
    for name in BACKENDS:
        place = folder / "block-1" / name
        assert SCRIPTS.get(name, SCRIPTS["horovod"]) in (place / "command.txt").read_text()
        outcome = json.loads((place / "outcome.json").read_text())
        assert (outcome["status"], outcome["leftover_processes"]) == ("completed", 0)
    ElementTree.parse(tmp_path / "a.svg")
