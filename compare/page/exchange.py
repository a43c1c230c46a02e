"""The picture of an exchange of gradients: when each gradient was ready, and when its all-reduce
began and ended. A panel for each run, all with the same axes."""

from collections.abc import Iterator, Sequence
from statistics import median

from compare.evidence.exchange import Exchange, Message
from compare.page.chart import INK, MUTED, Layer, Plot, Scale, Series, bar, linear

PANEL = 96.0  # a panel's height, units of the picture
PITCH = 1.3  # from one panel to the next, in panels: above each stands the run's name
COLOUR = "var(--communication)"
# Name, colour and opacity of an all-reduce's parts.
HIDDEN, EXPOSED = ("all-reduce, hidden", COLOUR, 0.45), ("exposed", COLOUR, 1.0)
WAITS = ("waits for a rank", MUTED, 0.35)
PARTS = ("hidden", "exposed")
COLUMNS = (
    ("message", ""), ("gradients", ""), ("size", "MB"), ("ready", "ms"),
    ("ready on all ranks", "ms"), ("all-reduce begins", "ms"), ("ends", "ms"),
)  # fmt: skip


def plot_exchanges(named: Sequence[tuple[str, Exchange]]) -> Plot:
    """Show a typical step of each run, by its name."""
    steps = [exchange.typical for _, exchange in named]
    total = max(sum(size for _, size in step.ready) for step in steps)
    reach = max(max(step.ended, step.computed) for step in steps)
    sizes = [tick for tick in linear([0, total], zero=True, ticks=3).ticks if tick[0] <= total]
    ticks: list[tuple[float, str]] = []
    series: list[Series] = []
    for row, (name, exchange) in enumerate(reversed(named)):
        floor = row * PITCH * total
        ticks += [(floor + value, f"{text} MB") for value, text in sizes]
        series += panel(name, exchange, floor, total)
    panels = len(named) * PITCH
    return Plot(
        "exchange",
        "Where the exchange of gradients is",
        "One step on rank 0. Lines: gradients, as backward makes them ready. Bars: all-reduces, "
        "from begin to end, as high as their gradients are large (in fp32): DDP's buckets, or what "
        "Horovod fused. Dashes: rank 0's last gradient is ready; what travels later is exposed. "
        "Horovod begins an all-reduce when all ranks have its gradients; DDP's, whose begin is "
        "inferred, as soon as rank 0 has them and one of Gloo's two threads (MPI's one) is free; "
        "it waits for the other ranks. Figures: medians of the profiled steps; profiling slows "
        "them.",
        linear([0, reach], "ms since the backward pass began", zero=True),
        Scale(0, panels * total, ticks),
        series,
        COLUMNS,
        panels * PANEL,
    )


def panel(name: str, exchange: Exchange, floor: float, total: float) -> Iterator[Series]:
    """A run's typical step, above `floor` on the axis of MB."""
    step = exchange.typical
    dashes = Layer(
        "line", [(step.computed, floor), (step.computed, floor + total)], MUTED, 0.9, "3 2"
    )
    hidden, exposed = (median(getattr(s, part) for s in exchange.steps) for part in PARTS)
    figures = f"{hidden:.0f} ms hidden, {exposed:.0f} ms exposed"
    yield Series([dashes], row=name, row_value=figures, row_at=floor + total)
    level = floor
    for number, message in enumerate(step.messages, start=1):
        middle, level = level + message.megabytes / 2, level + message.megabytes
        yield Series(
            list(bars(message, step.computed, middle, PANEL * message.megabytes / total)),
            cells(f"{name}, {number}", message),
        )
    yield Series(
        [
            stairs("on all ranks", step.met, floor, MUTED, 0.8),
            stairs("gradients ready", step.ready, floor, INK, 1.2),
        ]
    )


def stairs(
    key: str, ready: Sequence[tuple[float, float]], floor: float, colour: str, width: float
) -> Layer:
    """How the MB that are ready add up."""
    line, level = [(0.0, floor)], floor
    for time, size in ready:
        line += [(time, level), (time, level + size)]
        level += size
    return Layer("line", line, colour, width, key=key)


def bars(message: Message, computed: float, y: float, thickness: float) -> Iterator[Layer]:
    """The parts of an all-reduce, one behind the other."""
    begin, end = message.began, message.ended
    met = min(end, max(begin, message.met or begin))
    turn = min(end, max(met, computed))
    text = ", ".join(cells("", message)[1:])
    for start, stop, (key, colour, opacity) in (
        (begin, met, WAITS), (met, turn, HIDDEN), (turn, end, EXPOSED),
    ):  # fmt: skip
        if stop > start:
            yield bar(start, stop, y, colour, max(thickness, 0.6), opacity, text, key)


def cells(name: str, message: Message) -> tuple[str, ...]:
    times = (message.ready, message.met, message.began, message.ended)
    figures = ["–" if time is None else f"{time:.1f}" for time in times]
    return (name, str(message.gradients), f"{message.megabytes:.2f}", *figures)
