"""Copy a comparison's record to results/, without this machine's paths and other processes.

    python compare/keep.py runs/compare-20260131-120000 --machine 2-core-xeon --question engines
    python compare/keep.py runs/bench/FIRST/checkpoints --machine 2-core-xeon --question checkpoints

Writes results/MACHINE/DATE-QUESTION/record.jsonl, from which compare/report.py and
compare/predict.py read all that they need, and adds its SHA-256 to results/sha256sums.txt. The home
directory becomes ~, the project's own folder a dot, and each folder that the comparison, or a
side's directory or environment, is in "...", "...1" and so on, so each line's digest is computed
anew.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from compare.evidence.record import FILE, Record, find_comparisons, read_comparison, with_digests
from compare.evidence.words import BUSIEST, without_paths
from compare.plan.environment import COMMITS, ROOT
from recipe.command import run_tool
from recipe.errors import UserError
from recipe.files import replace_file

NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
OF_THE_SYSTEM = ("/usr/", "/opt/", "/bin/")  # paths that tell nothing of a user
SUMS = "sha256sums.txt"  # `sha256sum --check sha256sums.txt` checks all records


def keep_comparison(
    folder: Positional[Path],
    machine: str,
    question: str,
    results: Path = ROOT / "results",
) -> int:
    """Keep a comparison, and print its new folder; nothing is overwritten.

    Args:
        folder: A finished comparison, for example one in runs/.
        machine: A short name of the machine, such as 2-core-xeon.
        question: A short name of the question that it answers, such as wire-format.
        results: The folder of all records.
    """
    for word in (machine, question):
        if not NAME.fullmatch(word):
            raise UserError(f"{word!r}: write small letters, digits, dots and hyphens")
    record = read_comparison(*find_comparisons([folder]))
    if record.problem:
        raise UserError(f"not kept, because part of it is damaged: {record.problem}")
    target = results / machine / f"{record.plan.created_utc[:10]}-{question}"
    if target.exists():
        raise UserError(f"{target} exists: give another --question, or delete it")
    places = places_of(record)
    lines = [json.loads(line) for line in record.path.read_text().splitlines()]
    text, head = with_digests(shortened(line, places) for line in lines)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".draft-") as workshop:
        draft = Path(workshop, target.name)
        draft.mkdir()
        replace_file(draft / FILE, text)
        draft.rename(target)
    name, sums = str((target / FILE).relative_to(results)), results / SUMS
    others = sums.read_text().splitlines(keepends=True) if sums.exists() else []
    kept = [line for line in others if not line.rstrip().endswith(f"  {name}")]
    replace_file(sums, "".join([*kept, f"{head}  {name}\n"]))
    print(f"kept: {target}")
    return 0


def places_of(record: Record) -> dict[str, str]:
    """Return the absolute folders that hold the comparison's folder, and the folders and
    environments of a user's own scripts, each with its name in what is kept."""
    named = (os.path.expanduser(own.directory) for own in record.plan.side.values())
    folders = {os.path.normpath(folder) for folder in named if os.path.isabs(folder)}
    folders.add(str(record.folder.resolve()))  # in the commands of runs
    for side in record.sides:
        folder = os.path.dirname(side.environment.script or "")
        folders.add(folder.partition(f"/{COMMITS}/")[0])  # a worktree is where run.py was started
        programs = re.findall(r"\bPATH=(/[^:']+)'?:\"\$PATH\"", side.command)
        for path in (os.path.dirname(side.environment.interpreter or ""), *programs):
            folders.add(path.removesuffix("/bin"))
    places = {os.path.dirname(without_paths(path)) for path in folders}
    own = sorted(place for place in places if place.startswith(("/", "~/")) and place != "/")
    kept = [place for place in own if not f"{place}/".startswith(OF_THE_SYSTEM)]
    return {place: f"...{number or ''}" for number, place in enumerate(kept)}


def shortened(value: Any, places: Mapping[str, str]) -> Any:
    """Return a JSON value with all its texts as on any machine, where sides were in `places`, and
    without the names of other processes. UserError if two keys of a table would become the same."""
    if isinstance(value, str):
        text = re.sub(rf"{BUSIEST}.*\)", "", without_paths(value))
        for place in sorted(places, key=len, reverse=True):
            text = re.sub(rf"(?<![\w./~-]){re.escape(place)}(?![\w.-])", places[place], text)
        return text
    if isinstance(value, list):
        return [shortened(part, places) for part in value]
    if isinstance(value, dict):
        table = {shortened(key, places): shortened(part, places) for key, part in value.items()}
        if len(table) < len(value):
            raise UserError(
                f"not kept: without this machine's paths two of {[*value]} are the same"
            )
        return table
    return value


main = partial(run_tool, "compare/keep.py", keep_comparison, __doc__)

if __name__ == "__main__":
    sys.exit(main())
