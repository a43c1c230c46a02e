"""Findings in words: numbers, names of runs and of configurations."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare.evidence.paired import Estimate
from compare.evidence.records import ENGINES, Comparison, RunRecord
from recipe.record.schema import CONTROL


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def place_text(case: str, workers: int) -> str:
    """Name a case at a number of workers; of a plan without cases only these."""
    return ", ".join(filter(None, [case, count(workers, "worker")]))


def three_digits(value: float) -> str:
    """Print a positive number with at least three digits, zeros at the end included, so that a
    column of like numbers stands in line."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def loss_text(loss: float | None) -> str:
    if loss is None:
        return "–"
    return f"{loss:.4f}" if loss < 1000 else f"{loss:.2e}"  # of a training that diverged


def short(value: Any) -> str:
    """Print a value; of a digest, its first 12 digits."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(short(part) for part in value) or "none"
    if isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef"):
        return f"{value[:12]}…"
    return re.sub(f"[{CONTROL}]", "?", str(value))


def digits(estimate: Estimate) -> int:
    """Return the decimals to print: enough that a narrow interval does not round away, and that no
    bound reads 1.00 which is not 1."""
    if estimate.low is None or estimate.high is None:
        return 2
    places = 3 if min(estimate.high - estimate.low, abs(estimate.ratio - 1)) < 0.05 else 2
    bounds = [bound for bound in (estimate.low, estimate.high) if abs(bound - 1) > 1e-6]
    while any(round(bound, places) == 1 for bound in bounds):
        places += 1
    return places


def ratio_text(estimate: Estimate) -> str:
    return f"{estimate.ratio:.{digits(estimate)}f}"


def interval_text(estimate: Estimate) -> str:
    places, percent = digits(estimate), f"{100 * estimate.confidence:.4g}"
    return f"{percent} % interval {estimate.low:.{places}f} to {estimate.high:.{places}f}"


def percent_text(share: float) -> str:
    """Print a share with two digits: 0.03 is 3 %."""
    percent = 100 * share
    return f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"


def bound_text(estimate: Estimate) -> str:
    """Print the largest difference that an interval leaves possible, never less than it is."""
    percent = 100 * estimate.bound
    tenths = math.ceil(10 * percent - 1e-9) / 10
    return f"{tenths:.1f} %" if tenths < 10 else f"{math.ceil(percent)} %"


def run_text(run: RunRecord) -> str:
    """Name a run in a message."""
    block = f"block {run.block}" if run.block else "phases"
    case = f"{run.case}, " if run.case else ""
    return f"{block}, {case}{run.configuration}, {count(run.workers, 'worker')}"


def label_of(comparison: Comparison, configuration: str) -> str:
    """Name a configuration by what its complete runs used, and by its own flags and variables; by
    its own name if the runs used different things, or if another one has the same label."""
    names = comparison.configurations
    labels = {name: used_and_set(comparison, name) for name in names}
    label = labels[configuration]
    namesakes = [name for name in names if labels[name] == label]
    if len(namesakes) == 1:
        return label
    if comparison.plan.null and len(namesakes) == 2:
        return label if configuration == namesakes[0] else f"{label}, again"
    return f"{label} as {configuration}"


def used_and_set(comparison: Comparison, configuration: str) -> str:
    """Return what a configuration's runs used, as in "DDP (torchrun, Gloo) with --static-graph", or
    "DDP over Gloo" where the plan's configurations make a square."""
    runs = [run for run in comparison.written if run.configuration == configuration]
    labels = {
        f"{ENGINES.get(run.engine, run.engine)} ({run.launcher}, {run.environment.transport})"
        for run in runs
    }
    if len(labels) != 1:
        return configuration
    label, own = labels.pop(), comparison.configurations[configuration]
    for (engine, transport), name in comparison.square.items():
        if name == configuration:
            label = f"{ENGINES[engine]} over {transport}"
    settings = [*own.flags]
    if (
        "--knobs" not in settings
    ):  # but for all configurations: a reader must know that it was tuned
        files = {run.config.knobs for run in runs if run.config.knobs}
        settings += [f"--knobs {name}" for name in sorted(files)]
    settings += [f"{name}={value}" for name, value in own.environment.items()]
    return f"{label} with {' '.join(settings)}" if settings else label


def shortest_unique_names(folders: Sequence[Path]) -> list[str]:
    """Name folders by the end of their paths: by as much of it as tells them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names
