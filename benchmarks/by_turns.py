"""Rows whose sides take turns: what goals.toml declares, measured and judged.

A block starts each side anew, in random order (compare/running). Blocks go on until each pair's
interval has a verdict on its goal.
"""

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from benchmarks.record import OPEN, Measured, Options, Row, gpu_name
from compare.evidence.turns import Block, estimate, throughput, work_per_cpu_second
from compare.plan.blocks import shuffled
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import ROOT
from compare.plan.plan import TRAINERS
from compare.running.launch import clear_folder, shown_tail, start_command
from compare.running.scheduler import run_block
from compare.running.sides import MeasurementError, Side
from recipe.settings.flags import last_value
from tools import make_jpegs

GOALS = ROOT / "benchmarks" / "goals.toml"
EPOCH = "1000000"  # images, more than a benchmark sees: no evaluation comes in between
COPIES_OF_JPEGS = 40  # names of each file, so that an epoch is long

T = TypeVar("T")


# What is trained: flags that trainers and loops share. A step of this takes hundredths of a second.
QUICK = "--arch shufflenet_v2_x0_5 --train-crop-size 32 --batch-size 4 --threads 1"
QUICK_JPEGS = 40
# Of a trainer's steps the twentieth is the first after which a GPU's record is written, which takes
# the host longer than a step.
GPU_WARM_UP_STEPS = 25


class Contender(Struct, frozen=True, forbid_unknown_fields=True):
    """A side: one worker is started by python, several as a configuration of compare's table."""

    configuration: str = "ddp-torchrun"
    workers: int = 1  # on a GPU always 1
    copies: int = 1  # started at once, knowing nothing of each other
    flags: str = ""  # of the trainer; {steps}: those of a turn
    environment: dict[str, str] = {}
    loop: str = ""  # a script, with its flags, in the trainer's place
    wrapper: str = ""  # a script that runs the trainer
    jpegs: int = 0  # train on so many JPEG files; 0: on synthetic images
    steps: int = 0  # of a turn; 0: the benchmark's
    gpu_steps: int = 30


class Pair(Struct, frozen=True, forbid_unknown_fields=True):
    """One row: a ratio of two sides, or one side's images/s."""

    sides: tuple[str, ...]
    goal: float | None = None  # None: it is there for reference
    goal_on: dict[str, float] = {}  # by a part of the GPU's name


class Benchmark(Struct, frozen=True, forbid_unknown_fields=True):
    """Sides that take turns with each other, and the rows that come of it."""

    name: str
    row: int
    side: dict[str, Contender]
    pair: dict[str, Pair]  # by what the row is called
    work: str = ""  # on a CPU; empty: it needs a GPU
    gpu: str = ""  # empty: not on a GPU
    value: Literal["images/s", "images per CPU-second"] = "images/s"
    steps: int = 1  # of a turn
    turns: int = 8  # of each side in a block
    warm_up: int = 3  # steps
    ablation: bool = False  # do sides of several workers have turns without exchange, too?


def read_goals(path: Path = GOALS) -> list[Benchmark]:
    """The benchmarks that a file declares; UserError names what is wrong in it."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=dict[str, list[Benchmark]])["benchmark"]
    except msgspec.ValidationError as error:
        raise MeasurementError(f"{path}: {error}") from None


def measure(benchmark: Benchmark, options: Options) -> Measured:
    """Measure the sides by turns until each row has a verdict."""
    work = QUICK if options.quick else benchmark.gpu if options.gpu else benchmark.work
    assert work, f"{benchmark.name} is not for this kind of machine"
    sides = []
    for name, one in benchmark.side.items():
        side = make_side(name, one, work, options, benchmark.steps, benchmark.warm_up)
        sides.append(replace(side, ablates=benchmark.ablation and side.ranks > 1))
    folder, rounds = options.out / "blocks" / benchmark.name, options.rounds(benchmark.turns)

    def block_of(number: int, label: str) -> Block:
        order = shuffled(sides, benchmark.name, number)
        return run_block(order, rounds, folder / str(number), number, label, options.patience)

    rows_of = partial(make_rows, benchmark, work, options=options)
    blocks = until_decided(options, f"row {benchmark.row}, {benchmark.name}", block_of, rows_of)
    return Measured(rows_of(blocks), sides, {benchmark.name: blocks})


def empty_row(name: str, pair: Pair, benchmark: Benchmark) -> Row:
    """A pair's row, without figures, with the goal for this machine's GPU."""
    gpu = gpu_name() or ""
    goal = next((goal for part, goal in pair.goal_on.items() if part in gpu), pair.goal)
    return Row(benchmark.row, name, goal, "ratio" if len(pair.sides) == 2 else "images/s")


def make_rows(
    benchmark: Benchmark, work: str, blocks: Sequence[Block], options: Options
) -> list[Row]:
    """The rows of a benchmark."""
    return [
        make_row(name, pair, benchmark, work, blocks, options)
        for name, pair in benchmark.pair.items()
    ]


def make_row(
    name: str,
    pair: Pair,
    benchmark: Benchmark,
    work: str,
    blocks: Sequence[Block],
    options: Options,
) -> Row:
    """A pair's row, with notes on its sides."""
    notes = [work]
    if len(pair.sides) == 2:
        first, second = pair.sides
        cpu = estimate(blocks, {first: 1, second: -1}, work_per_cpu_second)
        notes.append(f"images per CPU-second: {cpu.ratio:.3f}")
    for side in pair.sides:
        speed, cpu = (estimate(blocks, {side: 1}, v) for v in (throughput, work_per_cpu_second))
        notes.append(f"{side}: {speed.ratio:.4g} images/s, {cpu.ratio:.4g} per CPU-second")
    notes += what_binds(blocks, pair.sides[0])
    is_cpu_time = benchmark.value == "images per CPU-second" and not options.gpu
    name, value = (
        (f"{name}, {benchmark.value}", work_per_cpu_second) if is_cpu_time else (name, throughput)
    )
    row = replace(empty_row(name, pair, benchmark), notes=tuple(notes))
    if len(pair.sides) == 1:
        return row.measured(estimate(blocks, {pair.sides[0]: 1}))
    return row.compared(blocks, first, second, value, options.confidence)


def what_binds(blocks: Sequence[Block], side: str) -> list[str]:
    """A note with the phases of a side's mean step, as shares of it, from the blocks in which quiet
    turns without exchange show the exposed communication; none without such a block."""
    told = [block.phases(side) for block in blocks]
    found = [phases for phases in told if "exposed_communication_seconds" in phases]
    if not found:
        return []
    shares = {name: fmean(one[name] / one["step_seconds"] for one in found) for name in found[0]}
    step = 1000 * fmean(one["step_seconds"] for one in found)
    words = [f"{name.removesuffix('_seconds')} {share:.1%}" for name, share in shares.items()]
    return [f"binds: of a step of {step:.0f} ms {', '.join(words[:-1]).replace('_', ' ')}"]


def until_decided(
    options: Options,
    label: str,
    block_of: Callable[[int, str], T],
    rows_of: Callable[[list[T]], list[Row]],
) -> list[T]:
    """Measure blocks up to the first look at which each row has a verdict, or to the last look.
    `block_of` gets a block's number and what to call it."""
    blocks: list[T] = []
    for number in range(1, options.looks[-1] + 1):
        if len(blocks) in options.looks and all(r.verdict != OPEN for r in rows_of(blocks)):
            break
        blocks.append(block_of(number, f"{label}: block {number} of {options.looks[-1]} at most"))
    return blocks


def make_side(
    name: str,
    contender: Contender,
    work: str,
    options: Options,
    steps: int = 1,
    warm_up: int = 3,
) -> Side:
    """What starts a contender, and how much it does in a turn: `steps`, if it does not say."""
    workers = 1 if options.gpu else contender.workers
    steps = contender.gpu_steps if options.gpu else contender.steps or steps
    steps = 2 if options.quick else steps
    configuration = CONFIGURATIONS[contender.configuration]
    launcher, flags = ["python"], list[str]()
    if workers > 1:
        launcher, flags = configuration.launch_words(workers, None), [*configuration.arguments]
    batch_size, pixels = (
        last_value(work.split(), f"--{n}") for n in ("batch-size", "train-crop-size")
    )
    assert batch_size and pixels, work
    if contender.loop:
        program = [*contender.loop.split(), *work.split()]
    else:
        data = ["--data", "synthetic", "--synthetic-images", EPOCH]
        if contender.jpegs:
            data = ["--data", str(jpegs_folder(QUICK_JPEGS if options.quick else contender.jpegs))]
        program = [TRAINERS[configuration.engine], *data, *work.split()]
        program += ["--val-crop-size", pixels, "--epochs", "1000"]
        if "--checkpoint-steps" not in contender.flags:
            program += ["--keep-checkpoints", "0"]
        program += ["--log-dir", "{folder}", "--name", "run", *flags]
        program += contender.flags.replace("{steps}", str(steps)).split()
    return Side(
        name=name,
        launcher=tuple(launcher),
        program=tuple(([contender.wrapper] if contender.wrapper else []) + program),
        images_per_step=int(batch_size) * workers,
        steps=steps,
        ranks=workers,
        copies=contender.copies,
        warm_up=max(warm_up, GPU_WARM_UP_STEPS) if options.gpu and not options.quick else warm_up,
        environment=contender.environment,
        joins=bool(contender.loop or contender.wrapper),
    )


def run_alone(
    command: list[str],
    folder: Path,
    limit_seconds: float,
    result: Path,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Run a command to its end, its output in `folder`, which is emptied first; MeasurementError
    with the end of that if it fails, takes longer, or writes no `result`. `look` is called
    meanwhile, twice a second."""
    clear_folder(folder, keep_failure=False)
    outcome = start_command(command, folder, limit_seconds, result, lambda elapsed: look())
    if outcome.status != "completed":
        raise MeasurementError(f"{shlex.join(command)}: {outcome.status}\n{shown_tail(folder)}")


def jpegs_folder(images: int) -> Path:
    """The folder of so many different training images; made if it is not there."""
    target = Path("runs") / "bench-jpegs" / f"{images}x{COPIES_OF_JPEGS}"
    if not target.exists():
        draft = target.with_name(f".{target.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        make_jpegs.main(draft, images)
        for file in sorted((draft / "train").glob("*/*.jpg")):
            for copy in range(1, COPIES_OF_JPEGS):
                os.link(file, file.with_name(f"{file.stem}-{copy:02d}.jpg"))
        draft.rename(target)
    return target.resolve()
