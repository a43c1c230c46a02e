"""Copy a measurement to results/, small enough for a repository and without this machine's paths.

    python compare/keep.py runs/compare-20260131-120000 --machine 2-core-xeon --question engines
    python compare/keep.py runs/bench/FIRST/checkpoints --machine 2-core-xeon --question checkpoints

Writes results/MACHINE/DATE-QUESTION/: the plan, and runs.jsonl, which holds the small files of the
trainers and of run.py (or collectives.py), one line per folder. All commands read it like the
original folders; `compare/report.py` makes the report. Left out: warm-ups, TensorBoard's files
(metrics.jsonl holds the same figures), checkpoints, traces, profiles, and all files of the sides of
turns but their settings and environment. The home directory becomes ~, and the project's own folder
a dot. Since this changes the files, the record is sealed anew, if its seals were intact.
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
# Sub-folders of a run's folder, or of the comparison's.
LEFT_OUT = {"warm-up", "tensorboard", "checkpoints", "trace", "profile", "plots"}
OF_PROFILE = "gradients-rank-0.json"  # kept, because predictions read it
KEPT_OF_TURNS = {"block.json", "config.json", "environment.json"}
OPEN = {".md", ".svg", ".txt"}  # kept as files of their own, like the plan
PACKED = {*OPEN, ".json", ".jsonl", ".log", ".csv"}
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


def keep_measurement(
    folder: Positional[Path],
    machine: str,
    question: str,
    results: Path = ROOT / "results",
) -> int:
    """Keep a measurement, and print its new folder; nothing is overwritten.

    Args:
        folder: A finished measurement, for example one in runs/.
        machine: A short name of the machine, such as 2-core-xeon.
        question: A short name of the question that it answers, such as wire-format.
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
        raise UserError(f"{folder}: holds none of {', '.join(PLANS)}; give a measurement's folder")
    date = re.search(r'"created_utc": "(\d{4}-\d{2}-\d{2})', plan.read_text("utf-8", "replace"))
    if date is None:
        raise UserError(f"{plan}: has no date in its field created_utc")
    target = results / machine / f"{date[1]}-{question}"
    if target.exists():
        raise UserError(f"{target} exists: give another --question, or delete it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".draft-") as workshop:
        draft, whole = Path(workshop, target.name), Path(workshop, "open")
        copy_small_files(folder, whole)
        if plan.name == "plan.json":
            comparison = load_comparison(folder)
            broken = [why for *_, why in comparison.damaged_blocks]
            broken += [run.reason for run in comparison.runs if run.reason]
            if broken:
                raise UserError(f"not kept, because part of it is damaged: {'; '.join(broken)}")
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
    """Copy a measurement's small text files, without this machine's paths."""
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
