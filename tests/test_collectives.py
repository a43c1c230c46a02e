"""The benchmark of collectives: its measuring loop, its reading of folders, and real launches."""

import json
import re
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from launching import run, words_of

from compare import collectives
from compare.collectives import BACKENDS, main, size_bytes
from compare.page.allreduce import read_measurement, table, text_report
from compare.plan.plan import Outcome
from recipe import allreduce_loop as allreduce
from recipe.allreduce_loop import Backend, pattern_of
from recipe.errors import UserError
from recipe.world import World

ROOT = Path(__file__).resolve().parent.parent
TRANSPORTS = dict(zip(BACKENDS, ("Gloo", "MPI", "MPI", "Gloo", "MPI"), strict=True))


def world_of(rank: int, size: int) -> World:
    return World(rank, size, rank, size, "mpirun", "here")


# -- The measuring loop ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 64, 293, 2048])
def test_sums_are_exact_on_the_fp16_wire_in_any_order(size):
    rows = torch.stack([pattern_of(world_of(rank, size), [rank], 7) for rank in range(size)])
    for order in (torch.arange(size), torch.randperm(size)):
        total = torch.zeros(7, dtype=torch.float16)
        for row in rows[order]:
            total += row.half()
        assert torch.equal(total.float(), pattern_of(world_of(0, size), range(size), 7))


def test_a_missing_or_doubled_rank_changes_the_sum():
    expected = pattern_of(world_of(0, 4), range(4), 7)
    for rank in range(4):
        own = pattern_of(world_of(rank, 4), [rank], 7)
        assert own.any(), "it is missed, and counts twice if it comes twice"
        assert not torch.equal(expected, pattern_of(world_of(0, 4), {*range(4)} - {rank}, 7))
    with pytest.raises(UserError, match="2049 ranks"):
        pattern_of(world_of(0, 2049), [0], 7)


class PairOfRanks(Backend):
    """Rank 0 of two, of which the other exists only in what the sums bring in."""

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values[0], values[0] + 100.0])


def timed(reduce, elements: tuple[int, ...], seconds: float = 0.01) -> dict:
    """What is measured of an engine that sums by `reduce(tensors)`."""
    backend = PairOfRanks(
        name="made-up",
        transport="thin air",
        device=torch.device("cpu"),
        versions={},
        prepare=lambda tensors, wire: lambda: reduce(tensors),
        barrier=lambda: None,
        close=lambda: None,
    )
    return allreduce.time_message(backend, world_of(0, 2), elements, "fp32", seconds)


def add_the_other(tensors) -> None:
    for tensor in tensors:
        tensor += pattern_of(world_of(1, 2), [1], len(tensor))


def test_a_repetition_takes_as_long_as_its_slowest_rank():
    line = timed(add_the_other, (11,))
    assert line["bytes"] == 44 and line["wrong_elements"] == 0
    assert line["repetitions"] == len(line["seconds"]) == allreduce.MIN_REPETITIONS
    assert timed(add_the_other, (1,), 1e9)["repetitions"] == allreduce.MAX_REPETITIONS
    assert all(seconds >= 100 for seconds in [*line["seconds"], line["seconds_median"]])


def test_sums_are_checked_afresh_after_the_last_repetition():
    """An engine that is right at first, and then hands back what it had, must not pass."""
    calls = []

    def right_once(tensors):
        if not calls:
            add_the_other(tensors)
        calls.append(1)

    assert timed(right_once, (10, 20))["wrong_elements"] > 0


def test_a_model_s_gradients_come_last_layer_first():
    from torchvision.models import squeezenet1_1

    sizes = [parameter.numel() for parameter in squeezenet1_1().parameters()]
    messages = allreduce.model_messages("squeezenet1_1")
    assert messages == {"model fused": [sum(sizes)], "model layers": sizes[::-1]}
    with pytest.raises(UserError, match="--model resnet51"):
        allreduce.model_messages("resnet51")


# -- Reading a folder and showing it ---------------------------------------------------------------


def write_folder(
    folder: Path, times: dict[str, list[float]], failed: str = "", load: float = 0.1
) -> Path:
    """Write a folder as a measurement leaves it. `times`: each block's seconds of the smallest
    message; others take longer in proportion, the fp16 wire twice as long. In the last block the
    launch of `failed` does."""
    blocks = max(map(len, times.values()))
    plan = {
        "backends": list(times),
        "workers": 4,
        "blocks": blocks,
        "wires": ["fp32", "fp16"],
        "model": "resnet50",
        "cores": 8,
        "warnings": ["the machine is busy"],
    }
    folder.mkdir(parents=True)
    (folder / "collectives.json").write_text(json.dumps(plan))
    messages = {"4096": 4096, str(1 << 28): 1 << 28, "model layers": 1 << 26}
    for name, of_blocks in times.items():
        for block, seconds in enumerate(of_blocks, start=1):
            lines = [
                {
                    "kind": "world",
                    "backend": name,
                    "transport": "MPI",
                    "device": "cpu",
                    "device_name": "A processor",
                    "hosts": ["a", "b"],
                    "versions": {"x": "1"},
                    "ranks": 4,
                    "threads": 1,
                }
            ]
            for (message, size), wire in product(messages.items(), ("fp32", "fp16")):
                if (name, wire) != ("mpi4py", "fp16"):
                    value = seconds * size / 4096 * (2 if wire == "fp16" else 1)
                    lines.append(
                        {
                            "kind": "allreduce",
                            "message": message,
                            "bytes": size,
                            "wire": wire,
                            "tensors": 1,
                            "seconds_median": value,
                        }
                    )
            lines.append({"kind": "copy", "bytes": 1 << 28})  # as earlier versions wrote
            place = folder / f"block-{block}" / name
            place.mkdir(parents=True)
            status = "failed" if (name, block) == (failed, blocks) else "completed"
            (place / "outcome.json").write_text(json.dumps({"status": status, "other_load": load}))
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (place / "measurements.jsonl").write_text(text)
    return folder


TIMES = {
    "torch.distributed": [1.0e-3, 2.0e-3, 4.0e-3],
    "horovod-mpi": [2.0e-3, 4.2e-3, 8.1e-3],
    "horovod-gloo": [1.1e-3, 1.8e-3, 4.0e-3],
    "mpi4py": [0.1e-3, 0.21e-3, 0.39e-3],
}


def test_figures(tmp_path):
    """Bandwidths are those of nccl-tests. Times drift fourfold from block to block; ratios, paired
    by block, hardly do."""
    measurement = read_measurement(write_folder(tmp_path / "m", TIMES))
    first = measurement.figures["torch.distributed", "4096", "fp32"]
    assert first.seconds == 2.0e-3 and measurement.rivals(first) == []
    assert first.busbw == pytest.approx(4096 / 2.0e-3 * 2 * 3 / 4)
    mine, half = (measurement.figures["horovod-mpi", "4096", wire] for wire in ("fp32", "fp16"))
    assert half.bytes == 4096  # the payload as the user sees it
    assert half.busbw == pytest.approx(mine.busbw / 2)
    assert measurement.rivals(mine) == [first]
    assert [other.wire for other in measurement.rivals(half)] == ["fp16", "fp32"]
    speed = mine.speed_against(first)
    assert speed.ratios == pytest.approx((1 / 2, 1 / 2.1, 1 / 2.025)) and speed.high < 0.6
    assert half.speed_against(mine).ratio == pytest.approx(0.5)


def test_what_is_said_is_narrow_and_names_what_is_not_available(tmp_path):
    measurement = read_measurement(write_folder(tmp_path / "m", TIMES))
    report = text_report(measurement)
    assert max(map(len, report.splitlines())) <= 100
    # mpi4py on the fp16 wire, of each message
    assert sum(line.endswith(" -") for line in table(measurement).splitlines()) == 3
    speeds = {tuple(re.split("  +", line.strip())) for line in report.splitlines()}
    against = "torch.distributed fp32"
    assert ("4 KiB", "horovod-mpi fp32", against, "0.49", "0.46 to 0.52", "decided") in speeds
    assert ("4 KiB", "horovod-gloo fp32", against, "1.003", "0.782 to 1.287") in speeds
    assert "warning: the machine is busy" in report and "kept cores busy" not in report


def test_a_backend_of_which_a_launch_failed_has_no_figures(tmp_path, capsys):
    folder = write_folder(tmp_path / "m", TIMES, failed="horovod-mpi", load=1.5)
    assert main(["--show", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "horovod-mpi: FAILED" in shown and "horovod-mpi fp32" not in shown
    assert "mpi4py fp32" in shown
    assert "launches other processes kept cores busy, 1.5 of 8 at worst" in shown


def test_an_interrupted_measurement_shows_its_complete_blocks(tmp_path):
    times = {name: values[: 3 if name == "mpi4py" else 2] for name, values in TIMES.items()}
    measurement = read_measurement(write_folder(tmp_path / "m", times))
    assert measurement.complete_blocks == 2
    assert all(len(one.seconds_of_blocks) == 2 for one in measurement.figures.values())
    report = text_report(measurement)
    assert "too few blocks" in report and "2 of 3 blocks are complete" in report


def test_an_interrupted_measurement_decides_nothing(tmp_path):
    folder = write_folder(tmp_path / "m", TIMES)
    assert re.search("decided$", text_report(read_measurement(folder)), re.MULTILINE)
    plan = json.loads((folder / "collectives.json").read_text())
    (folder / "collectives.json").write_text(json.dumps(plan | {"blocks": 5}))
    report = text_report(read_measurement(folder))
    assert not re.search("  decided$", report, re.MULTILINE)
    assert "3 of 5 blocks are complete, so nothing is decided" in report


def test_launches_that_differ_decide_nothing(tmp_path):
    folder = write_folder(tmp_path / "m", TIMES)
    path = folder / "block-2/horovod-mpi/measurements.jsonl"
    path.write_text(path.read_text().replace('"threads": 1', '"threads": 2'))
    report = text_report(read_measurement(folder))
    assert not re.search("  decided$", report, re.MULTILINE)
    assert "horovod-mpi: 2" in report.replace("\n  ", " ")


def test_a_folder_without_figures_is_refused(tmp_path, capsys):
    assert main(["--show", str(tmp_path)]) == 2
    assert "holds no measurement" in capsys.readouterr().err
    folder = write_folder(tmp_path / "m", {"mpi4py": [1e-3]}, failed="mpi4py")
    with pytest.raises(UserError, match=r"output\.log"):
        read_measurement(folder)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("collectives.json", "[]", "is not a JSON object"),
        ("block-2/mpi4py/outcome.json", '{"status": 7}', "status = 7"),
        ("collectives.json", '{"backends": ["mpi4py"]}', "missing required field `blocks`"),
        ("block-2/mpi4py/measurements.jsonl", '{"kind": "allr', "is not a JSON object"),
        (
            "block-2/mpi4py/measurements.jsonl",
            '{"kind": "world"}',
            "missing required field `transport`",
        ),
        ("block-2/mpi4py/measurements.jsonl", "", "lacks what it was measured on"),
    ],
)
def test_a_damaged_file_is_one_message(file, text, said, tmp_path, refusal):
    folder = write_folder(tmp_path / "m", TIMES)
    (folder / file).write_text(text)
    message = refusal(main, ["--show", str(folder)])
    assert said in message and Path(file).name in message


def test_a_lost_line_does_not_mix_messages(tmp_path, refusal):
    folder = write_folder(tmp_path / "m", TIMES)
    path = folder / "block-2/mpi4py/measurements.jsonl"
    first, _, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, *others]))
    assert "block 1 holds other messages" in refusal(main, ["--show", str(folder)])


def test_the_file_holds_the_figures_of_the_table(tmp_path):
    folder = write_folder(tmp_path / "m", TIMES)
    assert main(["--show", str(folder), "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert len(figures) == 3 * 2 * 3 + 3
    assert figures[0]["speeds"] == []
    assert {"against", "low", "high", "ratio"} <= figures[-1]["speeds"][0].keys()


def test_the_recorded_result_still_shows(capsys):
    assert main(["--show", str(ROOT / "results/xeon-2-cores/2026-11-21-allreduce")]) == 0
    shown = capsys.readouterr().out
    for row in (r"256 MiB  fp32 +349  0\.768 +192  1\.398", "model layers .* 3.53 .* decided"):
        assert re.search(row, shown)


def test_sizes_are_read_as_they_are_written():
    assert [size_bytes(text) for text in ("4096", "4K", "1g")] == [4096, 4096, 1 << 30]
    for text in ("0", "6", "4T", "K"):
        with pytest.raises(UserError, match=f"^--sizes {text}: is no size; write 4096, 4K"):
            size_bytes(text)


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


def test_what_is_not_installed_is_told_and_never_left_out_in_silence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("compare.running.checks.has_horovod", lambda: False)
    assert main(["--backends", "horovod-mpi"]) == 2
    assert "horovod_train/build_horovod.py" in capsys.readouterr().err
    monkeypatch.setattr(collectives, "start_command", lambda *_: Outcome("failed"))
    monkeypatch.setattr(collectives, "shown_tail", lambda place: "")
    assert main(["--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().out
    for name in ("horovod-mpi", "horovod-gloo"):
        assert f"warning: {name}: not available" in told
    plan = json.loads((tmp_path / "out" / "collectives.json").read_text())
    assert plan["backends"] == ["torch.distributed", "torch-mpi", "mpi4py"]


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("torch.distributed", {"workers": 3, "hosts": "a:2,b:1"}, "mpirun -x .* -np 3 -H a:2,b:1 "),
        ("torch-mpi", {}, "ddp_train/torch_allreduce.py .* --transport mpi --no-cuda "),
        ("horovod-gloo", {"network_interface": "eth1"}, " GLOO_SOCKET_IFNAME=eth1 "),
    ],
)
def test_commands(name, given, told):
    settings = {
        "workers": 2,
        "hosts": None,
        "network_interface": None,
        "sizes": [4],
        "wires": ["fp32"],
        "seconds": 0.1,
        "threads": 1,
        "model": "none",
        "cuda": True,
        **given,
    }
    assert re.search(told, " ".join(collectives.command(name, settings, Path("x"))))


def test_a_failed_launch_is_shown_and_not_tried_again(tmp_path, monkeypatch, capsys):
    fails = [sys.executable, "-c", "import sys; sys.exit('the wire is cut')"]
    monkeypatch.setattr(collectives, "command", lambda *_: fails)
    assert main(["--backends", "torch.distributed", "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert re.search("torch.distributed .* failed", told.out) and "| the wire is cut" in told.out
    assert "no block is complete" in told.err
    assert not (tmp_path / "out" / "block-2").exists()


# -- Real launchers --------------------------------------------------------------------------------


# Rank 1 throws its sum away, as a build with a broken copy would.
SABOTAGE = """
import sys
sys.path.insert(0, {root!r})
from dataclasses import replace
from recipe import allreduce_loop as allreduce
from {module} import connect
def connect_badly(config, world):
    backend = connect(config, world)
    def prepare(tensors, wire):
        reduce = backend.prepare(tensors, wire)
        def sabotaged():
            reduce()
            if world.rank == 1 and wire == "fp16":
                tensors[0][3] = 99.0
        return sabotaged
    return replace(backend, prepare=prepare)
allreduce.run("", connect_badly)
"""


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "module", "name"),
    [
        ("torchrun", "ddp_train.torch_allreduce", "torch.distributed"),
        ("horovodrun --mpi", "horovod_train.horovod_allreduce", "horovod-mpi"),
    ],
)
def test_a_wrong_sum_on_any_rank_fails_the_launch(launcher, module, name, tmp_path):
    script = tmp_path / "sabotage.py"
    script.write_text(SABOTAGE.format(root=str(ROOT), module=module))
    command = words_of(launcher, str(script))
    out = tmp_path / "lines.jsonl"
    done = run([*command, "--sizes", "4096", "--seconds", "0.01", "--no-cuda", "--out", str(out)])
    assert done.returncode != 0
    for part in (name, "4096 bytes", "fp16 wire", "wrong on rank 1, in 1 elements"):
        assert part in done.output
    assert not out.exists()


@pytest.mark.launch
@pytest.mark.full
def test_every_engine_sums_right(tmp_path):
    folder, sizes = tmp_path / "out", ("4", "4096", "4194308")
    done = run(
        [
            sys.executable,
            "compare/collectives.py",
            "--sizes",
            *sizes,
            "--model",
            "squeezenet1_1",
            "--blocks",
            "1",
            "--seconds",
            "0.01",
            "--no-cuda",
            "--out",
            str(folder),
            "--json",
            str(tmp_path / "a.json"),
        ]
    )
    assert done.returncode == 0, done.output
    for name in BACKENDS:
        place = folder / "block-1" / name
        text = (place / "measurements.jsonl").read_text()
        world, *lines = [json.loads(line) for line in text.splitlines()]
        assert (world["backend"], world["transport"]) == (name, TRANSPORTS[name])
        wires = ["fp32"] if name == "mpi4py" else ["fp32", "fp16"]
        assert (world["ranks"], world["threads"], world["wires"]) == (2, 1, wires)
        messages = (*sizes, "model fused", "model layers")
        assert [(x["message"], x["wire"]) for x in lines] == [*product(messages, wires)]
        assert all(len(line["seconds"]) == line["repetitions"] >= 3 for line in lines)
    figures = json.loads((tmp_path / "a.json").read_text())["figures"]
    assert len(figures) == 5 * (2 * 5 - 1)
