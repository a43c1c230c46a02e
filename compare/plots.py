"""The report's plots: SVG by matplotlib, made to stand inside an HTML page.

Colours become CSS variables and letters stay letters, so that the page decides on light or dark
and on the font, and a plot can be read aloud, searched and printed.
"""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("svg")  # before pyplot is imported: no display, and nothing else is loaded
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from compare.findings import Verdict, all_workers
from compare.records import Comparison, RunRecord

# After Okabe and Ito ("Color Universal Design", 2008): people who see few colours can tell these
# apart. Every series has a marker and a dash pattern of its own as well, for print.
SERIES_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#8c6d00")
MARKERS = ("o", "s", "^", "D", "v")
DASHES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0, ()), (0, (4, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (2.5, 1)),
)  # fmt: skip
INK, MUTED, GRID = "#101010", "#606060", "#d8d8d8"  # replaced by CSS variables in `as_svg`
MAX_POINTS = 160  # of a line: a run of 450,000 steps must not make a page of 50 MB

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "compare",  # the same run folders give the same page, byte by byte
    "font.family": "DejaVu Sans",
    "font.size": 8.8,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.columnspacing": 1.4,
    "legend.borderaxespad": 0,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Plot:
    """A figure of the page."""

    title: str
    caption: str
    svg: str


def draw_plots(comparison: Comparison) -> list[Plot]:
    """Return the page's plots but the verdict's, which stands with its sentence."""
    plots = [plot_throughput(comparison), plot_step_times(comparison)]
    for workers in all_workers(comparison):
        runs = [run for run in comparison.complete if run.workers == workers]
        if runs:
            plots.append(plot_steps(comparison, runs, workers))
            plots += plot_learning(comparison, runs, workers)
    return plots


def plot_verdicts(verdicts: Sequence[Verdict]) -> Plot | None:
    """Draw each block's ratio, their mean and its interval, around the line of equal speed."""
    shown = [verdict for verdict in verdicts if verdict.speed is not None]
    if not shown:
        return None
    pairs = {(verdict.first, verdict.second) for verdict in shown}
    rows = []
    with plt.rc_context(STYLE):
        figure, axes = new_figure(height=0.95 + 0.42 * len(shown))
        for y, verdict in enumerate(shown):
            speed = verdict.speed
            assert speed is not None
            axes.plot(
                speed.ratios,
                [y + 0.22] * speed.blocks,
                "o",
                color=MUTED,
                markersize=3,
                markerfacecolor="none",
                markeredgewidth=0.8,
            )
            if speed.low is not None and speed.high is not None:
                axes.plot([speed.low, speed.high], [y, y], color=INK, linewidth=1.6)
            axes.plot([speed.ratio], [y], "D", color=INK, markersize=5)
            name = f"{verdict.workers} worker{'s' if verdict.workers > 1 else ''}"
            rows.append(name if len(pairs) == 1 else f"{verdict.second}, {name}")
        axes.axvline(1, color=MUTED, linewidth=1, dashes=(3, 2))
        axes.set_yticks(range(len(shown)), rows)
        axes.set_ylim(len(shown) - 0.45, -0.55)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        low = min(min(v.speed.ratios + (v.speed.low or 1, 1.0)) for v in shown if v.speed)
        high = max(max(v.speed.ratios + (v.speed.high or 1, 1.0)) for v in shown if v.speed)
        reach = max(high - 1, 1 - low, 0.01) * 1.12
        axes.set_xlim(max(0.0, 1 - reach), 1 + reach)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        first, second = shown[0].first, shown[0].second
        if len(pairs) == 1:
            axes.set_xlabel(f"speed of {first} / speed of {second}")
            axes.text(0, 1.02, f"{second} faster", transform=axes.transAxes, color=MUTED)
            axes.text(1, 1.02, f"{first} faster", transform=axes.transAxes, color=MUTED, ha="right")
        else:
            axes.set_xlabel(f"speed of {first} / its speed")
        title = "Speed ratio and its 95 % interval"
        caption = (
            "Diamond and line: mean ratio and 95 % interval. Rings: one ratio for each "
            "block. At the dashed line both are equally fast."
        )
        alternative = f"{title}. " + " ".join(verdict.sentence() for verdict in shown)
        return Plot(title, caption, as_svg(figure, "verdict", alternative))


def plot_throughput(comparison: Comparison) -> Plot:
    """Draw images a second against workers, with the line of ideal scaling."""
    told = []
    with plt.rc_context(STYLE):
        figure, axes = new_figure()
        all_n = all_workers(comparison)
        names = present_configurations(comparison.complete, comparison)
        for name in names:
            index = comparison.plan["configurations"].index(name)
            colour = SERIES_COLOURS[index % len(SERIES_COLOURS)]
            speeds: dict[int, list[float]] = {}
            for run in comparison.complete:
                if run.configuration == name:
                    speeds.setdefault(run.workers, []).append(run.summary["images_per_second"])
            workers = sorted(speeds)
            middle = [median(speeds[n]) for n in workers]
            # Side by side rather than on top of each other.
            shift = (names.index(name) - (len(names) - 1) / 2) * 0.045 * (max(all_n) - min(all_n))
            for n in workers:
                axes.plot(
                    [n + shift] * len(speeds[n]),
                    speeds[n],
                    MARKERS[index % 5],
                    color=colour,
                    markersize=4,
                    alpha=0.55,
                    markeredgewidth=0,
                )
            axes.plot(
                [n + shift for n in workers],
                middle,
                color=colour,
                linewidth=1.8,
                linestyle=DASHES[index % 5],
                marker=MARKERS[index % 5],
                markersize=5.5,
                label=name,
            )
            axes.plot(
                [n + shift for n in workers],
                [middle[0] * n / workers[0] for n in workers],
                color=MUTED,
                linewidth=0.9,
                dashes=(1.5, 2),
                zorder=1,
            )
            pairs = zip(workers, middle, strict=True)
            told.append(f"{name}: " + ", ".join(f"{value:,.0f} at {n}" for n, value in pairs))
        axes.set_xticks(all_n)
        margin = 0.12 * (max(all_n) - min(all_n)) or 0.5
        axes.set_xlim(min(all_n) - margin, max(all_n) + margin)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("workers")
        axes.set_ylabel("images/s")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        ideal = Line2D([], [], color=MUTED, linewidth=0.9, dashes=(1.5, 2), label="ideal")
        add_legend(figure, [*axes.get_legend_handles_labels()[0], ideal])
        return Plot(
            "Throughput against workers",
            "Training images a second, all workers together, without the first steps and without "
            "evaluation. Large marks: median; small: each run. Dotted: as many times the speed as "
            "workers.",
            as_svg(
                figure,
                "throughput",
                "Median training throughput in images a second. " + "; ".join(told) + ".",
            ),
        )


def plot_step_times(comparison: Comparison) -> Plot:
    """Draw how the times of single steps are distributed, a box for each run's steps."""
    told = []
    with plt.rc_context(STYLE):
        cells = [
            (workers, name)
            for workers in all_workers(comparison)
            for name in comparison.plan["configurations"]
            if any(
                (run.configuration, run.workers) == (name, workers) for run in comparison.complete
            )
        ]
        figure, axes = new_figure(height=0.85 + 0.5 * len(cells))
        for y, (workers, name) in enumerate(cells):
            index = comparison.plan["configurations"].index(name)
            colour = SERIES_COLOURS[index % len(SERIES_COLOURS)]
            runs = [
                run
                for run in comparison.complete
                if (run.configuration, run.workers) == (name, workers)
            ]
            middles = []
            for order, run in enumerate(runs):
                seconds = sorted(1000 * line["seconds"] for line in run.metrics("step"))
                if not seconds:
                    continue
                at = y + (order - (len(runs) - 1) / 2) * min(0.6 / len(runs), 0.22)
                low, first, middle, third, high = (
                    seconds[min(int(part * len(seconds)), len(seconds) - 1)]
                    for part in (0.05, 0.25, 0.5, 0.75, 0.95)
                )
                axes.plot([low, high], [at, at], color=colour, linewidth=0.9)
                axes.plot(
                    [first, third],
                    [at, at],
                    color=colour,
                    linewidth=3.4,
                    alpha=0.55,
                    solid_capstyle="butt",
                )
                axes.plot([middle], [at], MARKERS[index % 5], color=colour, markersize=3.6)
                middles.append(middle)
            if middles:
                told.append(f"{name} at {workers}: {median(middles):.3g} ms")
        names = [f"{name}, {workers}" for workers, name in cells]
        axes.set_yticks(range(len(cells)), names)
        axes.set_ylim(len(cells) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("milliseconds a step")
        return Plot(
            "Step times",
            "One line a run: 5th to 95th percentile of its steps; thick: the middle half; mark: "
            "median. The number after the name is that of the workers.",
            as_svg(figure, "step-times", "Median time of a step. " + "; ".join(told) + "."),
        )


def plot_steps(comparison: Comparison, runs: list[RunRecord], workers: int) -> Plot:
    """Draw each run's speed from its first step to its last: drift and hiccups show here."""

    def points(run: RunRecord) -> list[tuple[float, float]]:
        lines = run.metrics("step")
        epochs = steps_per_epoch(run)
        return [(line["step"] / epochs, line["images_per_second"]) for line in lines]

    with plt.rc_context(STYLE):
        figure, axes = new_figure()
        for run in runs:
            draw_run(axes, comparison, run, binned(points(run)), width=0.9, alpha=0.75)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.set_xlabel("epoch")
        axes.set_ylabel("images/s")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        add_legend(figure, series_handles(comparison, runs))
        title = f"Throughput over the run, {workers_text(workers)}"
        return Plot(
            title,
            "Images a second of single steps, one line a run (medians of neighbouring steps where "
            f"a run has more than {MAX_POINTS}).",
            as_svg(figure, f"steps-{workers}", f"{title}: images a second at each step."),
        )


def plot_learning(comparison: Comparison, runs: list[RunRecord], workers: int) -> list[Plot]:
    """Draw loss and top-1 against epochs, and top-1 against the training clock."""
    same = {(run.block, run.summary["weights_sha256"]) for run in runs}
    engines_coincide = len({run.configuration for run in runs}) > 1 and len(same) == len(
        {run.block for run in runs}
    )
    note = (
        " All final weights of a block are bit-equal: the curves of the configurations coincide."
        if engines_coincide
        else ""
    )
    at = workers_text(workers)
    plots = []
    for field, name, unit in (("loss", "Loss", "cross-entropy"), ("top1", "Top-1", "top-1, %")):
        with plt.rc_context(STYLE):
            figure, axes = new_figure()
            told = []
            for run in runs:
                train = [(line["epoch"] + 1, line[field]) for line in run.metrics("epoch")]
                test = [(line["epoch"] + 1, line[field]) for line in evaluations(run)]
                draw_run(axes, comparison, run, binned(train), width=1.2, alpha=0.9, dotted=True)
                draw_run(axes, comparison, run, binned(test), width=1.5, alpha=0.85)
                if test:
                    told.append(f"{run.configuration} block {run.block}: {test[-1][1]:.4g}")
            if field == "loss":
                scale_losses(axes)
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            axes.set_xlabel("epoch")
            axes.set_ylabel(unit)
            kinds = [
                Line2D([], [], color=MUTED, linewidth=1.2, dashes=(2, 1.4), label="training"),
                Line2D([], [], color=MUTED, linewidth=1.5, label="validation"),
            ]
            add_legend(figure, [*series_handles(comparison, runs), *kinds])
            title = f"{name} by epoch, {at}"
            plots.append(
                Plot(
                    title,
                    "Every block is drawn; short dashes are training figures (of augmented "
                    f"images), the others validation.{note}",
                    as_svg(
                        figure,
                        f"{field}-{workers}",
                        f"{title}. Last validation values: {'; '.join(told)}.",
                    ),
                )
            )
    with plt.rc_context(STYLE):
        figure, axes = new_figure()
        told = []
        for run in runs:
            test = [(line["train_seconds_so_far"], line["top1"]) for line in evaluations(run)]
            draw_run(axes, comparison, run, test, width=1.3, alpha=0.85, marked=len(test) <= 30)
            if test:
                told.append(
                    f"{run.configuration} block {run.block}: "
                    f"{test[-1][1]:.4g} % after {test[-1][0]:.4g} s"
                )
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds since training began, evaluation included")
        axes.set_ylabel("validation top-1, %")
        add_legend(figure, series_handles(comparison, runs))
        title = f"Top-1 against time, {at}"
        plots.append(
            Plot(
                title,
                "Validation top-1 on the training clock, which evaluation and checkpoints are on. "
                "One line a run.",
                as_svg(figure, f"time-{workers}", f"{title}. {'; '.join(told)}."),
            )
        )
    return plots


def scale_losses(axes: Axes) -> None:
    """Begin at zero; use a logarithm where one bad epoch would press all others to the floor."""
    values = [value for line in axes.get_lines() for value in np.asarray(line.get_ydata())]
    if values and min(values) > 0 and max(values) / min(values) > 30:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)


def new_figure(height: float = 2.9) -> tuple[Figure, Axes]:
    """Return a figure as wide as a phone: the page never has to shrink its letters."""
    figure, axes = plt.subplots(figsize=(4.4, height), layout="constrained")
    return figure, axes


def add_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Put the legend above the axes, where it can hide no data."""
    columns = 2 if len(handles) in (2, 4) else 3
    figure.legend(handles=list(handles), loc="outside upper left", ncols=columns)


def present_configurations(runs: Iterable[RunRecord], comparison: Comparison) -> list[str]:
    present = {run.configuration for run in runs}
    return [name for name in comparison.plan["configurations"] if name in present]


def series_handles(comparison: Comparison, runs: Iterable[RunRecord]) -> list[Line2D]:
    handles = []
    for name in present_configurations(runs, comparison):
        index = comparison.plan["configurations"].index(name)
        handles.append(
            Line2D(
                [],
                [],
                color=SERIES_COLOURS[index % 5],
                linestyle=DASHES[index % 5],
                linewidth=line_width(index, 1.5),
                label=name,
            )
        )
    return handles


def line_width(index: int, width: float) -> float:
    """The first series is drawn broad, below the others: equal curves both stay in sight."""
    return width * (2.2 if index == 0 else 1.0)


def draw_run(
    axes: Axes,
    comparison: Comparison,
    run: RunRecord,
    points: Sequence[tuple[float, float]],
    width: float,
    alpha: float,
    dotted: bool = False,
    marked: bool = False,
) -> None:
    """Draw one run's line in its configuration's colour."""
    index = comparison.plan["configurations"].index(run.configuration)
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=SERIES_COLOURS[index % 5],
        linewidth=width if dotted else line_width(index, width),
        alpha=alpha if dotted else alpha * (0.55 if index == 0 else 1.0),
        # Dashes of equal curves stand beside each other, since each series begins elsewhere.
        linestyle=(2.8 * index, (2, 3.6)) if dotted else DASHES[index % 5],
        marker=MARKERS[index % 5] if marked else "",
        markersize=3,
        zorder=2 + index,
    )


def binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Thin a long line out: the medians of equally many neighbours."""
    size = -(-len(points) // MAX_POINTS)
    if size <= 1:
        return list(points)
    return [
        (median(x for x, _ in points[i : i + size]), median(y for _, y in points[i : i + size]))
        for i in range(0, len(points), size)
    ]


def steps_per_epoch(run: RunRecord) -> float:
    return float(run.summary["steps"] / max(1, run.summary["epochs"]))


def evaluations(run: RunRecord) -> list[dict[str, float]]:
    """Return the evaluations of the trained weights; an average of weights is another curve."""
    return [line for line in run.metrics("eval") if line.get("weights", "model") == "model"]


def workers_text(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"


def as_svg(figure: Figure, name: str, alternative: str) -> str:
    """Return the figure as SVG that can stand in a page: the page's colours and font, ids of its
    own, no outside address, and a text for those who cannot see it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(alternative)}"', 1)
    colours = {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--grid)"}
    colours |= {colour: f"var(--series-{i})" for i, colour in enumerate(SERIES_COLOURS)}
    recolour: Callable[[re.Match[str]], str] = lambda match: colours[match[0]]  # noqa: E731
    svg = re.sub("|".join(colours), recolour, svg)
    # Shorter numbers: a tenth of a thousandth of a point is not to be seen.
    return re.sub(r"(\d+\.\d{2})\d+", r"\1", svg)
