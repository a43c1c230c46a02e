"""The chain of digests that protects a record against changes.

run.py seals what it has measured: each block of turns (block.json), and each complete whole run
(outcome.json). A seal holds the digests of the plan, of the trainers' sources, of the files beside
it that say what ran, of the block before, and of itself. The seal of a whole run is linked to no
run before it, and a missing run counts as not made. A block that is edited, copied, dropped or from
another comparison breaks the chain, and is named. The chain cannot detect a forger who recomputes
all digests; only measuring again can.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compare.evidence.reading import read_object
from recipe.errors import UserError
from recipe.files import write_json

GUARDED = {"config.json", "environment.json", "summary.json"}
# Fields of plan.json that the seal leaves out: no verdict depends on them, or they may change
# while a comparison runs. The plan's ends count up to the last one at the time of measuring: later
# ones may follow.
FREE = {
    "blocks", "until_interval", "minutes", "ends", "blocks_there", "full_runs", "measure",
    "timeout", "warnings", "left_out", "plan_file", "question", "time",
}  # fmt: skip
# What a wrong part of a seal means.
BROKEN = {
    "place": "it was measured as {} of its comparison",
    "plan": "it was measured under another plan, or the plan was changed afterwards",
    "sources": "the trainers' sources were not those of the plan when it was measured",
    "before": "the block before it is missing, or is another one",
    "files": "these files beside it were changed since it was measured: {}",
}


def digest_of(value: Any) -> str:
    """Return the digest of a JSON value; its formatting does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sealed(
    record: dict[str, Any],
    comparison: Path,
    folder: Path,
    before: str = "",
    files: Iterable[str] | None = None,
    ends: int | None = None,
) -> dict[str, Any]:
    """Return the record of a block or run in `folder`, with its seal.

    `before` is the digest of the block before, "" if there is none; `files` are the names of the
    sealed files (default: all that exist); `ends` is how many ends the plan had (default: all that
    it has now).
    """
    plan = read_object(comparison / "plan.json")
    if files is None:
        guarded = (path for path in folder.rglob("*.json") if path.name in GUARDED)
        files = sorted(path.relative_to(folder).as_posix() for path in guarded)
    ends = len(plan["ends"]) if ends is None else ends
    lasting = {name: value for name, value in plan.items() if name not in FREE}
    linked = {
        "sources": plan.get("trainers_sha256"),
        **{name: value for name, value in record.items() if name != "digest"},
        "place": folder.relative_to(comparison).as_posix(),
        "ends": ends,
        "plan": digest_of({**lasting, "ends": plan["ends"][:ends]}),
        "before": before,
        "files": {name: digest_of(read_object(folder / name)) for name in files},
    }
    return {**linked, "digest": digest_of(linked)}


def read_sealed(path: Path, comparison: Path, before: str = "") -> dict[str, Any]:
    """Read a sealed record; UserError names it, and says where the chain is broken."""
    record = read_object(path)
    if not record.keys() >= {*BROKEN, "digest", "ends"}:
        raise UserError(f"{path}: run.py has not sealed it")
    linked = {name: value for name, value in record.items() if name not in ("digest", "sources")}
    is_whole = digest_of({**linked, "sources": record["sources"]}) == record["digest"]
    if not is_whole:
        raise UserError(f"{path}: it was changed since it was measured")
    expected = sealed(linked, comparison, path.parent, before, record["files"], record["ends"])
    for name, reason in BROKEN.items():
        if (part := record[name]) != expected[name]:
            if name == "files":
                part = ", ".join(file for file in part if part[file] != expected[name][file])
            raise UserError(f"{path}: {reason.format(part)}")
    return record


def reseal(comparison: Path) -> None:
    """Seal an open record again after an intended change, such as removing paths from it."""
    digests: dict[Path, str] = {}
    paths = [*comparison.glob("**/block-*/block.json"), *comparison.glob("block-*/**/outcome.json")]
    for path in sorted(paths, key=lambda path: block_number(path.parent)):
        record, chain = read_object(path), path.parent.parent
        if {"digest", "ends"} <= record.keys() and ".failed-" not in str(path):
            before = digests.get(chain, "") if path.name == "block.json" else ""
            again = sealed(record, comparison, path.parent, before, ends=record["ends"])
            digests[chain] = again["digest"]
            write_json(path, again)


def block_number(folder: Path) -> int:
    """Return the number of a block by its folder's name; 0 if it is not a block's folder."""
    number = folder.name.removeprefix("block-")
    return int(number) if number.isdecimal() else 0
