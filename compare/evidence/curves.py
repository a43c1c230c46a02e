"""Learning curves: of one training, and over several seeds as a band."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from compare.evidence.runs import RunRecord

Part = Literal["training", "validation"]
Figure = Literal["loss", "top1", "top5"]
Curve = list[tuple[float, float]]


class Band(NamedTuple):
    """Several curves at each place where all of them have a value: (x, y) of their median, and of
    the lowest and the highest."""

    median: Curve
    lowest: Curve
    highest: Curve


def by_epochs(run: RunRecord, part: Part, figure: Figure) -> Curve:
    """Return a figure of a run against the epochs trained: of an epoch's training images, as the
    mean over its steps, at the epoch's end; or of each evaluation."""
    lines = run.epochs if part == "training" else run.evaluations
    return [(run.epochs_at(line), getattr(line, figure)) for line in lines]


def by_seconds(run: RunRecord) -> Curve:
    """Return the validation top-1 of a run, percent, against the training clock."""
    return [(line.train_seconds_so_far, line.top1) for line in run.evaluations]


def band(curves: Sequence[Curve]) -> Band:
    """Return the band of some curves: at each x of any of them, from where the last begins to where
    the first ends, with straight lines between a curve's points. Beyond that only some seeds would
    be left, those that took longest. Empty if nothing is common to all."""
    known = [curve for curve in curves if curve]
    if not known or len(known) < len(curves):
        return Band([], [], [])
    begin, end = max(curve[0][0] for curve in known), min(curve[-1][0] for curve in known)
    places = sorted({x for curve in known for x, _ in curve if begin <= x <= end})
    values = np.array(
        [np.interp(places, [x for x, _ in curve], [y for _, y in curve]) for curve in known]
    )
    return Band(
        *(
            [*zip(places, of_all.tolist(), strict=True)]
            for of_all in (np.median(values, axis=0), values.min(axis=0), values.max(axis=0))
        )
    )
