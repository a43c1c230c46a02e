"""Copy a comparison's record to results/, without this machine's paths.

    python compare/keep.py runs/compare-20260131-120000 --machine 2-core-xeon --question engines
    python compare/keep.py runs/bench/FIRST/checkpoints --machine 2-core-xeon --question checkpoints

Writes results/MACHINE/DATE-QUESTION/record.jsonl, from which compare/report.py and
compare/predict.py read all that they need, and adds its SHA-256 to results/sha256sums.txt. The home
directory becomes ~, and the project's own folder a dot, so each line's digest is computed anew.
"""

import json
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from compare.evidence.record import FILE, read_comparison, with_digests
from compare.evidence.words import without_paths
from compare.plan.environment import ROOT
from recipe.command import run_tool
from recipe.errors import UserError
from recipe.files import replace_file

NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
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
    record = read_comparison(folder)
    if record.problem:
        raise UserError(f"not kept, because part of it is damaged: {record.problem}")
    target = results / machine / f"{record.plan.created_utc[:10]}-{question}"
    if target.exists():
        raise UserError(f"{target} exists: give another --question, or delete it")
    lines = [json.loads(line) for line in record.path.read_text().splitlines()]
    text, head = with_digests(shortened(line) for line in lines)
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


def shortened(value: Any) -> Any:
    """Return a JSON value with all its texts as on any machine."""
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, list):
        return [shortened(part) for part in value]
    if isinstance(value, dict):
        return {without_paths(key): shortened(part) for key, part in value.items()}
    return value


main = partial(run_tool, "compare/keep.py", keep_comparison, __doc__, errors=(UserError, OSError))

if __name__ == "__main__":
    sys.exit(main())
