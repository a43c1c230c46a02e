"""Measuring by turns: what turns come to, sides that are paused, who of them dies, and blocks until
enough is known.

No test asserts a speed.
"""

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from launching import TRAINERS, marked, run
from msgspec import structs
from records import MadeUpBlocks, a_block, lines_of

from compare import run as run_module
from compare.evidence import turns
from compare.evidence.group import Group
from compare.evidence.record import FILE, Record
from compare.evidence.stopping import BlockCost, next_groups
from compare.evidence.turns import Turn, quiet_load
from compare.for_scripts import comparison_side
from compare.for_scripts.comparison_side import DELAY, LEAD_IN_STEPS, VERSION, State, receive, send
from compare.for_scripts.comparison_side import Client as SideClient
from compare.plan import plan_file
from compare.plan.configurations import (
    CONFIGURATIONS,
    DEFAULT_CONFIGURATIONS,
    SCRIPT,
    Configuration,
)
from compare.plan.environment import ROOT
from compare.plan.plan import Case, OwnScript, Plan, Run, Words
from compare.run import parse_options
from compare.running import comparison, take_turns
from compare.running import scheduler as scheduler_module
from compare.running.allreduce_side import AllReduceClient
from compare.running.checks import missing_for
from compare.running.comparison import (
    check_same_plan,
    is_finished,
    record_plan,
    resumed,
)
from compare.running.launch import marked_processes
from compare.running.ranks import Rank, StartedSide
from compare.running.scheduler import (
    HINTS_BY_OUTPUT,
    NO_ROOM,
    MeasurementError,
    Scheduler,
    make_turn,
    run_blocks,
)
from compare.running.take_turns import TrainerClient
from recipe import start
from recipe.errors import UserError
from recipe.record.schema import PHASES
from recipe.settings.flags import Config
from recipe.watch import engine_timeout
from recipe.world import read_world


def side(name: str = "x", *command: str, **changes: Any) -> Run:
    """A script of a user's own."""
    return Run(1, Configuration(name, SCRIPT, SCRIPT, command=command or ("p",), **changes), 0, 1)


def trainer(name: str = "ddp-torchrun", flags: str = "--batch-size 8", **changes: Any) -> Run:
    configuration = replace(CONFIGURATIONS[name], **changes)
    return Run(1, configuration, 2, 1, flags=(*flags.split(), "--no-cuda", "--threads", "1"))


PLAN = Plan(steps=5)


def two_rounds(*_: object) -> int:
    return 2


SMALL = "--arch shufflenet_v2_x0_5 --train-crop-size 16 --batch-size 4"


# ------------------------------------------------------------------------------ what turns come to


def test_a_blocks_ratio_is_that_of_all_images_over_all_seconds() -> None:
    # The machine is three times as fast in the second round.
    two = a_block({"a": [9, 27], "b": [10, 30]})
    assert two.rate("b", turns.throughput) == pytest.approx((10 + 30) / 2)
    same = tuple(replace(turn, images=30, seconds=30 / turn.images) for turn in two.turns)
    equal_work = replace(two, turns=same)  # as trainers do: the slow round counts three times
    assert equal_work.rate("b", turns.throughput) == pytest.approx(2 / (1 / 10 + 1 / 30))
    assert turns.estimate([two], {"a": 1, "b": -1}).ratio == pytest.approx(0.9)
    inverse = turns.estimate([two], {"a": -1, "b": 1}, turns.work_per_cpu_second)
    assert inverse.ratio == pytest.approx(10 / 9)


def test_loud_rounds_do_not_count() -> None:
    loud = a_block({"a": [9, 1, 9, 1], "b": [10] * 4}, [0.0, 1.0, 0.1, 0.5])
    assert loud.quiet_rounds.keys() == {0, 2}
    assert turns.estimate([loud], {"a": 1, "b": -1}).ratio == pytest.approx(0.9)
    assert loud.other_load == pytest.approx(0.1)
    # A machine with many cores always does something.
    assert replace(loud, quiet_cores=quiet_load(20)).quiet_rounds.keys() == {0, 1, 2, 3}
    # Where all are loud, the quietest third counts.
    all_loud = a_block({"a": [1] * 6}, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    assert all_loud.quiet_rounds.keys() == {4, 5}


class MadeUp(Scheduler):
    """A scheduler of sides that have a pace, in seconds a step, and of others' load in each turn;
    it starts nothing."""

    quiet_cores = 0.25

    def __init__(self, paces: dict[str, float], *loads: float, **plan: Any) -> None:
        self.paces, self.loads, self.plan = paces, list(loads), Plan(**plan)
        self.steps = dict.fromkeys(paces, 1)
        self.digests = list[tuple[str, int]]()  # turns whose end has one of weights

    def pace(self, side: Run) -> float:
        return self.paces[side.side]

    def take_turn(
        self, side: Run, round_: int, purpose: turns.Purpose = "speed", **how: bool
    ) -> Turn:
        load = self.loads.pop(0) if self.loads else 0.0
        if how.get("digest"):
            self.digests.append((side.side, round_))
        seconds = self.pace(side) * self.steps_of(side)
        return Turn(side.side, round_, seconds, 1.0, 1.0, load, purpose=purpose)


def test_a_turn_has_as_many_steps_as_fill_it_at_the_sides_median_pace() -> None:
    scheduler = MadeUp({"quick": 0.02, "slow": 1.0, "usual": 0.1})
    trials = scheduler.find_steps([side("quick"), side("slow"), side("usual")])
    assert scheduler.steps == {"quick": 5, "slow": 5, "usual": 5}
    assert [(turn.side, turn.purpose) for turn in trials] == [
        ("quick", "trial"),
        ("slow", "trial"),
        ("usual", "trial"),
    ]


def test_where_cases_share_a_launch_each_side_fills_its_own_turn() -> None:
    scheduler = MadeUp(
        {"quick": 0.001, "slow": 1.0},
        side={"quick": OwnScript(Words()), "slow": OwnScript(Words())},
        case={"4K-fp32": Case()},
    )
    scheduler.find_steps([side("quick"), side("slow")])
    assert scheduler.steps == {"quick": 500, "slow": 3}  # its lead-in is a quarter of a turn


def test_disturbed_turns_are_taken_again_as_long_as_there_are_spare_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("compare.running.scheduler.PATIENCE", 0.0)
    scheduler, lines = MadeUp({"a": 1.0, "b": 2.0}, 0.5, 0.1, 0.2, 0.9, 0.8, 0.7, 0.6), list[str]()
    taken, seconds = scheduler.take_rounds([side("a"), side("b")], 2, lines.append)
    assert [(t.side, t.round, t.other_load, t.purpose) for t in taken] == [
        ("a", 0, 0.5, "disturbed"),
        ("a", 0, 0.1, "speed"),
        ("b", 0, 0.2, "speed"),
        ("b", 1, 0.9, "disturbed"),
        ("b", 1, 0.8, "disturbed"),
        ("b", 1, 0.7, "disturbed"),
        ("b", 1, 0.6, "speed"),
        ("a", 1, 0.0, "speed"),
    ]
    assert seconds > 0
    assert lines == [  # each side takes one step a turn, behind a lead-in
        "round 1 of 2, 0 turns taken again, about 12 s more of this block",
        "round 2 of 2, 1 turns taken again, about 6 s more of this block",
    ]


def test_digests_of_weights_are_of_equal_numbers_of_steps() -> None:
    """Trainers' are of the last turn. Turns of scripts, of which one may be a trainer, differ in
    their steps: theirs are of the warm-up."""
    scheduler = MadeUp({"a": 1.0, "ddp-torchrun": 1.0})
    scheduler.take_rounds([side("a"), trainer()], 2, print)
    assert scheduler.digests == [("ddp-torchrun", 1)]


def ranks(*each: tuple[float, float, float, str]) -> list[Rank]:
    """Ranks at the end of a turn of 40 images, whose lead-in took half a second: seconds, CPU
    seconds, those of the machine, and the machine."""
    return [
        Rank(
            0,
            machine,
            machine,
            2,
            Pipe()[0],
            State.READY,
            {
                "seconds": seconds,
                "cpu_seconds": cpu,
                "busy": busy,
                "window": seconds + 0.5,
                "images": 40,
            },
        )
        for seconds, cpu, busy, machine in each
    ]


def test_what_ranks_measure_comes_to_a_turn() -> None:
    # Ranks that train together count by their mean, CPU time as that of the lead-in, too.
    together = ranks((2.4, 1.5, 4.5, "a"), (2.6, 2.0, 4.2, "a"))
    turn = make_turn(trainer(), 5, 3, 7.0, together, 3.5)
    assert (turn.round, turn.seconds, turn.began) == (3, 2.5, 7.0)
    found = (turn.images_per_second, turn.cpu_seconds_per_image, turn.other_load)
    assert found == pytest.approx((5 * 16 / 2.5, 3.5 / 96, (4.5 - 3.5) / 3.1), abs=1e-3)
    # Machines have cores of their own.
    apart = ranks((2.5, 1.0, 1.0, "a"), (2.5, 2.0, 3.5, "b"))
    assert make_turn(trainer(), 5, 0, 0.0, apart, 3.0).other_load == pytest.approx(0.5)
    with pytest.raises(MeasurementError, match="counted 80 images in 4 steps of 16"):
        make_turn(trainer(), 4, 0, 0.0, apart, 3.0)


@pytest.mark.parametrize("delay", [0, 0.25])
def test_a_turns_clock_starts_behind_its_lead_in(
    delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known delay is a share of what the clock shows."""
    monkeypatch.setenv(DELAY, str(delay))
    watch = SimpleNamespace(now=0.0, process_time=time.process_time)
    watch.monotonic = lambda: watch.now
    watch.sleep = lambda seconds: setattr(watch, "now", watch.now + seconds)
    monkeypatch.setattr(comparison_side, "time", watch)

    def measured(kind: type[SideClient], **own: float) -> dict[str, float]:
        """What a turn of two steps comes to that take 1 s and 2 s."""
        here, there = Pipe()
        client = kind(here, 3)
        monkeypatch.setattr(client, "spent", dict)
        client.is_warm = True
        for _ in range(2):  # the warm-up and the turn
            send(there, State.RUNNING, steps=2)
            for seconds in (*[100.0] * LEAD_IN_STEPS, 1.0, 2.0):
                watch.now += seconds
                client.step_ended("bytes", 8.0, **own)
        (state, warm_up), turn = receive(there), receive(there)
        assert turn == (State.READY, warm_up) and state == State.READY
        return warm_up

    wall = 3.0 * (1 + delay)
    done = {"seconds": wall, "wall_seconds": wall, "images": 16.0, "unit": "bytes"}
    assert measured(SideClient) == done
    # A side that times its own steps.
    assert measured(AllReduceClient, seconds=0.25) == done | {"seconds": 0.5}


def test_a_warm_up_may_be_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = Pipe()
    client = TrainerClient(here, 1)
    monkeypatch.setattr(client, "spent", dict)
    client.digest = True
    clock = SimpleNamespace(ended=[], seconds=lambda laps: {"forward": 0.1})
    session = SimpleNamespace(
        progress=SimpleNamespace(samples_seen=8), meter=SimpleNamespace(clock=clock)
    )
    send(there, State.RUNNING, steps=2)
    client.trained(session, torch.nn.Linear(2, 2))
    state, measured = receive(there)
    assert state == State.READY and not {"phases", "facts"} & {*measured}
    assert len(measured["weights"]) == 64


# ------------------------------------------------------------------------------ what is started

# A side that takes turns; after its first steps it says something.
COUNTS = """
import sys, time
from comparison_side import Side
side = Side()
for step in range(10**9):
    time.sleep(0.01)
    side.step(images=8)
    if step == 3:
        print("alas", flush=True)
"""


def script_side(folder: Path, name: str, text: str = COUNTS, **changes: Any) -> Run:
    script = folder / f"{name}.py"
    script.write_text(text)
    return side(name, sys.executable, str(script), **changes)


@pytest.mark.parametrize("over_hosts", [False, True])
def test_sides_take_turns_and_leave_nothing(
    over_hosts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compare.running.scheduler.TURN_SECONDS", 0.2)
    monkeypatch.setattr("compare.running.scheduler.PATIENCE", 0.0)
    monkeypatch.setenv("LAUNCH_MARK", str(tmp_path))
    sides = [
        replace(script_side(tmp_path, "one"), hosts="a.invalid:1" if over_hosts else None),
        script_side(tmp_path, "pair"),
    ]
    lines: list[str] = []
    folder = tmp_path / "block-1"
    [line] = run_blocks([sides], Plan(), folder, lines.append, two_rounds)
    found = line.block
    assert marked(str(tmp_path)) == []
    assert [turn.side for turn in found.of("trial")] == ["one", "pair"]
    assert [(turn.side, turn.round) for turn in found.of("speed")] == [
        ("one", 0),
        ("pair", 0),
        ("pair", 1),
        ("one", 1),
    ]
    assert found.steps["pair"] == found.steps["one"] >= 3
    for turn in found.of("speed"):
        assert turn.seconds >= found.steps[turn.side] * 0.01
        assert turn.images_per_second > 0 and turn.cpu_seconds_per_image > 0
    assert lines[0] == "starting one, pair"
    assert lines[-1].startswith("round 2 of 2, ")


CASES = """
import time
from comparison_side import Side
side, before = Side(), None
for step in range(10**9):
    if side.case != before:
        before = side.case
        print(f"case '{before}'", flush=True)
    time.sleep(0.005)
    side.step(images=8)
"""


def test_one_launch_measures_all_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compare.running.scheduler.TURN_SECONDS", 0.05)
    monkeypatch.setattr("compare.running.scheduler.PATIENCE", 0.0)
    (tmp_path / "cases.py").write_text(CASES)
    script = OwnScript(Words((sys.executable, str(tmp_path / "cases.py"))))
    plan = Plan(
        side={"a": script, "b": script},
        configurations=("a", "b"),
        case={"small": Case(), "large": Case()},
    )
    cases, lines = [plan.in_order(1, *group) for group in plan.groups()], list[str]()
    began = time.monotonic()
    measured = run_blocks(cases, plan, tmp_path / "block-1", lines.append, two_rounds)
    blocks = [line.block for line in measured]
    assert [line.case for line in measured] == ["small", "large"]
    seconds = time.monotonic() - began
    assert sum(block.seconds for block in blocks) <= seconds + 0.01  # they are rounded
    for block, sides in zip(blocks, cases, strict=True):
        order = [side.side for side in sides]
        speed = [turn.side for turn in block.of("speed")]
        assert [*block.order] == order and speed == [*order, *reversed(order)]
    for name in "ab":
        output = (tmp_path / "block-1" / name / "0/output.log").read_text()
        assert output.splitlines() == ["case ''", "case 'small'", "case 'large'"]
    assert lines[-1].startswith("large, round 2 of 2, ")


def test_on_gpus_a_side_warms_up_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, the next one starts meanwhile."""
    others, start_side = list[set[State]](), scheduler_module.start_side

    def spy(side: Run, folder: Path, launches: Scheduler, who: str) -> Any:
        others.append({rank.state for rank in launches.ranks})
        return start_side(side, folder, launches, who)

    monkeypatch.setattr(scheduler_module, "visible_gpus", lambda: 1)
    monkeypatch.setattr(scheduler_module, "start_side", spy)
    with Scheduler(tmp_path / "block-1", PLAN) as scheduler:
        scheduler.start(*(script_side(tmp_path, name) for name in ("one", "two", "three")))
    assert others == [set(), {State.PAUSED}, {State.PAUSED}]


def test_those_who_watch_by_the_clock_have_patience_with_paused_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else torch's monitor of NCCL aborts a side after 480 s."""
    text = f"import json, os, sys\njson.dump(dict(os.environ), sys.stderr, indent=0)\n{COUNTS}"
    with Scheduler(tmp_path / "block-1", PLAN) as scheduler:
        scheduler.start(script_side(tmp_path, "one", text))
        written = (tmp_path / "block-1/one/0/output.log").read_text()
    for name in ("HOROVOD_GLOO_TIMEOUT_SECONDS", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"):
        assert f'"{name}": "1000000"' in written
    assert '"TORCH_NCCL_ENABLE_MONITORING": "0"' in written
    # Nor may an exchange of gradients time out that ended just before the pause.
    seen = list[Config]()
    monkeypatch.setattr(start, "start", lambda engine, words: (Config(), read_world()))
    main = SimpleNamespace(main=lambda config, *_: seen.append(config))
    monkeypatch.setattr(start.importlib, "import_module", {"ddp_train.train": main}.get)
    with pytest.raises(SystemExit):
        take_turns.train(str(ROOT / "ddp_train/train.py"))
    assert engine_timeout(seen[0].stall_timeout) == 1_000_000


def test_an_interface_without_an_address_is_a_mistake_and_no_failed_block(tmp_path: Path) -> None:
    """A record would name the folder of a block that never was."""
    over_hosts = replace(side("x", interface="no-such0"), hosts="a.invalid:1")
    with pytest.raises(UserError, match="--network-interface no-such0 has no IPv4") as refused:
        run_blocks([[over_hosts]], PLAN, tmp_path / "block-1", print, two_rounds)
    assert not isinstance(refused.value, MeasurementError)
    assert not (tmp_path / "block-1").exists()


def test_who_lacks_the_key_is_turned_away(tmp_path: Path) -> None:
    hello = {"side": "x", "version": VERSION, "host": "a", "machine": "a", "cores": 2}
    with Scheduler(tmp_path / "block-1", PLAN) as scheduler, ThreadPoolExecutor(1) as pool:
        scheduler.sides["x"] = StartedSide(side("x"), SimpleNamespace())
        host, _, port = scheduler.address.rpartition(":")
        for key in (None, b"another", scheduler.key):
            accepted = pool.submit(scheduler.accept)
            with (
                suppress(AuthenticationError),
                Client((host, int(port)), authkey=key) as who,
            ):
                send(who, State.STARTING, **hello)
                accepted.result(60)
            assert bool(scheduler.ranks) == (key == scheduler.key)


def test_a_rank_of_another_version_is_refused_and_named(tmp_path: Path) -> None:
    """Also one that does not yet tell its version, nor its launcher's variables."""
    first = {"side": "old", "number": 0, "size": 2, "host": "a", "machine": "a", "cores": 2}
    later = {"side": "old", "version": VERSION + 1, "file": "lib/comparison_side.py", "else": []}
    with Scheduler(tmp_path / "block-1", PLAN) as scheduler, ThreadPoolExecutor(1) as pool:
        host, _, port = scheduler.address.rpartition(":")
        for hello, version in ((first, 1), (later, VERSION + 1)):
            accepted = pool.submit(scheduler.accept)
            with Client((host, int(port)), authkey=scheduler.key) as who:
                send(who, State.STARTING, **hello)
                said = f"^old: .* has version {version} of .*, but this run.py has {VERSION}: "
                with pytest.raises(MeasurementError, match=said):
                    accepted.result(60)
        assert scheduler.ranks == []


def test_a_side_that_dies_while_it_is_paused_is_reported(tmp_path: Path) -> None:
    other, dies = script_side(tmp_path, "one"), script_side(tmp_path, "later")
    with Scheduler(tmp_path / "block-1", PLAN) as scheduler:
        scheduler.start(other, dies)
        assert scheduler.take_turn(dies, 0).images == 8 * 5  # in as many steps as the plan says
        scheduler.sides["later"].launcher.send_signal(signal.SIGKILL)
        message = r"^later was ended by signal 9 \(Killed\) while it was paused:\n  \| alas"
        with pytest.raises(MeasurementError, match=message):
            while True:
                scheduler.take_turn(other, 0)
    assert not marked_processes(scheduler.mark)


# Starts a side, says which process and watchdog that has, and goes no further.
MEASURES = """
import sys, time
from pathlib import Path
from compare.plan.configurations import SCRIPT, Configuration
from compare.plan.plan import Plan, Run
from compare.running.scheduler import Scheduler
script = Configuration("one", SCRIPT, SCRIPT, command=(sys.executable, sys.argv[1]))
with Scheduler(Path(sys.argv[2]), Plan(steps=5)) as scheduler:
    scheduler.start(Run(1, script, 0, None))
    print(scheduler.sides["one"].launcher.pid, scheduler.watchdog.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("has_watchdog", [True, False])
def test_nothing_stays_if_who_measures_is_killed(has_watchdog: bool, tmp_path: Path) -> None:
    """On other hosts no watchdog sees to that."""
    (tmp_path / "one.py").write_text(COUNTS)
    words = [sys.executable, "-c", MEASURES, str(tmp_path / "one.py"), str(tmp_path / "block-1")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as measures:
        numbers = measures.stdout.readline().split()
        rank, watchdog = (psutil.Process(int(number)) for number in numbers)
        if not has_watchdog:
            watchdog.kill()
        measures.kill()
    rank.wait()
    watchdog.wait()


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
            NO_ROOM,
        ),
        ("torch.AcceleratorError: CUDA error: out of memory", NO_ROOM),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
            "`cublasCreate(handle)`",
            NO_ROOM,
        ),
        (
            "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            NO_ROOM,
        ),
        (
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
            "Failed to CUDA calloc async 608 bytes",
            NO_ROOM,
        ),
        ("NCCL WARN Cuda failure 2 'out of memory'", NO_ROOM),
        (
            "HorovodInternalError: ncclCommInitRank failed: unhandled cuda error (run with "
            "NCCL_DEBUG=INFO for details)",
            NO_ROOM,
        ),
        # It admits one process only.
        (
            "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "compute mode",
        ),
    ],
)
def test_a_gpu_that_has_no_room_for_several_sides_says_so(line: str, meaning: str) -> None:
    found = next(HINTS_BY_OUTPUT[sign] for sign in HINTS_BY_OUTPUT if sign in line)
    assert meaning in found and "--measure runs" in found


def test_sides_that_do_not_fit_together_are_told_from_others(tmp_path: Path) -> None:
    text = (  # its launcher says much more
        "print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.')\n"
        "exit('\\n'.join(['not now'] * 40))"
    )
    sides = [script_side(tmp_path, "one"), script_side(tmp_path, "large", text)]
    for attempt in (1, 2):
        log = tmp_path / f"block-1.failed-{attempt}/large/0/output.log"
        said = "large ended .* memory together: give --measure runs(.|\n)*not now\n  all of it: "
        with pytest.raises(MeasurementError, match=f"{said}{re.escape(str(log))}$"):
            run_blocks([sides], PLAN, tmp_path / "block-1", print, two_rounds)
        assert log.exists()


# ------------------------------------------------------------------------------ real launchers


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@pytest.mark.launch
@pytest.mark.full
def test_paused_sides_cost_no_core(tmp_path: Path) -> None:
    """MPI's polling threads, Horovod's background thread and loader workers are stopped, too; and
    all go on afterwards."""
    names = ("horovod-mpi", "horovod-gloo", "mpi4py-mpirun")
    known = [name for name in names if not missing_for(CONFIGURATIONS[name])]
    sides = [trainer(name, f"{SMALL} --workers 1 --max-steps 5") for name in known]
    with Scheduler(tmp_path / "block-1", Plan(steps=2)) as scheduler:
        scheduler.start(*sides)
        everything = marked_processes(scheduler.mark)
        stopped = [process for process in everything if process.status() == psutil.STATUS_STOPPED]
        assert len(stopped) >= 4 * len(sides)  # two ranks, and a loader worker of each
        before, of_stopped = cpu_seconds(everything), cpu_seconds(stopped)
        time.sleep(5.0)
        assert cpu_seconds(stopped) == of_stopped
        assert cpu_seconds(everything) - before < 0.5  # of launchers, which only wait
        for side in sides:
            assert scheduler.take_turn(side, 0).images_per_second > 0
    assert not marked_processes(scheduler.mark)


# Each rank trains by itself: DDP's network is left aside, and with it the exchange of gradients.
SKIPS = """
from torch.nn.parallel import DistributedDataParallel
DistributedDataParallel.forward = lambda network, *images: network.module(*images)
"""


@pytest.mark.launch
def test_a_side_that_skips_the_exchange_of_gradients_is_refused(tmp_path: Path) -> None:
    folder, skips, plan = tmp_path / "block-1", tmp_path / "skips", Plan(steps=2)
    honest = trainer(flags=SMALL)
    block = run_blocks([[honest]], plan, folder, print, lambda *_: 3)[0].block
    assert {turn.images for turn in block.turns} == {16}
    assert [turn.round for turn in block.of("speed")] == [0, 1, 2] and len(
        block.of("ablation")
    ) == 1
    assert len(block.weights["ddp-torchrun"]) == 64
    assert all(turn.phases.keys() == set(PHASES) for turn in block.turns)
    skips.mkdir()
    (skips / "sitecustomize.py").write_text(SKIPS)
    cheat = trainer(flags=SMALL, environment={"PYTHONPATH": str(skips)})
    with pytest.raises(MeasurementError, match="ranks ended with 2 different weights"):
        run_blocks([[cheat]], plan, tmp_path / "block-2", print, two_rounds)


# Runs a trainer as a side does, and says what a step behind the warm-up loads, opens or writes.
ONCE = """
import os, sys
from pathlib import Path
from compare.plan.plan import Plan
from compare.running import take_turns
steps, before = 0, set()
folder = Path(sys.argv[sys.argv.index("--log-dir") + 1])

def step_ended(*_):
    global steps, before
    steps += 1
    opened = {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    there = {*sys.modules, *(path for path in opened if os.path.exists(path))}
    there |= set(map(str, folder.rglob("*")))
    if steps > Plan().warm_up_steps:
        print("new:", *sorted(there - before), flush=True)
    before |= there
    if steps == 25:
        os._exit(0)

take_turns.step_ended = step_ended
del sys.argv[0]
take_turns.train(sys.argv[0])
"""


@pytest.mark.launch
@pytest.mark.parametrize("engine", ["ddp", "horovod"])
def test_nothing_that_happens_once_happens_in_a_turn(engine: str, tmp_path: Path) -> None:
    """Such as loading TensorBoard for the first record, or writing a profile, which take longer
    than a step."""
    (tmp_path / "once.py").write_text(ONCE)
    words = [*TRAINERS[engine].split(), *SMALL.split(), "--threads", "1", "--log-dir", tmp_path]
    words += ["--profile-steps", "8", "--tensor-steps", "9"]
    command = [sys.executable, tmp_path / "once.py", *words]
    output = run(list(map(str, command)), PYTHONPATH=str(ROOT)).checked().output
    assert re.findall("^new:.*", output, re.MULTILINE) == ["new:"] * 20


# ------------------------------------------------------- blocks until enough is known, made up


FIRST, SECOND = DEFAULT_CONFIGURATIONS


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> MadeUpBlocks:
    """DDP is 1.1 times as fast as Horovod."""
    bench = MadeUpBlocks(lambda side: 1100.0 if side.side.startswith("ddp") else 1000.0, 0.01)
    monkeypatch.setattr(comparison, "run_blocks", bench)
    monkeypatch.setattr(plan_file, "trainers_sha256", lambda: "a")
    return bench


def measure(plan: Plan, folder: Path) -> Record:
    """Do as run.py does behind the whole runs, of which there are none here."""
    record = Record.open(folder)
    plan = resumed(plan, record)
    record_plan(check_same_plan(plan, record), record)
    comparison.measure(plan, record)
    return record


def ends_of(folder: Path) -> list[tuple[Any, ...]]:
    """The ends that a comparison had."""
    plans = [line["plan"] for line in lines_of(folder) if line["line"] == "plan"]
    return [(plan["blocks"], plan["until_interval"], plan["minutes"]) for plan in plans]


IN_BLOCKS = Plan(full_runs=0, order_seed=1, rounds=8)


def test_blocks_follow_until_the_intervals_are_narrow(bench, tmp_path, capsys):
    bench.scatter = 0.03
    record = measure(IN_BLOCKS, tmp_path)
    assert is_finished(record.plan, record)
    [group] = record.groups
    estimate = group.estimates[FIRST, SECOND]
    assert estimate.blocks == len(bench.folders) > 3 and estimate.relative_half_width <= 0.03
    begin, *of_blocks, last, counted = capsys.readouterr().out.splitlines()
    assert begin == "now blocks of turns: up to 10 min, but at least 3 blocks"
    assert len(of_blocks) == len(bench.folders)
    assert of_blocks[0].startswith(f"block 1, 2 workers   {FIRST} / {SECOND} 1.")
    assert f" +-{100 * estimate.relative_half_width:.2g} %" in of_blocks[-1]
    assert "the interval of every pair is within" in last
    assert re.fullmatch(r"Turns that count: \d+ s, [\d.]+ % of the blocks\.", counted)
    assert all(a == b[::-1] for a, b in zip(bench.orders[::2], bench.orders[1::2], strict=True))


def test_rounds_follow_from_what_blocks_cost_and_fill_the_minutes(bench, tmp_path, capsys):
    bench.scatter = 0.3
    free = structs.replace(IN_BLOCKS, rounds=None)
    by_cost = (
        (5, 20.0, [6] * 6),
        (10, 100.0, [10] * 4),
        (1, 40.0, [4] * 3),  # even three blocks do not fit
        (1, 150.0, [10] * 3),  # nor here: a third of the start's time
    )
    for minutes, seconds, expected in by_cost:
        bench.cost = BlockCost(seconds, 5.0)
        folder = tmp_path / f"{minutes}-{seconds}"
        folder.mkdir()
        blocks = measure(structs.replace(free, minutes=minutes), folder).groups[0].turns
        assert [block.num_rounds for block in blocks] == expected
    assert "up to 2 min left" in capsys.readouterr().out  # three blocks are the least


def test_other_processes_stretch_the_minutes_to_twice_their_length(bench, tmp_path, capsys):
    bench.scatter, bench.disturbed = 0.3, 120.0
    measure(structs.replace(IN_BLOCKS, minutes=8), tmp_path)
    told = capsys.readouterr().out
    assert len(bench.folders) == 5 and "up to 13 min left" in told  # a block takes three minutes
    assert "another would end later than 2 times --minutes 8" in told


def test_the_minutes_end_the_blocks_and_more_minutes_go_on(bench, tmp_path, capsys):
    bench.scatter, bench.disturbed = 0.3, 30.0
    measure(structs.replace(IN_BLOCKS, minutes=5), tmp_path)
    assert len(bench.folders) == 5  # of a minute each: disturbed time does not count
    told = capsys.readouterr().out
    # Of the 4 minutes that are left by then, half as much again will be disturbed.
    for words in (
        "up to 6 min left",
        "plus 2 min in which other processes used",
        "the widest interval is +-",
        "the report says how to go on",
    ):
        assert words in told
    measure(structs.replace(IN_BLOCKS, minutes=7), tmp_path)
    assert ends_of(tmp_path) == [(None, 0.015, 5), (None, 0.015, 7)] and len(bench.folders) == 7


def test_a_fixed_number_of_blocks_is_measured_whatever_they_show(bench, tmp_path):
    for blocks in (4, 6):
        measure(structs.replace(IN_BLOCKS, blocks=blocks), tmp_path)
        assert len(bench.folders) == len(set(bench.folders)) == blocks
    assert [blocks for blocks, *_ in ends_of(tmp_path)] == [4, 6]
    with pytest.raises(run_module.UserError, match="blocks: 6 there, 5 now"):
        measure(structs.replace(IN_BLOCKS, blocks=5), tmp_path)


@pytest.mark.parametrize(
    ("planned", "then", "told"),
    [
        ({}, {"blocks": 4}, "4 blocks"),
        ({}, {"blocks": 20}, "20 blocks"),
        ({}, {"minutes": 4}, r"\+-1.5% or 4 minutes"),
        ({}, {"until_interval": 0.2}, r"\+-20% or 10 minutes"),
        ({}, {"minutes": 20, "until_interval": 0.02}, r"\+-2% or 20 minutes"),
        ({"blocks": 9}, {"blocks": 4}, "4 blocks"),
        ({"blocks": 9}, {"blocks": None, "minutes": 20}, r"\+-1.5% or 20 minutes"),
    ],
)
def test_whoever_stops_when_pleased_decides_nothing(planned, then, told, bench, tmp_path):
    """An end that may come before the plan's is refused until that one is reached."""
    plan, bench.scatter = structs.replace(IN_BLOCKS, **planned), 0.1
    bench.error, bench.error_after = KeyboardInterrupt(), 4
    with pytest.raises(KeyboardInterrupt):
        measure(plan, tmp_path)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(run_module.UserError, match=f"the end: .* there, {told} now.*do not exist"):
        measure(structs.replace(plan, **then), tmp_path)
    assert (tmp_path / FILE).read_bytes() == before
    record = Record.open(tmp_path)
    assert record.num_blocks == 4 and not is_finished(plan, record)
    bench.error = None
    later = {"blocks": 11} if planned else {"minutes": 11}
    measure(structs.replace(plan, **later), tmp_path)  # which may come before this one is reached
    assert len(bench.folders) == 11
    assert len(ends_of(tmp_path)) == 2 and 11 in ends_of(tmp_path)[-1]
    if then.get("blocks") != 4:  # once it is reached, any other one is an extension
        measure(structs.replace(plan, **then), tmp_path)
        assert len(ends_of(tmp_path)) == 3


def test_groups_take_blocks_in_turn_until_each_is_narrow(bench, tmp_path):
    plan = structs.replace(IN_BLOCKS, case={"a": Case(), "b": Case()}, workers=(1, 2))
    record = measure(plan, tmp_path)
    names = [path.relative_to(tmp_path).as_posix() for path in bench.folders]
    assert names[:5] == [
        "turns/a/1-workers/block-1",
        "turns/a/2-workers/block-1",
        "turns/b/1-workers/block-1",
        "turns/b/2-workers/block-1",
        "turns/a/1-workers/block-2",
    ]
    assert all(group.num_blocks >= 3 for group in record.groups)
    bench.folders.clear()
    (tmp_path / "alone").mkdir()
    alone = structs.replace(IN_BLOCKS, configurations=(FIRST,))  # nothing to compare
    measure(alone, tmp_path / "alone")
    assert not bench.folders


def test_after_an_interruption_between_the_cases_of_a_launch_the_later_one_catches_up():
    """Else it would stay a block behind, and the first have more than were asked for."""
    script = OwnScript(Words(("a",)))
    sides = {"a": script, "b": script}
    plan = Plan(side=sides, configurations=("a", "b"), case={"x": Case(), "y": Case()}, blocks=3)
    block = a_block({"a": [1.0], "b": [1.0]})
    ahead, behind = (
        Group(plan, name, 0, 0.95, [block] * n, [], []) for name, n in (("x", 2), ("y", 1))
    )
    assert next_groups(plan, [ahead, behind]) == [behind]
    assert next_groups(plan, [ahead, ahead]) == [ahead, ahead]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MeasurementError])
def test_what_ends_the_blocks_loses_the_one_that_was_under_way_alone(error, bench, tmp_path):
    plan = structs.replace(IN_BLOCKS, blocks=3)
    measure(structs.replace(plan, blocks=1), tmp_path)
    bench.error = error("horovod-mpi ended with exit code 1")
    with pytest.raises(error):
        measure(plan, tmp_path)
    bench.error = None
    measure(structs.replace(plan, order_seed=None), tmp_path)  # the folder's own is taken
    assert [path.name for path in bench.folders] == ["block-1", "block-2", "block-3"]
    assert bench.orders[0] != bench.orders[1] == bench.orders[2]


@pytest.mark.parametrize(
    ("gpus", "words", "plan", "workers"),
    [
        (0, [], "square", None),
        (0, ["--workers", "4"], "square", ("4",)),
        (1, [], "square-nccl", ("1",)),
        (1, ["--", "--share-gpu"], "square-nccl", ("2",)),
        (8, [], "square-nccl", ("2",)),
        (8, ["--", "--no-cuda"], "square", None),
        (8, ["--", "--no_cuda"], "square", None),
        (0, ["--null"], None, None),
        (0, ["wire-format"], "wire-format", None),
        (0, ["--hosts", "a:2,b:2"], None, None),
        (0, ["--configurations", "ddp-torchrun"], None, None),
    ],
)
def test_without_a_plan_the_engines_are_compared_over_each_transport(
    gpus, words, plan, workers, monkeypatch
):
    monkeypatch.setattr(run_module.checks, "visible_gpus", lambda: gpus)
    options = parse_options(words, "")
    run_module.take_default_plan(options)
    assert (options.plan, options.workers) == (plan, workers)
