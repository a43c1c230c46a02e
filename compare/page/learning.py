"""Plots of learning curves: one line for the trainings of each configuration, over all their
seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compare.evidence.curves import Curve, Figure, Part, band, by_epochs, by_seconds
from compare.evidence.runs import RunRecord
from compare.page.chart import (
    MUTED,
    Layer,
    Plot,
    colour_of,
    linear,
    series_layers,
    thinned,
    values_of,
)

SECTION = "Learning curves"  # of the page
PARTS: tuple[Part, ...] = ("training", "validation")  # of each figure; the last is drawn on top
# A figure's name, its unit in the value that the pointer shows, and its axis.
FIGURES: dict[Figure, tuple[str, str, str]] = {
    "top1": ("Top-1", " %", "top-1, %"),
    "top5": ("Top-5", " %", "top-5, %"),
    "loss": ("Loss", "", "loss"),
}
OF_SEEDS = (
    "Of several seeds: the median, with the range from lowest to highest as far as all of them "
    "trained, and thin lines for single seeds."
)
DISTURBED = "Disturbed: other processes slowed it, so its times are too long."
DIAMONDS = (
    "Diamonds: where a training reached the accuracy whose time is compared; hollow: the best of "
    "one that did not."
)
SEEDS_IN_DETAIL = 8  # of a configuration: nobody can tell more thin lines apart
MAX_POINTS = 900  # over the lines of a configuration: a page must stay below a megabyte


@dataclass(frozen=True)
class Trainings:
    """The complete trainings of one configuration, one for each seed, each with evaluations."""

    label: str
    index: int  # of its colour, marker and dashes
    runs: Sequence[RunRecord]

    @property
    def colour(self) -> str:
        return colour_of(self.index)


def learning_plots(trainings: Sequence[Trainings], target: float | None = None) -> list[Plot]:
    """Return top-1 against time; and each figure against the epochs, unless no training was
    evaluated twice. `target`: the top-1 whose time is compared, percent."""
    runs = [run for of_one in trainings for run in of_one.runs]
    has_curves = any(len(run.evaluations) > 1 for run in runs)
    return [
        plot_against_time(trainings, target),
        *(plot_against_epochs(trainings, figure, target) for figure in FIGURES if has_curves),
    ]


def plot_against_time(trainings: Sequence[Trainings], target: float | None) -> Plot:
    """Show validation top-1 against the training clock, and where each training reached the
    target."""
    layers = []
    for of_one in trainings:
        for remark, is_slowed in (("", False), (", disturbed", True)):
            runs = [run for run in of_one.runs if run.is_disturbed == is_slowed]
            part = Trainings(f"{of_one.label}{remark}", of_one.index, runs)
            layers += curve_layers(part, by_seconds, lambda x, y: f"{y:.2f} % after {x:,.4g} s")
    seconds, top1 = values_of(layers)
    if target is not None:
        marks = [target_mark(of_one, run, target) for of_one in trainings for run in of_one.runs]
        layers = [target_line(target, seconds), *layers, *marks]
    is_disturbed = any(run.is_disturbed for of_one in trainings for run in of_one.runs)
    notes = [
        "Validation top-1 against training time, evaluation included.",
        OF_SEEDS if has_seeds(trainings) else "",
        DISTURBED if is_disturbed else "",
        DIAMONDS if target is not None else "",
    ]
    return Plot(
        "time-to-accuracy",
        "Top-1 against time",
        " ".join(filter(None, notes)),
        linear(seconds, "seconds since training began, evaluation included", zero=True),
        linear(top1 if target is None else [*top1, target], "validation top-1, %"),
        layers,
        section=SECTION,
    )


def plot_against_epochs(
    trainings: Sequence[Trainings], figure: Figure, target: float | None
) -> Plot:
    """Show a figure of training and of validation against the epochs."""
    name, _, axis = FIGURES[figure]
    layers = [
        layer
        for part in PARTS
        for of_one in trainings
        for layer in epoch_layers(of_one, part, figure)
    ]
    epochs, values = values_of(layers)
    if target is not None and figure == "top1":
        layers, values = [target_line(target, epochs), *layers], [*values, target]
    notes = [
        f"{name} of the validation images, and dotted of an epoch's training images: the mean over "
        "its steps, while the weights change and images are augmented.",
        OF_SEEDS if has_seeds(trainings) else "",
    ]
    return Plot(
        f"learning-{figure}",
        f"{name} against epochs",
        " ".join(filter(None, notes)),
        linear(epochs, "epochs", zero=True),
        linear(values, axis),
        layers,
        section=SECTION,
    )


def epoch_layers(trainings: Trainings, part: Part, figure: Figure) -> list[Layer]:
    """Return a figure of training, or of validation, against the epochs."""
    _, unit, _ = FIGURES[figure]
    return curve_layers(
        trainings,
        lambda run: by_epochs(run, part, figure),
        lambda x, y: f"{part} {y:.4g}{unit} after {x:.3g} epochs",
        is_training=part == "training",
    )


def curve_layers(
    trainings: Trainings,
    curve_of: Callable[[RunRecord], Curve],
    text_of: Callable[[float, float], str],
    is_training: bool = False,
) -> list[Layer]:
    """Return the curve of a single seed. Of several: their median as far as all of them go, above
    their range and the curve of each, which goes on to its end. `text_of`: a point in words."""
    curves, colour = [curve_of(run) for run in trainings.runs], trainings.colour
    if not any(curves):
        return []
    most = MAX_POINTS // (3 + len(curves))
    line, lowest, highest = (thinned(part, most) for part in band(curves))
    below, whose = list[Layer](), ""
    if len(curves) > 1:
        whose = f" (median of {len(curves)} seeds)"
        below = [
            Layer("area", [*lowest, *reversed(highest)], colour, 0, opacity=0.16),
            *(
                Layer("line", thinned(own, most), colour, 0.5, opacity=0.45)
                for own in thinned(curves, SEEDS_IN_DETAIL)
            ),
        ]
    texts = [f"{trainings.label}{whose}: {text_of(x, y)}" for x, y in line]
    if is_training:
        return [*below, Layer("line", line, colour, 1, "1 2", texts=texts, key="training")]
    return [*below, *series_layers(trainings.index, trainings.label, line, texts, 1.3, 2)]


def target_line(target: float, places: Sequence[float]) -> Layer:
    """Return a dashed line at the top-1 whose time is compared, from 0 to the last of the
    places."""
    ends = [(0.0, target), (max(places, default=0.0), target)]
    return Layer("line", ends, MUTED, 1, "3 2", key=f"{target:g} %")


def target_mark(trainings: Trainings, run: RunRecord, target: float) -> Layer:
    """Return a mark where a training reached the target; of one that did not, a hollow one at its
    best evaluation."""
    reached = run.first_to_reach(target)
    line = reached or max(run.evaluations, key=lambda one: one.top1)
    found = f"{line.top1:.2f} % after {line.train_seconds_so_far:,.4g} s"
    text = f"{trainings.label}, seed {run.config.seed}: {'' if reached else 'at most '}{found}"
    point = (line.train_seconds_so_far, line.top1)
    return Layer("diamond", [point], trainings.colour, 3, hollow=reached is None, texts=[text])


def has_seeds(trainings: Sequence[Trainings]) -> bool:
    """Return whether a configuration was trained with several seeds."""
    return any(len(of_one.runs) > 1 for of_one in trainings)
