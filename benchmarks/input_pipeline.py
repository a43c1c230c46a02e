"""Row 3: how much of the input pipeline's time is more than decoding?

    python benchmarks/input_pipeline.py

The trainer's pipeline (a JPEG file is read, decoded, cropped, resized, flipped, and is part of a
uint8 batch) and libjpeg-turbo's bare decoding of the same files (read, simplejpeg.decode_jpeg with
its defaults, nothing done with the pixels) take short turns in one process, with one thread:
harness/pipelines.py. A block is a process. The ratio is of images per CPU-second. Files are
those of tools/make_jpegs.py, 500 x 375 pixels of some 100 KB, and are in the page cache.

The goal belongs to the steady state, where decoding ends where the crop ends: all epochs but the
first. In the first one each file is decoded whole, and so looked at for damage; that has a row
without a goal. So have, for reference, torchvision's v2 transforms on uint8 after its decode_jpeg,
and the classic pipeline of Pillow, ToTensor and Normalize, which ends in normalised fp32.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from os import getloadavg
from pathlib import Path

from benchmarks.harness import bench
from benchmarks.harness.pipelines import BATCH_SIZE
from benchmarks.real_data import make_jpegs
from compare.evidence.turns import Block, Turn, estimate, estimate_value, work_per_cpu_second
from compare.plan.blocks import drawn
from compare.running.launch import end_processes
from compare.running.sides import MeasurementError, Side
from compare.running.stage import start_process, tail
from compare.running.turns import say
from recipe.files import write_json

GOAL = 0.80
RAW = "raw"
NAMES = {
    "pipeline": "input pipeline / raw JPEG decoding",
    "first-epoch": "input pipeline / raw JPEG decoding, first epoch",
    "torchvision-v2": "torchvision v2 on uint8 / raw JPEG decoding",
    "pillow": "Pillow, ToTensor, Normalize / raw JPEG decoding",
}
# Turns of some 0.15 s: nothing has to be started, stopped or settle down between them, and the more
# there are, the less does a moment in which the processor was slower weigh.
BATCHES, SHORT_TURNS = 3, 4  # a turn; for each turn that the options ask for
POLL_SECONDS = 0.1
LIMIT_SECONDS = 1200.0  # of a block


def measure(options: bench.Options) -> bench.Measured:
    """Measure the row, and what stands beside it for reference."""
    images = 40 if options.quick else 640
    rounds = options.turns if options.quick else SHORT_TURNS * options.turns
    jpegs = make_jpegs(Path("runs") / "bench-jpegs", images)
    program = ["benchmarks/harness/pipelines.py", str(jpegs), "--out", "{folder}/turns.json"]
    program += ["--rounds", str(rounds), "--batches", str(BATCHES)]
    side = Side("input", ("python",), tuple(program), BATCH_SIZE, BATCHES)
    blocks: list[Block] = []
    for number in range(1, options.blocks + 1):
        order = drawn([RAW, *NAMES], options.seed, number)
        folder = options.out / "blocks" / "3" / f"block-{number}"
        words = ["--order", ",".join(order), "--seed", str(options.seed + number)]
        words += ["--patience", str(options.patience)]
        blocks.append(run_block(side, words, tuple(order), folder, number))
        ratio = blocks[-1].ratio("pipeline", RAW, work_per_cpu_second)
        told = f"ratio {ratio:.3f}; others kept {blocks[-1].other_load:.2f} cores busy"
        say(f"row 3: block {number} of {options.blocks}: {told}")
    raw = per_cpu_second(blocks, RAW)
    rows = []
    for name, told in NAMES.items():
        row = bench.Row(3, f"{told}, CPU-seconds", GOAL if name == "pipeline" else None)
        if name == "pipeline":
            row = row.compared(blocks, name, RAW, work_per_cpu_second)
        else:
            row = row.measured(estimate(blocks, name, RAW, work_per_cpu_second))
        found = per_cpu_second(blocks, name)
        row = bench.with_note(row, f"{found:,.0f} images per CPU-second, raw {raw:,.0f}")
        rows.append(row)
    rows[0] = bench.with_note(
        rows[0], "the steady state, from the second epoch on; JPEG files of 500 x 375 pixels"
    )
    return bench.Measured(rows, [side], {"3": blocks})


def per_cpu_second(blocks: Sequence[Block], name: str) -> float:
    """Images that a contender gets through in a second of CPU time."""
    return estimate_value(blocks, name, work_per_cpu_second).ratio


def run_block(
    side: Side, words: Sequence[str], order: tuple[str, ...], folder: Path, number: int
) -> Block:
    """Let all contenders take turns in a new process."""
    load = round(getloadavg()[0], 2)
    command = [*side.command(folder.resolve(), 0), *words]
    process, mark = start_process(side, command, folder)
    began = time.monotonic()
    try:
        while process.poll() is None:
            if time.monotonic() - began > LIMIT_SECONDS:
                raise MeasurementError(f"row 3: no end within {LIMIT_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
    finally:
        end_processes(process, mark)
    if process.returncode:
        raise MeasurementError(f"benchmarks/harness/pipelines.py failed:\n{tail(folder)}")
    turns = tuple(Turn(**turn) for turn in json.loads((folder / "turns.json").read_text()))
    block = Block(number, order, load, turns)
    write_json(folder / "block.json", asdict(block))
    return block


if __name__ == "__main__":
    sys.exit(bench.main("input_pipeline", __doc__, measure))
