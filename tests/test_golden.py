"""Recorded comparisons are judged as they were when they were recorded: same ratios, intervals and
decisions. After a change that is meant to alter them: python tests/test_golden.py"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from compare import report

RESULTS = Path(__file__).parent.parent / "results"
GOLDEN = Path(__file__).parent / "golden" / "reports.json"
FOLDERS = sorted(str(path.parent.relative_to(RESULTS)) for path in RESULTS.glob("*/*/record.jsonl"))


def judged(folder: str) -> dict[str, Any]:
    """What a report concludes of a recorded comparison, and the speeds that it shows."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert report.main([str(RESULTS / folder), "--json"]) == 0
    whole = json.loads(text.getvalue())
    return {
        "verdicts": [
            {
                **{name: verdict[name] for name in ("case", "workers", "first", "second")},
                "decision": verdict["decision"],
                "unequal": sorted(fact["field"] for fact in verdict["differences"]),
                "equal_weights": verdict["equal_weights"],
                **{
                    f"{name}_{end}": verdict[name] and verdict[name][end]
                    for name in ("speed", "cpu")
                    for end in ("ratio", "low", "high")
                },
            }
            for verdict in whole["verdicts"]
        ],
        "interactions": [
            [one["speed"][end] for end in ("ratio", "low", "high")] for one in whole["interactions"]
        ],
        "images_per_second": [row["images_per_second"] for row in whole["speed"]],
        "cpu_ms_per_image": [row["cpu_ms_per_image"] for row in whole["speed"]],
        "step_seconds": [step_seconds(row["step_seconds"]) for row in whole["phases"]],
        "top1": [row["top1"] for row in whole["trainings"]],
        "weights": [row["weights"] for row in whole["trainings"]],
    }


def step_seconds(value: Any) -> Any:
    """A cell's step, or a difference of two with the ends of its interval."""
    if isinstance(value, float):
        return value
    mean, half = value
    return [mean, None if half is None else mean - half, None if half is None else mean + half]


def close(value: Any) -> Any:
    """The same, with numbers that may differ in the last digits: sums may be ordered anew."""
    if isinstance(value, dict):
        return {name: close(part) for name, part in value.items()}
    if isinstance(value, list):
        return [close(part) for part in value]
    is_number = isinstance(value, float) and not isinstance(value, bool)
    return pytest.approx(value, rel=1e-9, abs=1e-12) if is_number else value


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_recorded_comparison_is_judged_as_before(folder: str) -> None:
    assert judged(folder) == close(json.loads(GOLDEN.read_text())[folder])


if __name__ == "__main__":
    found = {folder: judged(folder) for folder in FOLDERS}
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
