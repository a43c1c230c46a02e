"""The page of a prediction: sliders, and the model in JavaScript, with the same figures."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from compare.page.html import template
from compare.prediction.inputs import Inputs
from compare.prediction.networks import GBIT, Cluster
from compare.prediction.step import QUANTILE, UNCERTAIN


def render_prediction(
    fitted: Mapping[str, Inputs], clusters: Mapping[str, Cluster], settings: Any, past_error: str
) -> str:
    """Return the page: no request goes out of it."""
    data = {
        "configurations": [
            {"name": name, "inputs": inputs, "cluster": clusters[name]}
            for name, inputs in fitted.items()
        ],
        "uncertain": UNCERTAIN,
        "quantile": QUANTILE,
        "island": settings.island,
        "images": settings.images,
        "epochs": settings.epochs,
    }
    network = next(iter(clusters.values())).network
    link = network.between
    # On CPUs the software's latency, which is that within a host, adds to the link's.
    software = 0 if settings.island else network.within.latency_seconds
    rate = min(link.bytes_per_second, 500 * GBIT) / GBIT  # JSON has no infinity: null
    return template("prediction.html.jinja").render(
        data=msgspec.json.encode(data).decode().replace("<", "\\u003c"),  # no end of the script
        past_error=past_error,
        rate=math.log10(rate),
        latency=math.log10(max(1.0, (link.latency_seconds - software) * 1e6)),
        batch=math.log2(next(iter(fitted.values())).batch_size),
        price=settings.price_per_node_hour,
        own=settings.workers_per_host,
    )
