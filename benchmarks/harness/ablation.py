"""What binds two workers: the trainer's own measurement of exposed communication.

One run more of the same command with --ablation-steps, in which stretches of steps alternate whose
gradients are exchanged and whose are not (recipe/training/phases.py).
"""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

from compare.running.launch import end_processes
from compare.running.sides import MeasurementError, Side
from compare.running.stage import start_process, tail
from compare.running.turns import say

STRETCH = 5  # steps; the first of each stretch does not count
STEPS = 41
SECONDS = 600


def measure(side: Side, folder: Path) -> dict[str, Any]:
    """The `phases` of a short run of a side's command: seconds a step, of the mean rank."""
    say(f"what binds {side.name}? {STEPS} steps with --ablation-steps {STRETCH}")
    command = side.command(folder.resolve(), 0)
    command += ["--ablation-steps", str(STRETCH), "--max-steps", str(STEPS)]
    process, mark = start_process(side, command, folder)
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"{shlex.join(command)}: took more than {SECONDS} s") from None
    finally:
        end_processes(process, mark)
    summary = folder / "run" / "summary.json"
    if process.returncode or not summary.exists():
        raise MeasurementError(f"{shlex.join(command)}: failed\n{tail(folder)}")
    ranks = json.loads(summary.read_text())["ranks"]
    names = [name for name in ranks[0] if name.endswith("_seconds") and name != "cpu_seconds"]
    return {name: sum(rank[name] or 0.0 for rank in ranks) / len(ranks) for name in names}


def sentence(phases: dict[str, Any]) -> str:
    """The phases as shares of the step."""
    step = phases["step_seconds"]
    exposed = phases["exposed_communication_seconds"]
    parts = ", ".join(
        f"{name} {phases[f'{name}_seconds'] / step:.1%}"
        for name in ("data", "forward", "backward", "optimizer")
    )
    return (
        f"exposed communication {exposed / step:.1%} of a step of {step * 1000:.0f} ms "
        f"({exposed * 1000:.1f} ms; {parts}), by --ablation-steps in a run of its own"
    )
