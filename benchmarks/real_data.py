"""Rows 8 and 12: does reading JPEG files slow the training down where cores are enough?

    python benchmarks/real_data.py            row 8: on this machine's CPU
    python benchmarks/real_data.py --gpu      row 12: on its GPU

The trainer on JPEG files of tools/make_jpegs.py (500 x 375 pixels, some 100 KB each) and the
trainer on synthetic data take turns. On the CPU one thread computes and one loader process works
on a second core; on a GPU the number of loader processes is the trainer's own choice.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import bench
from benchmarks.harness.blocks import run_blocks
from benchmarks.harness.sides import Workload, trainer_side
from benchmarks.harness.workloads import QUICK, gpu_workload
from compare.evidence.turns import estimate_value
from compare.plan.sources import ROOT
from compare.running.sides import MeasurementError
from compare.running.turns import say

GOALS = {8: 0.97, 12: 0.95}
BEST = bench.BEST_FLAGS
COPIES = 40  # names of each file


def measure(options: bench.Options) -> bench.Measured:
    """Measure row 8, or with --gpu row 12."""
    number, images = (12, 5120) if options.gpu else (8, 640)
    workload, steps = Workload("resnet18", 224, 16, BEST), 3
    workers: tuple[str, ...] = ("--workers", "1")
    if options.gpu:
        workload, steps, workers = gpu_workload(), 30, ()
    if options.quick:
        workload, steps, images = QUICK, 2, 40
    jpegs = make_jpegs(Path("runs") / "bench-jpegs", images)
    sides = [
        trainer_side("real", "ddp", workload, steps, flags=workers, data=str(jpegs), warm_up=6),
        trainer_side("synthetic", "ddp", workload, steps, warm_up=6),
    ]
    blocks = run_blocks(sides, options, str(number), [("real", "synthetic", GOALS[number])])
    where = "on the GPU" if options.gpu else "cores enough"
    row = bench.Row(number, f"real / synthetic data, {where}", GOALS[number])
    row = row.compared(blocks, "real", "synthetic", confidence=options.confidence)
    row = bench.with_note(
        row, f"{workload}, 1 worker, {' '.join(workers) or 'as many loaders as cores'}"
    )
    for side in sides:
        found = estimate_value(blocks, side.name, lambda turn: turn.images_per_second)
        row = bench.with_note(row, f"{side.name}: {found.ratio:.4g} images/s")
    return bench.Measured([row], sides, {str(number): blocks})


def make_jpegs(folder: Path, images: int) -> Path:
    """The folder of so many different training images; made if it is not there.

    Each has COPIES names, so that an epoch is long.
    """
    target = folder / f"{images}x{COPIES}"  # folders with fewer names may be there
    if not target.exists():
        say(f"making {images} JPEG files in {target}")
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        command = [sys.executable, "tools/make_jpegs.py", str(draft.resolve())]
        done = subprocess.run(
            [*command, "--images", str(images)], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise MeasurementError(f"tools/make_jpegs.py failed: {done.stderr.strip()}")
        for file in sorted((draft / "train").glob("*/*.jpg")):
            for copy in range(1, COPIES):
                os.link(file, file.with_name(f"{file.stem}-{copy:02d}.jpg"))
        draft.rename(target)
    return target.resolve()


if __name__ == "__main__":
    sys.exit(bench.main("real_data", __doc__, measure))
