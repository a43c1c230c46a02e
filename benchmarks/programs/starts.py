"""Start a command repeatedly, to measure the time from the command to its first training step, or
to its end if it writes no metrics.

    python benchmarks/programs/starts.py runs/starts python ddp_train/train.py --max-steps 1 ...
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from compare.for_scripts.comparison_side import Side
from compare.running.launch import last_step

POLL_SECONDS = 0.005


def main(folder: Path, *command: str) -> None:
    """Start `command`, which writes into `folder`/run, repeatedly until the comparison is over."""
    side = Side()
    while True:
        shutil.rmtree(folder / "run", ignore_errors=True)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and not last_step(folder / "run" / "metrics.jsonl")["step"]:
            time.sleep(POLL_SECONDS)
        side.step(starts=1)
        process.kill()
        if process.wait() > 0:
            sys.exit(f"{' '.join(command)}: exit code {process.returncode}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
