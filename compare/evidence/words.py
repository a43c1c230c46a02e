"""Figures in words: what the lines of run.py, the predictions and the report have in common."""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare.evidence.equality import Fact
from compare.evidence.group import Group
from compare.evidence.paired import Estimate
from compare.plan.environment import ROOT
from recipe.errors import CONTROL

OWN_SCRIPTS = "these scripts"
SHARED_GPU = "ranks share a GPU, so speeds mean nothing"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def place_text(case: str, workers: int) -> str:
    """Name a case at a number of workers: without the case if the plan has none, and without the
    workers for a user's own scripts, which do not state them."""
    parts = [case, count(workers, "worker") if workers else ""]
    return ", ".join(filter(None, parts)) or OWN_SCRIPTS


def three_digits(value: float) -> str:
    """Print a positive number with at least three digits, trailing zeros included, so that similar
    numbers in a column align."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def short(value: Any) -> str:
    """Print a value; a digest is cut to its first 12 digits."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(short(part) for part in value) or "none"
    if isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef"):
        return f"{value[:12]}…"
    return re.sub(f"[{CONTROL}]", "?", str(value))


BUSIEST = ", mostly by "  # what comes before the names of a machine's other processes


def without_paths(text: str) -> str:
    """Replace the project's folder and the home directory, which mean nothing on other machines."""
    shortened = re.sub(re.escape(str(ROOT)) + r"(?![\w.-])", ".", text)
    home = os.path.expanduser("~")  # "~" if there is none, and "/" in some containers
    return shortened if home == "/" else shortened.replace(f"{home}/", "~/")


def digits(estimate: Estimate) -> int:
    """Return the number of decimals to print: enough that a narrow interval stays visible, and that
    no bound is rounded to 1."""
    if estimate.low is None or estimate.high is None:
        return 2
    places = 3 if min(estimate.high - estimate.low, abs(estimate.ratio - 1)) < 0.05 else 2
    bounds = [bound for bound in (estimate.low, estimate.high) if abs(bound - 1) > 1e-6]
    while any(round(bound, places) == 1 for bound in bounds):
        places += 1
    return places


def ratio_text(estimate: Estimate) -> str:
    return f"{estimate.ratio:.{digits(estimate)}f}"


def percent_text(share: float) -> str:
    """Print a share as a percentage with two digits: 0.03 is 3 %."""
    percent = 100 * share
    return f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"


def points_text(points: float) -> str:
    """Print a difference of top-1 in percentage points, with its sign."""
    return f"{points:+.2f}".replace("-", "−") if abs(points) >= 0.005 else "0.00"


def counted_text(groups: Sequence[Group]) -> str:
    """Say how much of the time was turns that count; "" for whole runs, and where a record has no
    times of its blocks."""
    counted = sum(block.counted_seconds for group in groups for block in group.turns)
    of_blocks = sum(group.seconds + group.disturbed_seconds for group in groups)
    of_runs = sum(run.seconds for group in groups for run in group.complete)
    if not counted or not of_blocks:
        return ""
    text = f"Turns that count: {counted:.0f} s, {percent_text(counted / of_blocks)} of the blocks"
    if of_runs:
        text += f", {percent_text(counted / (of_blocks + of_runs))} of blocks and full runs"
    return f"{text}."


def shortest_unique_names(folders: Sequence[Path]) -> list[str]:
    """Name folders by their paths below their common parent folder."""
    paths = [folder.resolve() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def difference_text(fact: Fact) -> str:
    """Return a difference in words: the field, each configuration's value, and the blocks."""
    if fact.changed and (fact.is_varied or not fact.unequal_blocks):
        values = ", ".join(f"{short(row.value)} (block {row.block})" for row in fact.changed)
        return f"{fact.field} changed between blocks: {values}"
    rows = (row for row in fact.rows if row.block == fact.unequal_blocks[0])
    values = ", ".join(f"{short(row.value)} ({row.configuration})" for row in rows)
    blocks = ", ".join(map(str, fact.unequal_blocks))
    return f"{fact.field}: {values}; block{'' if len(fact.unequal_blocks) == 1 else 's'} {blocks}"
