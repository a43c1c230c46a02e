"""The page of a prediction: sliders, and the model in JavaScript, with the same figures."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from compare.page.html import template
from compare.prediction.inputs import Inputs
from compare.prediction.networks import Cluster
from compare.prediction.step import QUANTILE, UNCERTAIN


def plain(record: Any) -> Any:
    """A record in JSON's terms; what is infinite becomes null."""
    return msgspec.to_builtins(msgspec.json.decode(msgspec.json.encode(record)))


def render_prediction(
    fitted: Mapping[str, Inputs], clusters: Mapping[str, Cluster], settings: Any
) -> str:
    """Return the page: no request goes out of it."""
    own = settings.workers_per_host
    data = {
        "configurations": [
            {
                "name": name,
                "inputs": plain(inputs),
                "cluster": plain(replace(clusters[name], workers_per_host=own)),
            }
            for name, inputs in fitted.items()
        ],
        "uncertain": UNCERTAIN,
        "quantile": QUANTILE,
        "island": settings.island,
        "images": settings.images,
        "epochs": settings.epochs,
        "price": settings.price_per_node_hour,
    }
    network = next(iter(clusters.values())).network
    first = network.between
    # On CPUs the software's latency, which is that within a host, adds to the link's.
    link_latency = first.latency_seconds - (
        0 if settings.island else network.within.latency_seconds
    )
    rate = first.bytes_per_second * 8e-9 if math.isfinite(first.bytes_per_second) else 10.0
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")  # no end of the script
    return template("prediction.html.jinja").render(
        data=text,
        rate=math.log10(rate),
        latency=math.log10(max(1.0, link_latency * 1e6)),
        batch=math.log2(next(iter(fitted.values())).batch_size),
        price=settings.price_per_node_hour,
    )
