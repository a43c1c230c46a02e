"""Small charts as SVG: axes, lines, marks, bars, a legend, and a text at each point.

Written out here rather than by matplotlib, whose import alone takes longer than a report may: a
page of twenty charts is drawn in a tenth of a second. Letters stay letters and colours are CSS
variables, so that the page decides on light or dark and on the font, and a chart can be read
aloud, searched and printed. `standalone` makes a file of one that opens by itself.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 360  # units: about a phone's width in pixels, so that letters need not shrink there
FONT_SIZE = 11
LINE = 15  # height of a line of text
BORDER = 10  # around a picture that stands alone
MAX_HITS = 120  # points that tell their value, a chart: a page must stay below a megabyte

# After Okabe and Ito ("Color Universal Design", 2008): people who see few colours can tell these
# apart. Every series has a marker and a dash pattern of its own as well, for print.
COLOURS = ("#0072b2", "#c75500", "#00805d", "#a03d93", "#7a5c00")
PHASES = {"var(--communication)": "#b3141b", "var(--waiting)": "#5d7a00"}  # of no series
MARKERS = ("circle", "square", "triangle", "diamond", "wedge")
DASHES = ("", "6 2.4", "1.8 1.8", "8 2 1.6 2", "3.6 1.4")
INK, MUTED, GRID, PAPER = "currentColor", "var(--muted)", "var(--grid)", "var(--paper)"


def series_colour(index: int) -> str:
    return f"var(--series-{index % len(COLOURS)})"


def series_shape(index: int) -> int:
    """Number a series' marker and dashes: where colours come round again, these do not."""
    return (index + index // len(COLOURS)) % len(MARKERS)


@dataclass(frozen=True)
class Scale:
    """How values lie along an axis: from `low` to `high`, which may run backwards."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    logarithmic: bool = False

    def fraction(self, value: float) -> float:
        """Return where a value lies: 0 at `low`, 1 at `high`."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear(values: Iterable[float], zero: bool = False, ticks: int = 5) -> Scale:
    """Return a scale over the finite values with round ticks; `zero` makes it begin there."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high == low:
        low, high = (0.0, high or 1.0) if zero and high >= 0 else (low - 0.5, high + 0.5)
    step = round_step((high - low) / ticks)
    margin = 0.05 * (high - low)
    low = low if zero and low == 0 else low - margin
    high = high + margin
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(
        low, high, tuple((i * step, tick_text(i * step, step)) for i in range(first, last + 1))
    )


def logarithmic(values: Iterable[float]) -> Scale:
    """Return a logarithmic scale over positive values, with ticks at 1, 2 and 5 of each decade."""
    finite = [value for value in values if math.isfinite(value) and value > 0]
    low, high = min(finite) / 1.1, max(finite) * 1.1
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high / low < 1000 else (1,)
    values_at = [digit * 10.0**decade for decade in decades for digit in digits]
    shown = [value for value in values_at if low <= value <= high]
    return Scale(low, high, tuple((value, f"{value:,g}") for value in shown), logarithmic=True)


def categories(number: int) -> Scale:
    """Return a scale of rows, the first one on top; the rows are named by `Chart.row_name`."""
    return Scale(number - 0.5, -0.5, ())


def whole(values: Sequence[int], margin: float) -> Scale:
    """Return a scale whose ticks are the whole numbers that were measured."""
    low, high = min(values), max(values)
    space = margin * (high - low) or 0.5
    least = 0.09 * (high - low)  # two numbers closer than this would be written over each other
    shown: list[int] = []
    for value in sorted(set(values), reverse=True):
        if not shown or shown[-1] - value >= least:
            shown.append(value)
    return Scale(low - space, high + space, tuple((n, str(n)) for n in reversed(shown)))


def powers(values: Sequence[int]) -> Scale:
    """Return a logarithmic scale whose ticks are these numbers, which lie far apart."""
    ticks = tuple((n, str(n)) for n in sorted(values))
    return Scale(min(values) / 1.2, max(values) * 1.2, ticks, logarithmic=True)


def round_step(step: float) -> float:
    """Return the next larger one of 1, 2, 5, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(digit * power for digit in (1, 2, 5, 10) if step <= digit * power * (1 + 1e-9))


def tick_text(value: float, step: float) -> str:
    if value == 0:
        return "0"
    if step < 1e-4 or abs(value) >= 1e6:
        return f"{value:.2g}".replace("-", "−")
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}".replace("-", "−")


@dataclass(frozen=True)
class Key:
    """An entry of a legend, drawn as its series is."""

    label: str
    colour: str
    kind: str = "line"  # "line", "box", or a marker's name
    dash: str = ""
    width: float = 1.6
    marker: str = ""
    opacity: float = 1.0
    hollow: bool = False  # the marker


@dataclass
class Chart:
    """A chart under construction. Coordinates of its methods are values of its two scales."""

    x: Scale
    y: Scale
    x_label: str = ""
    y_label: str = ""
    height: float = 190  # of the plotting area
    keys: Sequence[Key] = ()
    ends: tuple[str, str] | None = None  # what the left and the right end of the x axis stand for
    parts: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of rows
    hits: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.legend, legend_height = lay_out_legend(self.keys)
        widest = max((text_width(text) for _, text in self.y.ticks), default=0.0)
        self.left = widest + (LINE + 4 if self.y_label else 0) + (6 if widest else 5)
        self.right = WIDTH - 6.0
        for value, text in self.x.ticks:  # no end of a number sticks out of the picture
            half, at = text_width(text) / 2 + 1, self.x.fraction(value)
            self.left = max(self.left, half - at * WIDTH)
            self.right = min(self.right, WIDTH - half + (1 - at) * WIDTH)
        self.top = legend_height + (LINE + 5 if self.ends else 0) + 8
        self.bottom = self.top + self.height
        self.total_height = self.bottom + LINE + (LINE + 3 if self.x_label else 0) + 3

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (
            self.left + self.x.fraction(x) * (self.right - self.left),
            self.bottom - self.y.fraction(y) * (self.bottom - self.top),
        )

    def line(
        self,
        points: Iterable[tuple[float, float]],
        colour: str,
        width: float = 1.6,
        dash: str = "",
        opacity: float = 1.0,
    ) -> None:
        """Draw a line; a value that is not a number leaves a gap."""
        path, pen = [], "M"
        for x, y in points:
            if not (math.isfinite(x) and math.isfinite(y)) or (self.y.logarithmic and y <= 0):
                pen = "M"
                continue
            across, down = self.at(x, y)
            path.append(f"{pen}{number(across)} {number(down)}")
            pen = "L"
        if path:
            self.parts.append(
                f'<path d="{"".join(path)}" fill="none" stroke="{colour}"'
                f' stroke-width="{number(width)}"{dashes(dash)}{opaque(opacity)}/>'
            )

    def mark(
        self,
        x: float,
        y: float,
        marker: str,
        colour: str,
        size: float = 3.0,
        opacity: float = 1.0,
        hollow: bool = False,
    ) -> None:
        if math.isfinite(x) and math.isfinite(y) and not (self.y.logarithmic and y <= 0):
            across, down = self.at(x, y)
            self.parts.append(draw_marker(across, down, marker, colour, size, opacity, hollow))

    def bar(
        self, x0: float, x1: float, y: float, thickness: float, colour: str, opacity: float = 1.0
    ) -> None:
        """Draw a bar along the x axis; `thickness` is in units of the picture."""
        (left, middle), (right, _) = self.at(x0, y), self.at(x1, y)
        self.parts.append(
            f'<rect x="{number(left)}" y="{number(middle - thickness / 2)}"'
            f' width="{number(max(0.0, right - left))}" height="{number(thickness)}"'
            f' fill="{colour}"{opaque(opacity)}/>'
        )

    def row_name(self, row: float, text: str, above: float) -> None:
        """Write a row's name above it, from the left edge: there it can be long."""
        _, down = self.at(self.x.low, row)
        # With a rim of paper, so that no line runs through it.
        self.names.append(
            f'<text x="0" y="{number(down - above)}" fill="{INK}" stroke="{PAPER}"'
            f' stroke-width="3" paint-order="stroke">{escape(shortened(text))}</text>'
        )

    def row_value(self, row: float, text: str, above: float) -> None:
        """Write a row's value above its right end."""
        _, down = self.at(self.x.low, row)
        self.parts.append(
            f'<text x="{WIDTH}" y="{number(down - above)}" text-anchor="end" fill="{MUTED}">'
            f"{escape(text)}</text>"
        )

    def rule(self, x: float | None = None, y: float | None = None) -> None:
        """Draw a dashed line across the chart at one value."""
        if x is not None:
            across, _ = self.at(x, self.y.low)
            ends = (across, self.top, across, self.bottom)
        else:
            assert y is not None
            _, down = self.at(self.x.low, y)
            ends = (self.left, down, self.right, down)
        x1, y1, x2, y2 = map(number, ends)
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{MUTED}"'
            ' stroke-dasharray="3 2"/>'
        )

    def hit(self, x: float, y: float, text: str) -> None:
        """Let a point tell its value to whoever points at it."""
        if math.isfinite(x) and math.isfinite(y) and not (self.y.logarithmic and y <= 0):
            across, down = self.at(x, y)
            self.hits.append(
                f'<circle cx="{number(across)}" cy="{number(down)}" r="5">'
                f"<title>{escape(text)}</title></circle>"
            )

    def as_svg(self, alternative: str) -> str:
        """Return the picture for a page, with a text for those who cannot see it."""
        step = -(-len(self.hits) // MAX_HITS) or 1
        return "".join(
            [
                f'<svg role="img" aria-label="{escape(alternative)}"'
                f' viewBox="0 0 {WIDTH} {number(self.total_height)}" font-size="{FONT_SIZE}">',
                *self.axes(),
                *self.legend,
                *self.parts,
                *self.names,
                '<g class="hits" fill="transparent">',
                *self.hits[::step],
                "</g></svg>",
            ]
        )

    def axes(self) -> list[str]:
        parts = []
        for value, text in self.x.ticks:
            across, _ = self.at(value, self.y.low)
            parts.append(
                f'<line x1="{number(across)}" x2="{number(across)}" y1="{number(self.top)}"'
                f' y2="{number(self.bottom)}" stroke="{GRID}" stroke-width=".7"/>'
                f'<text x="{number(across)}" y="{number(self.bottom + LINE)}"'
                f' text-anchor="middle" fill="{INK}">{escape(text)}</text>'
            )
        for value, text in self.y.ticks:
            _, down = self.at(self.x.low, value)
            parts.append(
                f'<line x1="{number(self.left)}" x2="{number(self.right)}" y1="{number(down)}"'
                f' y2="{number(down)}" stroke="{GRID}" stroke-width=".7"/>'
                f'<text x="{number(self.left - 6)}" y="{number(down + 3.5)}"'
                f' text-anchor="end" fill="{INK}">{escape(text)}</text>'
            )
        left, right, top, bottom = map(number, (self.left, self.right, self.top, self.bottom))
        corner = f"M{left} {top}V{bottom}H{right}" if self.y.ticks else f"M{left} {bottom}H{right}"
        parts.append(f'<path d="{corner}" fill="none" stroke="{MUTED}" stroke-width=".8"/>')
        if self.x_label:
            parts.append(
                f'<text x="{number((self.left + self.right) / 2)}"'
                f' y="{number(self.bottom + 2 * LINE + 2)}" text-anchor="middle"'
                f' fill="{INK}">{escape(self.x_label)}</text>'
            )
        if self.y_label:
            middle = number((self.top + self.bottom) / 2)
            parts.append(
                f'<text x="{FONT_SIZE}" y="{middle}" text-anchor="middle" fill="{INK}"'
                f' transform="rotate(-90 {FONT_SIZE} {middle})">{escape(self.y_label)}</text>'
            )
        if self.ends:
            for x, anchor, text in ((left, "start", self.ends[0]), (right, "end", self.ends[1])):
                parts.append(
                    f'<text x="{x}" y="{number(self.top - 9)}" text-anchor="{anchor}"'
                    f' fill="{MUTED}">{escape(text)}</text>'
                )
        return parts


def lay_out_legend(keys: Sequence[Key]) -> tuple[list[str], float]:
    """Return the legend, above the chart where it can hide no data, and its height."""
    parts: list[str] = []
    x, y = 0.0, LINE / 2 + 1
    for key in keys:
        label = shortened(key.label)
        width = 30 + text_width(label)
        if x and x + width > WIDTH:
            x, y = 0.0, y + LINE + 1
        middle = number(y)
        if key.kind == "box":
            parts.append(
                f'<rect x="{number(x + 6)}" y="{number(y - 5)}" width="14" height="10"'
                f' fill="{key.colour}"{opaque(key.opacity)}/>'
            )
        elif key.kind == "line":
            parts.append(
                f'<path d="M{number(x)} {middle}h24" stroke="{key.colour}" fill="none"'
                f' stroke-width="{number(key.width)}"{dashes(key.dash)}{opaque(key.opacity)}/>'
            )
        if key.marker:
            parts.append(draw_marker(x + 12, y, key.marker, key.colour, 3, 1, key.hollow))
        parts.append(
            f'<text x="{number(x + 29)}" y="{number(y + 3.5)}" fill="{INK}">{escape(label)}</text>'
        )
        x += width + 12
    return parts, (y + LINE / 2 if keys else 0.0)


def draw_marker(
    x: float, y: float, marker: str, colour: str, size: float, opacity: float, hollow: bool
) -> str:
    style = (
        f'fill="none" stroke="{colour}" stroke-width=".9"{opaque(opacity)}'
        if hollow
        else f'fill="{colour}"{opaque(opacity)}'
    )
    if marker == "circle":
        return f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(size)}" {style}/>'
    corners = {
        "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        "triangle": [(0, -1.2), (1.1, 0.8), (-1.1, 0.8)],
        "diamond": [(0, -1.3), (1.1, 0), (0, 1.3), (-1.1, 0)],
        "wedge": [(0, 1.2), (1.1, -0.8), (-1.1, -0.8)],
    }[marker]
    path = "L".join(f"{number(x + dx * size)} {number(y + dy * size)}" for dx, dy in corners)
    return f'<path d="M{path}Z" {style}/>'


def standalone(svg: str) -> str:
    """Return a chart as a file of its own: colours in place of variables, and a background."""
    values = {f"var(--series-{i})": colour for i, colour in enumerate(COLOURS)}
    values |= {**PHASES, INK: "#1b1c1e", MUTED: "#63666b", GRID: "#e3e3de", PAPER: "#fdfdfb"}
    for variable, colour in values.items():
        svg = svg.replace(variable, colour)
    head, body = svg.split(">", 1)
    height = float(head.split('viewBox="')[1].split('"')[0].split()[3]) + 2 * BORDER
    width = WIDTH + 2 * BORDER
    head = re.sub('viewBox="[^"]*"', f'viewBox="{-BORDER} {-BORDER} {width} {height:g}"', head)
    attributes = (
        'xmlns="http://www.w3.org/2000/svg" font-family="Helvetica, Arial, sans-serif" '
        f'width="{2 * width}" height="{2 * height:g}"'
    )
    paper = (
        f'<rect x="{-BORDER}" y="{-BORDER}" width="{width}" height="{height:g}" fill="#fdfdfb"/>'
    )
    return f"{head.replace('<svg', f'<svg {attributes}', 1)}>{paper}{body}\n"


def text_width(text: str) -> float:
    """Estimate a text's width in the broadest of the page's fonts (DejaVu Sans, Verdana)."""
    return sum(narrow_or_wide(letter) for letter in text) * FONT_SIZE


def narrow_or_wide(letter: str) -> float:
    if letter in "iljtfr.,:;'|()[]/ -":
        return 0.4
    return 0.95 if letter in "mwMW%@" else 0.66


def shortened(text: str) -> str:
    """Cut a text that is broader than the picture."""
    if text_width(text) <= WIDTH - 30:
        return text
    while text_width(text) > WIDTH - 40:
        text = text[:-1]
    return f"{text}…"


def number(value: float) -> str:
    """Print a coordinate: a twentieth of a unit is not to be seen."""
    return f"{value:.1f}".removesuffix(".0")


def dashes(dash: str) -> str:
    return f' stroke-dasharray="{dash}"' if dash else ""


def opaque(opacity: float) -> str:
    return f' opacity="{opacity:g}"' if opacity != 1 else ""
