"""Keep a measurement in results/, small enough for a repository and without this machine's paths.

    python compare/keep.py runs/compare-20260131-120000 --machine 2-core-xeon --question engines
    python compare/keep.py runs/bench/FIRST/checkpoints --machine 2-core-xeon --question checkpoints

Writes results/MACHINE/DATE-QUESTION/: the plan, and runs.jsonl, which holds the small files that
the trainers and run.py (or collectives.py) wrote, a line for each folder. All
commands read it as they read the folders: `compare/report.py` makes the report. Left out: warm-ups,
TensorBoard's files (metrics.jsonl holds the same), checkpoints, traces and profiles, and of the
sides of turns all but their settings and environment. The home directory becomes ~, and the
project's own folder a dot; so the record is sealed anew, if its seals were whole.
"""

import re
import sys
import tempfile
from functools import partial
from pathlib import Path

from tyro.conf import Positional

from compare.evidence import packed
from compare.evidence.chain import reseal
from compare.evidence.records import load_comparison
from compare.evidence.words import without_paths
from compare.plan.environment import ROOT
from recipe.command import run_tool
from recipe.errors import UserError, refuse
from recipe.files import replace_file

PLANS = ("plan.json", "collectives.json")
# Of a run's folder, and of the comparison's.
LEFT_OUT = {"warm-up", "tensorboard", "checkpoints", "trace", "profile", "plots"}
OF_PROFILE = "gradients-rank-0.json"  # which a prediction reads
KEPT_OF_TURNS = {"block.json", "config.json", "environment.json"}
OPEN = {".md", ".svg", ".txt"}  # beside the plan
PACKED = {*OPEN, ".json", ".jsonl", ".log", ".csv"}
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


def keep_measurement(
    folder: Positional[Path],
    machine: str,
    question: str,
    results: Path = ROOT / "results",
) -> int:
    """Keep a measurement, and say where; nothing is overwritten.

    Args:
        folder: A finished measurement, as under runs/.
        machine: Short, such as 2-core-xeon.
        question: What it answers, such as wire-format.
        results: The folder of all records.
    """
    refuse(
        *(
            (not NAME.fullmatch(word), f"{word!r}: write small letters, digits, dots and hyphens")
            for word in (machine, question)
        )
    )
    plan = next((folder / name for name in PLANS if (folder / name).exists()), None)
    if plan is None:
        raise UserError(f"{folder}: holds none of {', '.join(PLANS)}")
    date = re.search(r'"created_utc": "(\d{4}-\d{2}-\d{2})', plan.read_text("utf-8", "replace"))
    if date is None:
        raise UserError(f"{plan}: has no date in its field created_utc")
    target = results / machine / f"{date[1]}-{question}"
    refuse((target.exists(), f"{target} exists: take another --question, or delete it"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".draft-") as workshop:
        draft, whole = Path(workshop, target.name), Path(workshop, "open")
        copy_small_files(folder, whole)
        if plan.name == "plan.json":
            comparison = load_comparison(folder)
            broken = [why for *_, why in comparison.damaged_blocks]
            broken += [run.reason for run in comparison.runs if run.reason]
            refuse((broken, f"not kept, since part of it is damaged: {'; '.join(broken)}"))
            reseal(whole)
        draft.mkdir()
        for path in whole.iterdir():
            if path.suffix in OPEN or path == whole / plan.name:
                path.rename(draft / path.name)
        texts = {
            path.relative_to(whole): path.read_text("utf-8", "surrogateescape")
            for path in whole.rglob("*")
            if path.is_file()
        }
        replace_file(draft / packed.PACKED, packed.lines_of(texts))
        draft.rename(target)
    print(f"kept: {target}")
    return 0


def copy_small_files(folder: Path, to: Path) -> None:
    """Copy the texts of a measurement that are worth keeping, without this machine's paths."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        kept = KEPT_OF_TURNS | ({"output.log"} if ".failed-" in str(name) else set())
        is_left_out = name.parts[0] == "turns" and name.name not in kept
        is_left_out |= not LEFT_OUT.isdisjoint(name.parts) and name.name != OF_PROFILE
        if path.suffix in PACKED and not is_left_out and path.is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            text = without_paths(path.read_text("utf-8", "surrogateescape"))
            (to / name).write_text(text, "utf-8", "surrogateescape")


main = partial(run_tool, "compare/keep.py", keep_measurement, __doc__, errors=(UserError, OSError))

if __name__ == "__main__":
    sys.exit(main())
