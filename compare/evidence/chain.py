"""The chain of digests by which a record guards itself.

run.py seals what it has measured: each block of turns (block.json), and each whole run that is
complete (outcome.json; such a seal knows no run before it, and a run that is missing counts as not
made). A seal holds the digests of the plan, of the trainers' sources, of the
files beside it that say what ran, of the block before, and of itself. What is edited, copied,
dropped or of another comparison breaks the chain, and is named. Whoever recomputes all digests is
not found: only another measurement is proof against that.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compare.evidence.reading import read_object
from recipe.errors import UserError, refuse
from recipe.files import write_json

GUARDED = {"config.json", "environment.json", "summary.json"}
# Of plan.json: what no verdict depends on, or may change while a comparison goes on. Of its ends
# those count that were set when something was measured: a later one may follow.
FREE = {
    "blocks", "until_interval", "minutes", "ends", "blocks_there", "full_runs", "measure",
    "timeout", "warnings", "left_out", "plan_file", "question", "time",
}  # fmt: skip
# What it means that a part of a seal is another one than it should be.
BROKEN = {
    "place": "it was measured as {} of its comparison",
    "plan": "it was measured by another plan, or the plan was changed since",
    "sources": "it was measured with other sources of the trainers than the plan's",
    "before": "the block before it is missing, or another one",
    "files": "what ran there has other records than when it was measured: {}",
}


def digest_of(value: Any) -> str:
    """Return the digest of a JSON value, however it is written down."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sealed(
    record: dict[str, Any], comparison: Path, folder: Path, before: str = "",
    files: Iterable[str] | None = None, ends: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return a record that belongs into this folder of a comparison, with its seal.

    `before` is the digest of the block before, "" without one; `files` are the names of those that
    are guarded (default: all that are there), `ends` how many the plan has had (default: its
    present ones).
    """
    plan = read_object(comparison / "plan.json")
    if files is None:
        found = (path for path in folder.rglob("*.json") if path.name in GUARDED)
        files = sorted(path.relative_to(folder).as_posix() for path in found)
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
    told = read_object(path)
    refuse((not told.keys() >= {*BROKEN, "digest", "ends"}, f"{path}: run.py has not sealed it"))
    own = {name: value for name, value in told.items() if name not in ("digest", "sources")}
    is_whole = digest_of({**own, "sources": told["sources"]}) == told["digest"]
    refuse((not is_whole, f"{path}: it was changed since it was measured"))
    again = sealed(own, comparison, path.parent, before, told["files"], told["ends"])
    for name, reason in BROKEN.items():
        if (found := told[name]) != again[name]:
            if name == "files":
                found = ", ".join(file for file in found if found[file] != again[name][file])
            raise UserError(f"{path}: {reason.format(found)}")
    return told


def reseal(comparison: Path) -> None:
    """Seal an open record anew after a change that is meant, as when paths are taken out of it."""
    digests: dict[Path, str] = {}
    found = [*comparison.glob("**/block-*/block.json"), *comparison.glob("block-*/**/outcome.json")]
    for path in sorted(found, key=lambda path: block_number(path.parent)):
        told, chain = read_object(path), path.parent.parent
        if {"digest", "ends"} <= told.keys() and ".failed-" not in str(path):
            before = digests.get(chain, "") if path.name == "block.json" else ""
            again = sealed(told, comparison, path.parent, before, ends=told["ends"])
            digests[chain] = again["digest"]
            write_json(path, again)


def block_number(folder: Path) -> int:
    """Return the number of a block by its folder's name; 0 if that is no block's."""
    number = folder.name.removeprefix("block-")
    return int(number) if number.isdecimal() else 0
