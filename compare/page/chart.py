"""Small plots as SVG. This module computes where everything lies; plot.svg.jinja draws it.

matplotlib does not serve: its import alone takes longer than a whole report may, and its colours
are fixed. Here text stays text and colours are CSS variables. So the page chooses the font and
light or dark colours, and a plot can be searched, printed and read aloud. `standalone` makes a
file of a plot.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

WIDTH = 360  # units: about a phone's width in pixels, so that text does not shrink there
FONT_SIZE = 11
LINE = 15  # height of a line of text
BORDER = 10  # around a plot in a file of its own
ROW_HEIGHT = 40  # in a plot with a row for each series
TICKS = 5  # at most so many intervals between them on an axis, but for its margins
MAX_HITS = 120  # points per plot that show their value: a page must stay below a megabyte

# Each colour of the page on a light screen, on a dark one, and on paper. The series' colours follow
# Okabe and Ito ("Color Universal Design", 2008): colour-blind people can tell them apart. Each
# series also has its own marker and dash pattern, for print.
PALETTE = {
    "paper": ("#fdfdfb", "#16181b", "#fff"),
    "ink": ("#1b1c1e", "#e6e5e0", "#000"),
    "muted": ("#63666b", "#a0a3a8", "#444"),
    "rule": ("#c9c9c4", "#45484d", "#999"),
    "grid": ("#e3e3de", "#303338", "#ddd"),
    "soft": ("#f4f4f0", "#1f2226", "#fff"),
    "alarm": ("#b3141b", "#ff8f86", "#a00"),
    "alarm-paper": ("#fdecea", "#3a1d1c", "#fff"),
    "communication": ("#b3141b", "#ff7d73", "#b3141b"),
    "waiting": ("#5d7a00", "#b9d04a", "#5d7a00"),
    "series-0": ("#0072b2", "#5db8f0", "#0072b2"),
    "series-1": ("#c75500", "#f29a4e", "#c75500"),
    "series-2": ("#00805d", "#3fc79d", "#00805d"),
    "series-3": ("#a03d93", "#e08fd4", "#a03d93"),
    "series-4": ("#7a5c00", "#d9bb52", "#7a5c00"),
}
COLOURS = [f"var(--{name})" for name in PALETTE if name.startswith("series")]
INK, MUTED, GRID, PAPER = (f"var(--{name})" for name in ("ink", "muted", "grid", "paper"))

CIRCLE = [(math.cos(turn * math.pi / 6), math.sin(turn * math.pi / 6)) for turn in range(12)]
MARKERS = {  # their corners
    "circle": CIRCLE,
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "triangle": [(0, -1.2), (1.1, 0.8), (-1.1, 0.8)],
    "diamond": [(0, -1.3), (1.1, 0), (0, 1.3), (-1.1, 0)],
    "wedge": [(0, 1.2), (1.1, -0.8), (-1.1, -0.8)],
}

DASHES = ("", "6 2.4", "1.8 1.8", "8 2 1.6 2", "3.6 1.4")  # of as many series as there are markers

Points = Sequence[tuple[float, float]]
T = TypeVar("T")


def colour_of(index: int) -> str:
    """Return the colour of a series, the same in all plots."""
    return COLOURS[index % len(COLOURS)]


def css_variables(medium: int) -> str:
    """Return the colours of one column of PALETTE for a style sheet."""
    return " ".join(f"--{name}: {values[medium]};" for name, values in PALETTE.items())


def number(value: float) -> str:
    """Print a coordinate with one decimal: a twentieth of a unit is too small to see."""
    return f"{value:.1f}".removesuffix(".0")


def unbroken(command: str) -> Markup:
    """Prevent line breaks within the words of a command, such as after the dashes of `--seed`."""
    return Markup(" ").join(Markup("<span>{}</span>").format(word) for word in command.split(" "))


@cache
def template(name: str) -> Any:
    """Return a template of this folder. Those of HTML and SVG escape their values."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: ".html." in str(name) or ".svg." in str(name),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {"colours": css_variables}
    environment.filters |= {"number": number, "unbroken": unbroken}
    return environment.get_template(name)


@dataclass(frozen=True)
class Scale:
    """The scale of an axis, from `low` to `high`; an axis may run backwards."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()
    label: str = ""  # with the unit

    def fraction(self, value: float) -> float:
        """Return where a value lies: 0 at `low`, 1 at `high`."""
        return (value - self.low) / (self.high - self.low)


def linear(values: Iterable[float], label: str = "", zero: bool = False) -> Scale:
    """Return a scale over the finite values, with round ticks; with `zero` it includes 0."""
    finite = [value for value in [*values, *([0.0] if zero else [])] if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if high == low:
        low, high = (0.0, high or 1.0) if zero else (low - 0.5, high + 0.5)
    least = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(d * power for d in (1, 2, 5, 10) if least <= d * power * (1 + 1e-9))
    margin = 0.05 * (high - low)
    low, high = low if zero and low == 0 else low - margin, high + margin
    places = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return Scale(low, high, [(i * step, f"{i * step:,g}".replace("-", "−")) for i in places], label)


@dataclass(frozen=True)
class Layer:
    """A line through some points, an area that they bound, or a marker at each of them."""

    kind: str  # "line", "area", or a key of MARKERS
    points: Points
    colour: str
    size: float  # a line's width, or half a marker's, in units of the plot
    dash: str = ""
    opacity: float = 1.0
    hollow: bool = False
    texts: Sequence[str] = ()  # point by point, shown under the pointer
    key: str = ""  # its name in the legend; empty: not in the legend

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """Return the SVG path through these points of the plot; a point that is not finite leaves
        a gap in a line."""
        path, pen, size = "", "M", self.size
        for x, y in points:
            if not math.isfinite(x + y):
                pen = "M"
            elif self.kind in ("line", "area"):
                path, pen = f"{path}{pen}{number(x)} {number(y)}", "L"
            else:
                corners = [(x + dx * size, y + dy * size) for dx, dy in MARKERS[self.kind]]
                path += f"M{'L'.join(f'{number(x)} {number(y)}' for x, y in corners)}Z"
        return path


def bar(
    start: float,
    end: float,
    y: float,
    colour: str,
    thickness: float,
    opacity: float = 1.0,
    text: str = "",
    key: str = "",
) -> Layer:
    """Return a bar along the x axis, which shows its value in the middle."""
    points = [(start, y), ((start + end) / 2, y), (end, y)]
    return Layer("line", points, colour, thickness, "", opacity, False, ("", text), key)


def series_layers(
    index: int, key: str, points: Points, texts: Sequence[str], width: float, mark: float = 0
) -> list[Layer]:
    """Return the line of a series, and markers of half-width `mark` unless it is 0. A series looks
    the same in all plots. The first one's line is wide and lies below the others, so that of two
    equal curves both stay visible."""
    colour = colour_of(index)
    shape = (index + index // len(COLOURS)) % len(MARKERS)  # shifts when colours repeat
    opacity = 0.9
    if index == 0:
        width, opacity = 2.2 * width, 0.55
    layers = [Layer("line", points, colour, width, DASHES[shape], opacity, texts=texts, key=key)]
    if mark:
        layers.append(Layer([*MARKERS][shape], points, colour, mark, key=key))
    return layers


@dataclass(frozen=True)
class PlotRow:
    """A row of a plot: its position on the y axis, and the text above it."""

    y: float
    name: str
    value: str = ""

    @property
    def shown(self) -> str:
        """The name, shortened if there is no room for it beside the value."""
        return shortened(self.name, WIDTH - text_width(self.value) - 8)


@dataclass(frozen=True)
class Plot:
    """A figure of the page."""

    name: str  # also of its file
    title: str
    caption: str
    x: Scale
    y: Scale
    layers: Sequence[Layer]
    rows: Sequence[PlotRow] = ()
    height: float = 190  # of the plotting area
    section: str = "Plots"  # of the page

    @cached_property
    def svg(self) -> str:
        """The plot as SVG for a page."""
        legend = self.legend()
        top = (legend[-1][1] + LINE / 2 if legend else 0.0) + 8
        left = max((text_width(text) for _, text in self.y.ticks), default=-1.0) + 6
        left, right = left + (LINE + 4 if self.y.label else 0), WIDTH - 6.0
        for value, text in self.x.ticks:  # keep the numbers at both ends inside the plot
            half, at = text_width(text) / 2 + 1, self.x.fraction(value)
            left, right = max(left, half - at * WIDTH), min(right, WIDTH - half + (1 - at) * WIDTH)
        bottom = top + self.height

        def place(x: float, y: float) -> tuple[float, float]:
            across, up = self.x.fraction(x), self.y.fraction(y)
            return left + across * (right - left), bottom - up * self.height

        hits = [
            (*place(x, y), text)
            for layer in self.layers
            for (x, y), text in zip(layer.points, layer.texts, strict=False)
            if text and math.isfinite(x + y)
        ]
        drawn = template("plot.svg.jinja").render(
            plot=self,
            legend=legend,
            place=place,
            left=left,
            right=right,
            top=top,
            bottom=bottom,
            hits=hits[:: -(-len(hits) // MAX_HITS) or 1],
            width=WIDTH,
            line=LINE,
            font=FONT_SIZE,
            height=bottom + LINE + (LINE + 3 if self.x.label else 0) + 3,
        )
        return str(drawn)

    def legend(self) -> list[tuple[float, float, str, list[Layer]]]:
        """Return the legend's entries: position, label, and layers, one of each kind. The legend
        stands above the chart, where it cannot hide data."""
        entries: dict[str, dict[str, Layer]] = {}
        for layer in self.layers:
            if layer.key:
                entries.setdefault(layer.key, {}).setdefault(layer.kind, layer)
        found, x, y = [], 0.0, LINE / 2 + 1
        for key, layers in entries.items():
            label = shortened(key, WIDTH - 30)
            width = 30 + text_width(label)
            if x and x + width > WIDTH:
                x, y = 0.0, y + LINE + 1
            found.append((x, y, label, [*layers.values()]))
            x += width + 12
        return found


def standalone(svg: str) -> str:
    """Return a plot for a file of its own: with colours in place of variables, and a background."""
    [(width, height)] = re.findall(r'viewBox="0 0 (\S+) (\S+)"', svg)
    width, height = float(width) + 2 * BORDER, float(height) + 2 * BORDER
    frame = f'viewBox="-{BORDER} -{BORDER} {width:g} {height:g}" width="{2 * width:g}"'
    frame += ' xmlns="http://www.w3.org/2000/svg" font-family="Helvetica, Arial, sans-serif"'
    paper = f'<rect x="-{BORDER}" y="-{BORDER}" width="100%" height="100%" fill="{PAPER}"/>'
    text = re.sub(r'viewBox="[^"]*"([^>]*)>', rf"{frame}\1>{paper}", svg, count=1)
    return re.sub(r"var\(--([\w-]+)\)", lambda found: PALETTE[found[1]][0], f"{text}\n")


def text_width(text: str) -> float:
    """Estimate a text's width in the widest of the page's fonts (DejaVu Sans, Verdana)."""
    narrow = sum(letter in "iljtfr.,:;'|()[]/ -" for letter in text)
    wide = sum(letter in "mwMW%@" for letter in text)
    return (0.66 * len(text) - 0.26 * narrow + 0.29 * wide) * FONT_SIZE


def shortened(text: str, width: float) -> str:
    """Shorten a text to a width, with an ellipsis, which stays in any case."""
    while text_width(text) > width and text != "…":
        text = f"{text[:-2]}…"
    return text


def values_of(layers: Iterable[Layer]) -> tuple[list[float], list[float]]:
    """Return all x and all y values of the points, for the axes."""
    points = [point for layer in layers for point in layer.points]
    return [x for x, _ in points], [y for _, y in points]


def thinned(values: Sequence[T], most: int) -> Sequence[T]:
    """Return `most` values at most (at least 3), evenly spaced from the first to the last."""
    most, last = max(3, most), len(values) - 1
    if last < most:
        return values
    return [values[round(at * last / (most - 1))] for at in range(most)]
