"""The picture of an exchange of gradients: when each gradient was ready, and when its all-reduce
began and ended. A panel for each run, all with the same axes."""

from collections.abc import Sequence

from compare.evidence.exchange import Exchange, Message
from compare.page.chart import INK, MUTED, Layer, Plot, Row, Scale, bar, linear

PANEL = 96.0  # a panel's height, units of the picture
PITCH = 1.3  # from one panel to the next, in panels: above each stands the run's name
COLOUR = "var(--communication)"


def plot_exchanges(named: Sequence[tuple[str, Exchange]]) -> Plot:
    """Show a typical step of each run, by its name."""
    steps = [exchange.typical for _, exchange in named]
    total = max(sum(size for _, size in step.ready) for step in steps)
    reach = max(max(step.ended, step.computed) for step in steps)
    sizes = [tick for tick in linear([0, total], zero=True, ticks=3).ticks if tick[0] <= total]
    ticks: list[tuple[float, str]] = []
    layers: list[Layer] = []
    rows: list[Row] = []
    for number, (name, exchange) in enumerate(reversed(named)):
        floor = number * PITCH * total
        ticks += [(floor + value, f"{text} MB") for value, text in sizes]
        layers += panel(exchange, floor, total)
        rows.append(Row(floor + total, name, exchange.sentence()))
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
        layers,
        rows,
        panels * PANEL,
    )


def panel(exchange: Exchange, floor: float, total: float) -> list[Layer]:
    """A run's typical step, above `floor` on the axis of MB."""
    step = exchange.typical
    end = [(step.computed, floor), (step.computed, floor + total)]
    layers, level = [Layer("line", end, MUTED, 0.9, "3 2")], floor
    for message in step.messages:
        told = (
            f"{message.gradients} gradients, {message.megabytes:.2f} MB: ready {message.ready:.1f} "
            f"ms, on all ranks {message.met:.1f} ms, all-reduce {message.began:.1f} to "
            f"{message.ended:.1f} ms"
        )
        middle, level = level + message.megabytes / 2, level + message.megabytes
        thickness = max(PANEL * message.megabytes / total, 0.6)
        layers += [
            bar(start, stop, middle, colour, thickness, opacity, told, key)
            for key, start, stop, colour, opacity in parts_of(message, step.computed)
            if stop > start
        ]
    layers.append(stairs("on all ranks", step.met, floor, MUTED, 0.8))
    layers.append(stairs("gradients ready", step.ready, floor, INK, 1.2))
    return layers


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
