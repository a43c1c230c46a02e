"""Plots of bars: a row for each cell, with the range of what its blocks or runs measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from compare.evidence.rows import hours
from compare.evidence.words import count, three_digits
from compare.page.chart import INK, MUTED, categories, linear
from compare.page.plot import ROW_HEIGHT, Axis, Layer, Plot, Selection, Series


@dataclass(frozen=True)
class Bar:
    """A row: its value, and how far down and up it was measured."""

    name: str
    value: float
    low: float
    high: float
    colour: str
    text: str  # the value, in words


def plot_time(selection: Selection) -> Plot | None:
    """Show how long 90 epochs of ImageNet take at the speed of each cell, and of the references."""
    rows = [row for row in selection.report.speed if row.case == selection.case]
    if not rows:
        return None
    bars = [
        Bar(
            f"{row.configuration}, {count(row.workers, 'worker')}",
            hours(row.images_per_second),
            hours(row.highest),
            hours(row.lowest),
            selection.look(row.configuration).colour,
            f"{figure(hours(row.images_per_second))} h",
        )
        for row in rows
    ]
    for reference in selection.references:
        for workers, speed in sorted(reference.images_per_second.items()):
            name, value = f"{reference.name}, {count(workers, 'worker')}", hours(speed)
            bars.append(Bar(name, value, value, value, MUTED, f"{figure(value)} h"))
    grey = f" Grey: {selection.sources}." if selection.references else ""
    return plot_bars(
        selection.file_name("time"),
        selection.title("Time of 90 epochs of ImageNet"),
        "Computed from the training throughput of this model and input, without evaluation. Bars: "
        f"medians; lines: the range of the blocks.{grey}",
        "hours",
        bars,
    )


def plot_input(selection: Selection) -> Plot | None:
    """Show which part of the steps' time the input took; None where nothing was read from files."""
    bars = []
    for (workers, name), runs in selection.cells(selection.runs).items():
        read = [run.summary.input for run in runs]
        shares = [100 * one.wait_share for one in read if one.wait_share is not None]
        files = [one.files_per_second for one in read if one.files_per_second is not None]
        if shares and files:
            text = f"{figure(median(shares))} %, {figure(median(files))} files/s"
            cell = f"{name}, {count(workers, 'worker')}"
            colour = selection.look(name).colour
            bars.append(Bar(cell, median(shares), min(shares), max(shares), colour, text))
    if not bars:
        return None
    return plot_bars(
        selection.file_name("input"),
        selection.title("Waiting for input"),
        "Share of the steps’ time in which training waited for images, and the files read per "
        "second by all workers. Bars: medians; lines: the range of the runs.",
        "% of the step time",
        bars,
    )


def plot_bars(name: str, title: str, caption: str, label: str, bars: Sequence[Bar]) -> Plot:
    return Plot(
        name,
        title,
        caption,
        Axis(label, linear([bar.high for bar in bars], zero=True)),
        Axis("", categories(len(bars))),
        [bar_series(y + 0.14, bar) for y, bar in enumerate(bars)],
        (("configuration", ""), ("median", ""), ("range", label)),
        height=ROW_HEIGHT * len(bars),
    )


def bar_series(y: float, bar: Bar) -> Series:
    layers = [
        Layer(
            "bar", [(0, y), (bar.value, y)], bar.colour, 13, opacity=0.6,
            texts=[f"{bar.name}: {bar.text}"],
        )
    ]  # fmt: skip
    spread = "–"
    if bar.low < bar.high:
        layers.append(Layer("line", [(bar.low, y), (bar.high, y)], INK, 1.4))
        for end in (bar.low, bar.high):
            layers.append(Layer("line", [(end, y - 0.09), (end, y + 0.09)], INK, 1.4))
        spread = f"{figure(bar.low)} to {figure(bar.high)}"
    return Series(layers, (bar.name, bar.text, spread), bar.name, bar.text)


def figure(value: float) -> str:
    return three_digits(value) if value > 0 else "0"
