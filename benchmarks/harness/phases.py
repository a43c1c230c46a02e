"""Which phase of the step a trainer spends its extra time in, compared with the bare loop.

From what both wrote while they took turns: the trainer's metrics.jsonl, and the bare loop's lines
of the same form. Their n-th steps were made in the same round, seconds apart, so that the machine's
drift is in both; the median of their differences over all blocks leaves its slow moments out.
"""

import json
from pathlib import Path
from statistics import median

PHASES = ("data", "forward", "backward", "optimizer")


def steps_of(path: Path, warm_up: int) -> list[dict[str, float]]:
    """Seconds of each phase of the steps after the warm-up that a side has written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    kept = [step for step in steps if step["kind"] == "step"][warm_up:]
    return [{name: step[f"{name}_seconds"] for name in PHASES} for step in kept]


def difference(folder: Path, side: str, loop: str, warm_up: int) -> str:
    """What a trainer's phases take more than those of a bare `loop`: milliseconds, and percent of a
    step. The metrics of the batch are in "forward", the record's lines in none."""
    pairs = [
        pair
        for block in sorted(folder.glob("block-*"))
        for pair in zip(
            steps_of(block / loop / "0" / "phases.jsonl", warm_up),
            steps_of(block / side / "0" / "run" / "metrics.jsonl", warm_up),
            strict=False,  # either may have written more of its steps
        )
    ]
    if not pairs:
        return "not known, too few steps were recorded"
    step = median(sum(bare.values()) for bare, _ in pairs)
    more = {name: median(other[name] - bare[name] for bare, other in pairs) for name in PHASES}
    parts = ", ".join(
        f"{name} {1000 * value:+.1f} ms ({value / step:+.1%})" for name, value in more.items()
    )
    return f"over {len(pairs)} pairs of steps, a bare one of {1000 * step:.0f} ms: {parts}"
