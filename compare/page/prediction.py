"""The page of a prediction: tables, and a chart over sizes for several networks."""

from collections.abc import Mapping, Sequence

from compare.page.chart import COLOURS, MARKERS, Layer, Plot, linear, logarithmic
from compare.page.html import template
from compare.prediction.networks import Cluster
from compare.prediction.step import Prediction

Steps = Sequence[tuple[Cluster, Prediction]]


def render_prediction(
    tables: Mapping[str, Sequence[Mapping[str, str]]],
    charts: Mapping[str, Mapping[str, Steps]],
    sentences: Sequence[str],
) -> str:
    """Return the page, by configuration: no request goes out of it."""
    plots = {name: plot_efficiency(name, chart) for name, chart in charts.items()}
    return template("prediction.html.jinja").render(tables=tables, plots=plots, sentences=sentences)


def plot_efficiency(name: str, chart: Mapping[str, Steps]) -> Plot:
    """Draw the efficiency over numbers of workers, a line for each network."""
    layers = list[Layer]()
    for (network, steps), colour, marker in zip(chart.items(), COLOURS, MARKERS, strict=False):
        points = [(one.workers, 100 * step.efficiency) for one, step in steps]
        texts = [
            f"{network}, {one.workers:,} workers: {100 * step.efficiency:.0f} %, "
            f"{step.images_per_second:,.0f} images/s, step {1e3 * step.low_seconds:.0f} to "
            f"{1e3 * step.high_seconds:.0f} ms"
            for one, step in steps
        ]
        layers.append(Layer("line", points, colour, 1.4, key=network))
        layers.append(Layer(marker, points, colour, 2.6, texts=texts, key=network))
    sizes = [size for layer in layers for size, _ in layer.points]
    return Plot(
        "efficiency",
        name,
        "Images/s of all workers, in per cent of as many workers that exchange nothing.",
        logarithmic(sizes, "workers"),
        linear([100], "efficiency, %", zero=True),
        layers,
    )
