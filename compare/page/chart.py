"""Small plots as SVG.

Written out here rather than by matplotlib, whose import alone takes longer than a report may, and
whose colours are fixed. Letters stay letters and colours are CSS variables, so that the page
decides on light or dark and on the font, and a plot can be read aloud, searched and printed.
`standalone` makes a file of it.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

WIDTH = 360  # units: about a phone's width in pixels, so that letters need not shrink there
FONT_SIZE = 11
LINE = 15  # height of a line of text
BORDER = 10  # around a picture that stands alone
ROW_HEIGHT = 40  # of a plot with a row for each series
MAX_HITS = 120  # points that tell their value, a plot: a page must stay below a megabyte

# Each colour of the page on a light screen, a dark one, and on paper. The series' are after Okabe
# and Ito ("Color Universal Design", 2008): people who see few colours can tell them apart. Every
# series has a marker and a dash pattern of its own as well, for print.
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

Points = Sequence[tuple[float, float]]


def css_variables(medium: int) -> str:
    """Return the colours of one column of PALETTE for a style sheet."""
    return " ".join(f"--{name}: {values[medium]};" for name, values in PALETTE.items())


# ----------------------------------------------------------------------------------------- scales


@dataclass(frozen=True)
class Scale:
    """How values lie along an axis: from `low` to `high`, which may run backwards."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()
    label: str = ""  # with the unit
    logarithmic: bool = False

    def fraction(self, value: float) -> float:
        """Return where a value lies: 0 at `low`, 1 at `high`; NaN if it has no place."""
        if self.logarithmic:
            place = math.log(value / self.low) if value > 0 else math.nan
            return place / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear(values: Iterable[float], label: str = "", zero: bool = False, ticks: int = 5) -> Scale:
    """Return a scale over the finite values with round ticks; `zero` makes it begin there."""
    finite = [value for value in values if math.isfinite(value)] + [0.0] * zero or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if high == low:
        low, high = (0.0, high or 1.0) if zero else (low - 0.5, high + 0.5)
    power = 10.0 ** math.floor(math.log10((high - low) / ticks))
    step = next(d * power for d in (1, 2, 5, 10) if (high - low) / ticks <= d * power * (1 + 1e-9))
    margin = 0.05 * (high - low)
    low, high = low if zero and low == 0 else low - margin, high + margin
    places = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return Scale(low, high, [(i * step, f"{i * step:,g}".replace("-", "−")) for i in places], label)


def logarithmic(values: Iterable[float], label: str = "") -> Scale:
    """Return a logarithmic scale over positive values, with ticks at 1, 2 and 5 of each decade, or
    at round numbers within a single one."""
    finite = [value for value in values if math.isfinite(value) and value > 0]
    low, high = min(finite) / 1.1, max(finite) * 1.1
    digits = (1, 2, 5) if high / low < 1000 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values_at = [digit * 10.0**decade for decade in decades for digit in digits]
    of_decades = [(value, f"{value:,g}") for value in values_at]
    ticks = linear([low, high]).ticks if high / low < 10 else of_decades
    inside = [tick for tick in ticks if low <= tick[0] <= high]
    return Scale(low, high, inside, label, logarithmic=True)


# ------------------------------------------------------------------------------------------ plots


@dataclass(frozen=True)
class Layer:
    """What is drawn at some points: a line through them, or a mark on each."""

    kind: str  # "line", or a key of MARKERS
    points: Points
    colour: str
    size: float  # a line's width, half a marker's: units of the picture
    dash: str = ""
    opacity: float = 1.0
    hollow: bool = False
    texts: Sequence[str] = ()  # shown to whoever points at a point
    key: str = ""  # its name in the legend; empty: not there

    def draw(self, points: Iterable[tuple[float, float]]) -> str:
        """Return the layer at these points of the picture; one that is no number leaves a gap."""
        path, pen, size = "", "M", self.size
        for x, y in points:
            if not math.isfinite(x + y):
                pen = "M"
            elif self.kind == "line":
                path, pen = f"{path}{pen}{number(x)} {number(y)}", "L"
            else:
                corners = [(x + dx * size, y + dy * size) for dx, dy in MARKERS[self.kind]]
                path += f"M{'L'.join(f'{number(x)} {number(y)}' for x, y in corners)}Z"
        width = size if self.kind == "line" else 0.9
        style = f'fill="none" stroke="{self.colour}" stroke-width="{number(width)}"'
        if self.kind != "line" and not self.hollow:
            style = f'fill="{self.colour}"'
        dash = f' stroke-dasharray="{self.dash}"' if self.dash else ""
        opacity = f' opacity="{self.opacity:.3g}"' if self.opacity != 1 else ""
        return f'<path d="{path}" {style}{dash}{opacity}/>' if path else ""


def bar(
    start: float, end: float, y: float, colour: str, thickness: float, opacity: float = 1.0,
    text: str = "", key: str = "",
) -> Layer:  # fmt: skip
    """Return a bar along the x axis, which tells its value in the middle."""
    points = [(start, y), ((start + end) / 2, y), (end, y)]
    return Layer("line", points, colour, thickness, "", opacity, False, ("", text), key)


@dataclass(frozen=True)
class PlotRow:
    """A row of a plot: its place on the y axis, and what is written above it."""

    y: float
    name: str
    value: str = ""


@dataclass(frozen=True)
class Plot:
    """A figure of the page."""

    name: str  # of a file
    title: str
    caption: str
    x: Scale
    y: Scale
    layers: Sequence[Layer]
    rows: Sequence[PlotRow] = ()
    height: float = 190  # of the plotting area

    @cached_property
    def svg(self) -> str:
        """The picture for a page."""
        legend, top = self.legend()
        left = max((text_width(text) for _, text in self.y.ticks), default=-1.0) + 6
        left, right = left + (LINE + 4 if self.y.label else 0), WIDTH - 6.0
        for value, text in self.x.ticks:  # no end of a number sticks out of the picture
            half, at = text_width(text) / 2 + 1, self.x.fraction(value)
            left, right = max(left, half - at * WIDTH), min(right, WIDTH - half + (1 - at) * WIDTH)
        bottom = top + self.height

        def place(x: float, y: float) -> tuple[float, float]:
            across, up = self.x.fraction(x), self.y.fraction(y)
            return left + across * (right - left), bottom - up * (bottom - top)

        drawn, hits = self.axes((left, right, top, bottom)) + legend, []
        for layer in self.layers:
            points = [place(x, y) for x, y in layer.points]
            drawn += layer.draw(points)
            hits += [
                f'<circle cx="{number(x)}" cy="{number(y)}" r="5">'
                f"<title>{escape(text)}</title></circle>"
                for (x, y), text in zip(points, layer.texts, strict=False)
                if text and math.isfinite(x + y)
            ]
        for row in self.rows:
            _, y = place(self.x.low, row.y)
            # With a rim of paper, so that no line runs through it.
            rim = f' stroke="{PAPER}" stroke-width="3" paint-order="stroke"'
            room = WIDTH - text_width(row.value) - 8
            drawn += write(0, y - 9, shortened(row.name, room), "start", INK, rim)
            drawn += write(WIDTH, y - 9, row.value, "end", MUTED)
        kept = "".join(hits[:: -(-len(hits) // MAX_HITS) or 1])
        height = bottom + LINE + (LINE + 3 if self.x.label else 0) + 3
        alternative = escape(f"{self.title}. {self.caption}")
        return (
            f'<svg role="img" aria-label="{alternative}"'
            f' viewBox="0 0 {WIDTH} {number(height)}" font-size="{FONT_SIZE}">{drawn}'
            f'<g class="hits" fill="transparent">{kept}</g></svg>'
        )

    def legend(self) -> tuple[str, float]:
        """Return the legend, above the chart where it can hide no data, and where that begins."""
        entries: dict[str, dict[str, Layer]] = {}
        for layer in self.layers:
            if layer.key:
                entries.setdefault(layer.key, {}).setdefault(layer.kind, layer)
        text, x, y = "", 0.0, LINE / 2 + 1
        for key, layers in entries.items():
            label = shortened(key, WIDTH - 30)
            width = 30 + text_width(label)
            if x and x + width > WIDTH:
                x, y = 0.0, y + LINE + 1
            for kind, layer in layers.items():
                text += layer.draw([(x, y), (x + 24, y)] if kind == "line" else [(x + 12, y)])
            text += write(x + 29, y + 3.5, label)
            x += width + 12
        return text, (y + LINE / 2 if entries else 0.0) + 8

    def axes(self, frame: tuple[float, float, float, float]) -> str:
        """Return both axes around a frame: left, right, top and bottom."""
        left, right, top, bottom = frame
        grid, text = Layer("line", (), GRID, 0.7), ""
        for value, label in self.x.ticks:
            x = left + self.x.fraction(value) * (right - left)
            text += grid.draw([(x, top), (x, bottom)]) + write(x, bottom + LINE, label, "middle")
        for value, label in self.y.ticks:
            y = bottom - self.y.fraction(value) * (bottom - top)
            text += grid.draw([(left, y), (right, y)]) + write(left - 6, y + 3.5, label, "end")
        corner = [(left, top)] * bool(self.y.ticks) + [(left, bottom), (right, bottom)]
        text += Layer("line", (), MUTED, 0.8).draw(corner)
        text += write((left + right) / 2, bottom + 2 * LINE + 2, self.x.label, "middle")
        turned = f' transform="rotate(-90 {FONT_SIZE} {number((top + bottom) / 2)})"'
        return text + write(FONT_SIZE, (top + bottom) / 2, self.y.label, "middle", INK, turned)


def standalone(svg: str) -> str:
    """Return a plot as a file of its own: colours in place of variables, and a background."""
    head, body = svg.split(">", 1)
    sizes = re.findall(r'viewBox="0 0 (\S+) (\S+)"', head)[0]
    width, height = (float(size) + 2 * BORDER for size in sizes)
    head = re.sub('viewBox="[^"]*"', f'viewBox="-{BORDER} -{BORDER} {width:g} {height:g}"', head)
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width:g}"'
    frame += ' font-family="Helvetica, Arial, sans-serif"'
    paper = f'<rect x="-{BORDER}" y="-{BORDER}" width="100%" height="100%" fill="{PAPER}"/>'
    text = f"{head.replace('<svg', frame)}>{paper}{body}\n"
    return re.sub(r"var\(--([\w-]+)\)", lambda found: PALETTE[found[1]][0], text)


# ------------------------------------------------------------------------------------------- text


def write(
    x: float, y: float, text: str, anchor: str = "start", colour: str = INK, more: str = ""
) -> str:
    """Return a text of the picture; nothing if it is empty."""
    place = f'x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}{more}>{escape(text)}</text>" if text else ""


def text_width(text: str) -> float:
    """Estimate a text's width in the broadest of the page's fonts (DejaVu Sans, Verdana)."""
    narrow = sum(letter in "iljtfr.,:;'|()[]/ -" for letter in text)
    wide = sum(letter in "mwMW%@" for letter in text)
    return (0.66 * len(text) - 0.26 * narrow + 0.29 * wide) * FONT_SIZE


def shortened(text: str, width: float) -> str:
    """Cut a text that is broader than its room."""
    while text_width(text) > width:
        text = f"{text[:-2]}…"
    return text


def number(value: float) -> str:
    """Print a coordinate: a twentieth of a unit is not to be seen."""
    return f"{value:.1f}".removesuffix(".0")
