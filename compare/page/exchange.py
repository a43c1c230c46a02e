"""The picture of an exchange of gradients: when each gradient was ready, and when its all-reduce
began and ended. A panel for each run, all with the same axes."""

from collections.abc import Iterator, Sequence

from compare.evidence.exchange import Exchange, Message
from compare.page.chart import INK, MUTED, Layer, Plot, Scale, Series, bar, linear

PANEL = 96.0  # a panel's height, units of the picture
PITCH = 1.3  # from one panel to the next, in panels: above each stands the run's name
COLOUR = "var(--communication)"
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
    end = [(step.computed, floor), (step.computed, floor + total)]
    dashes = Layer("line", end, MUTED, 0.9, "3 2")
    yield Series([dashes], row=name, row_value=exchange.sentence(), row_at=floor + total)
    level = floor
    for number, message in enumerate(step.messages, start=1):
        times = (message.ready, message.met, message.began, message.ended)
        figures = (str(message.gradients), f"{message.megabytes:.2f}", *(f"{t:.1f}" for t in times))
        middle, level = level + message.megabytes / 2, level + message.megabytes
        thickness = max(PANEL * message.megabytes / total, 0.6)
        parts = [
            bar(start, stop, middle, colour, thickness, opacity, ", ".join(figures), key)
            for key, start, stop, colour, opacity in parts_of(message, step.computed)
            if stop > start
        ]
        yield Series(parts, (f"{name}, {number}", *figures))
    yield Series(
        [
            stairs("on all ranks", step.met, floor, MUTED, 0.8),
            stairs("gradients ready", step.ready, floor, INK, 1.2),
        ]
    )


def parts_of(message: Message, computed: float) -> list[tuple[str, float, float, str, float]]:
    """The parts of an all-reduce, one behind the other: name, begin, end, colour, opacity."""
    begin, end = message.began, message.ended
    met = min(end, max(begin, message.met))
    turn = min(end, max(met, computed))
    return [
        ("waits for a rank", begin, met, MUTED, 0.35),
        ("all-reduce, hidden", met, turn, COLOUR, 0.45),
        ("exposed", turn, end, COLOUR, 1.0),
    ]


def stairs(
    key: str, ready: Sequence[tuple[float, float]], floor: float, colour: str, width: float
) -> Layer:
    """How the MB that are ready add up."""
    line, level = [(0.0, floor)], floor
    for time, size in ready:
        line += [(time, level), (time, level + size)]
        level += size
    return Layer("line", line, colour, width, key=key)
