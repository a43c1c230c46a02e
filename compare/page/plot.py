"""A plot, described once: picture, table and alternative text all come from the description."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from compare.evidence.records import Comparison, RunRecord
from compare.evidence.references import Reference
from compare.evidence.words import count
from compare.page.chart import (
    DASHES,
    GRID,
    MARKERS,
    MUTED,
    Chart,
    Key,
    Scale,
    series_colour,
    series_shape,
)
from compare.page.report import Report

Points = Sequence[tuple[float, float]]  # x and y, in values of the axes
ROW_HEIGHT = 40  # of a chart with a row for each series


@dataclass(frozen=True)
class Axis:
    """An axis; the label holds the unit, and is empty where the rows are named one by one."""

    label: str
    scale: Scale


@dataclass(frozen=True)
class Layer:
    """What is drawn at some points: a line through them, a mark on each, or a bar from one to the
    other."""

    kind: str  # "line", "bar", or a marker's name
    points: Points
    colour: str
    size: float  # a line's width, a bar's thickness, half a marker's width: units of the picture
    dash: str = ""
    opacity: float = 1.0
    hollow: bool = False
    texts: Sequence[str] = ()  # shown to whoever points at a point, or at the middle of the bar

    def draw(self, chart: Chart) -> None:
        points = self.points
        if self.kind == "line":
            chart.line(points, self.colour, self.size, self.dash, self.opacity)
        elif self.kind == "bar":
            (start, y), (end, _) = points
            chart.bar(start, end, y, self.size, self.colour, self.opacity)
            points = [((start + end) / 2, y)]
        else:
            for x, y in points:
                chart.mark(x, y, self.kind, self.colour, self.size, self.opacity, self.hollow)
        for (x, y), text in zip(points, self.texts, strict=False):
            chart.hit(x, y, text)


@dataclass(frozen=True)
class Series:
    """What a plot shows of one configuration, cell or run."""

    layers: Sequence[Layer]
    cells: Sequence[str] = ()  # its line of the table; empty: not in the table
    row: str = ""  # its row's name and value, in a chart of rows
    row_value: str = ""
    row_at: float | None = None  # y of the row; None: that of a chart of categories


@dataclass(frozen=True)
class Plot:
    """A figure of the page."""

    name: str  # of a file
    title: str
    caption: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    columns: Sequence[tuple[str, str]] = ()  # of the table: name and unit
    height: float = 190
    keys: Sequence[Key] = ()
    ends: tuple[str, str] | None = None  # what the left and the right end of the x axis stand for
    rule: float | None = None  # x of a dashed line through the rows
    band: tuple[float, float] | None = None  # x of a grey area in each row
    above: float = 9  # where a row's name stands over its middle

    @cached_property
    def svg(self) -> str:
        x, y = self.x, self.y
        chart = Chart(x.scale, y.scale, x.label, y.label, self.height, self.keys, self.ends)
        for index, series in enumerate(self.series):
            row = index if series.row_at is None else series.row_at
            if series.row:
                chart.row_name(row, series.row, self.above)
            if series.row_value:
                chart.row_value(row, series.row_value, self.above)
            top, bottom = row - 0.15, row + 0.5  # below the row's name, which neither may cross
            if self.band is not None:
                height = (bottom - top) * ROW_HEIGHT
                chart.bar(*self.band, (top + bottom) / 2, height, GRID, opacity=0.7)
            if self.rule is not None:
                chart.line([(self.rule, top), (self.rule, bottom)], MUTED, 1, "3 2")
            for layer in series.layers:
                layer.draw(chart)
        return chart.as_svg(self.alternative)

    @property
    def table(self) -> list[Sequence[str]]:
        """What the plot shows, as a table, its first row the header; empty if it has none."""
        header = [", ".join(filter(None, column)) for column in self.columns]
        return [header, *(series.cells for series in self.series if series.cells)] if header else []

    @property
    def alternative(self) -> str:
        """The text for those who cannot see the picture: the table's lines, or the caption."""
        lines = []
        for name, *values in self.table[1:]:
            figures = [
                " ".join(filter(None, (column, value, unit)))
                for (column, unit), value in zip(self.columns[1:], values, strict=True)
            ]
            lines.append(f"{name}: {', '.join(figures)}")
        return f"{self.title}. " + ("; ".join(lines) + "." if lines else self.caption)


def values_of(series: Iterable[Series]) -> tuple[list[float], list[float]]:
    """Return the x and the y of all points, for the axes."""
    points = [point for one in series for layer in one.layers for point in layer.points]
    return [x for x, _ in points], [y for _, y in points]


def thinned(
    points: Points, most: int, choose: Callable[[Sequence[float]], float] = median
) -> list[tuple[float, float]]:
    """Thin a long line out: equally many neighbours become their median, or another of them."""
    size = -(-len(points) // most)
    if size <= 1:
        return list(points)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(median([x for x, _ in part]), choose([y for _, y in part])) for part in parts]


@dataclass(frozen=True)
class Look:
    """How a configuration is drawn, in every plot."""

    index: int  # in the plan

    @property
    def colour(self) -> str:
        return series_colour(self.index)

    @property
    def marker(self) -> str:
        return MARKERS[series_shape(self.index)]

    @property
    def dash(self) -> str:
        return DASHES[series_shape(self.index)]

    def width(self, width: float) -> float:
        """The first series is drawn broad, below the others: equal curves both stay in sight."""
        return width * (2.2 if self.index == 0 else 1.0)

    def opacity(self, opacity: float) -> float:
        return opacity * (0.6 if self.index == 0 else 1.0)

    def line(self, points: Points, width: float, opacity: float, texts: Sequence[str]) -> Layer:
        style = self.width(width), self.dash, self.opacity(opacity)
        return Layer("line", points, self.colour, *style, texts=texts)


@dataclass(frozen=True)
class Selection:
    """The complete runs that a plot is of: of one case, and of one number of workers if it says."""

    report: Report
    case: str
    runs: Sequence[RunRecord]  # in the order of the plan's configurations
    workers: int | None = None

    @property
    def comparison(self) -> Comparison:
        """What was measured."""
        return self.report.comparison

    @property
    def references(self) -> Sequence[Reference]:
        """What is drawn beside what was measured."""
        return self.report.references

    @property
    def sources(self) -> str:
        """Where the references are from."""
        return "; ".join(f"{one.name}: {one.source}" for one in self.references)

    def title(self, text: str) -> str:
        workers = count(self.workers, "worker") if self.workers else ""
        return ", ".join(filter(None, (text, self.case, workers)))

    def file_name(self, *words: object) -> str:
        """Return a plot's name as a file may bear it."""
        parts = (*words, self.case, self.workers or "")
        text = "-".join(str(part) for part in parts if part != "")
        return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text)

    def look(self, configuration: str) -> Look:
        return Look([*self.comparison.configurations].index(configuration))

    def cells(self, runs: Iterable[RunRecord]) -> dict[tuple[int, str], list[RunRecord]]:
        """Return runs by workers and configuration, in the order of the table."""
        found: dict[tuple[int, str], list[RunRecord]] = {}
        for run in sorted(runs, key=lambda run: run.workers):
            found.setdefault((run.workers, run.configuration), []).append(run)
        return found

    def keys(self, configurations: Iterable[str], marked: bool = False) -> list[Key]:
        """Return the legend of these configurations."""
        keys = []
        for name in dict.fromkeys(configurations):
            look = self.look(name)
            width, opacity = (1.7, 1.0) if marked else (look.width(1.5), look.opacity(1.0))
            marker = look.marker if marked else ""
            keys.append(Key(name, look.colour, "line", look.dash, width, marker, opacity))
        return keys
