"""The model: what a step takes on a cluster. compare/page/prediction.js computes the same."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from compare.prediction.inputs import Inputs
from compare.prediction.networks import Cluster, Network

# How much a figure may be off, as a relative standard deviation: what makes the interval.
UNCERTAIN = {
    "compute": 0.02,
    "spread": 0.5,
    "latency": 0.3,
    "bandwidth": 0.05,
    "cpu": 0.15,
    "sharing": 0.05,
}
ALL_AS_MEASURED = dict.fromkeys(UNCERTAIN, 1.0)
QUANTILE = 1.645  # of the normal distribution: an interval of 90 %


@dataclass(frozen=True)
class Step:
    """What a step is made of, in seconds."""

    seconds: float
    compute_seconds: float  # without anybody to wait for
    exposed_seconds: float  # what the exchange of gradients adds to it
    straggler_seconds: float  # and the slowest rank
    messages: int


@dataclass(frozen=True)
class Prediction:
    """A step on a cluster, with a 90 % interval."""

    step_seconds: float
    low_seconds: float
    high_seconds: float
    exposed_seconds: float
    images_per_second: float
    efficiency: float  # of the speed of as many lone workers
    messages: int


def allreduce_seconds(
    inputs: Inputs, cluster: Cluster, size: float, tensors: int, scale: Mapping[str, float]
) -> tuple[float, float, float]:
    """Seconds of latency, of the wire, and of a rank's CPU for a message of `size` bytes of fp32."""
    network, workers = cluster.network, cluster.workers
    link = network.between if cluster.hosts > 1 else network.within
    half = inputs.wire_format == "fp16"
    sent = size * (0.5 if half else 1.0) * 2 * (workers - 1) / workers
    log2 = math.ceil(math.log2(workers))
    rounds = 2 * (workers - 1) if inputs.transport == "gloo" else 2 * log2
    cpu = sent * link.cpu_seconds_per_byte * inputs.exchange_factor
    latency = rounds * link.latency_seconds * inputs.exchange_factor
    cpu += size * network.cast_seconds_per_byte * half
    cpu += size * network.copy_seconds_per_byte * (inputs.engine == "horovod" and tensors > 1)
    wire = sent / (link.bytes_per_second * scale["bandwidth"])
    return latency * scale["latency"], wire, cpu * scale["cpu"]


def simulate(
    inputs: Inputs, cluster: Cluster, scale: Mapping[str, float] = ALL_AS_MEASURED
) -> Step:
    """Go through a step's messages; their number depends on the gradients, not on the workers."""
    per_host, threads = cluster.workers_per_host, inputs.threads
    share = max(1.0, per_host * threads / cluster.cores_per_host)
    share = 1 + (share - 1) * scale["sharing"]
    free = min(1.0, max(0.0, cluster.cores_per_host / per_host - threads))  # cores for messages
    busy = max(1.0, min(per_host, cluster.cores_per_host / threads))
    slow = share * (1 + (inputs.contention - 1) * (busy - 1)) * scale["compute"]
    computed, stolen, idle_from, messages, sent = inputs.backward_seconds * slow, 0.0, 0.0, 0, 0
    sizes, ready = inputs.gradient_bytes, [seconds * slow for seconds in inputs.ready_seconds]
    while cluster.workers > 1 and sent < len(sizes):
        last, size = sent, sizes[sent]
        begin = max(ready[sent] + stolen, idle_from)
        if inputs.engine == "ddp":
            limit = inputs.bucket_bytes if messages else inputs.first_bucket_bytes
            while last + 1 < len(sizes) and size < limit:
                last += 1
                size += sizes[last]
            begin = max(ready[last] + stolen, idle_from)
        else:
            begin += inputs.cycle_seconds / 2
            while (
                last + 1 < len(sizes)
                and ready[last + 1] + stolen <= begin
                and size + sizes[last + 1] <= inputs.fusion_bytes
            ):
                last += 1
                size += sizes[last]
        latency, wire, cpu = allreduce_seconds(inputs, cluster, size, last + 1 - sent, scale)
        left = max(0.0, computed + stolen - begin)  # of the backward pass
        taken = min(cpu * share, left) * (1 - free)
        idle_from = begin + latency * share + max(wire, cpu * share + taken)
        stolen += taken
        messages, sent = messages + 1, last + 1
    exposed = stolen + max(0.0, idle_from - computed - stolen)
    independent = cluster.hosts * busy
    straggler = inputs.spread_seconds * scale["spread"] * math.log(independent)
    compute = inputs.step_seconds * slow
    return Step(compute + exposed + straggler, compute, exposed, straggler, messages)


def predict_step(inputs: Inputs, cluster: Cluster) -> Prediction:
    """The step with its interval, by first-order propagation of what may be off."""
    step = simulate(inputs, cluster)
    offs = [
        simulate(inputs, cluster, {**ALL_AS_MEASURED, name: 1 + sd}).seconds - step.seconds
        for name, sd in UNCERTAIN.items()
    ]
    half = QUANTILE * math.sqrt(sum(off**2 for off in offs))
    rate = cluster.workers * inputs.batch_size / step.seconds
    return Prediction(
        step.seconds, max(step.seconds - half, 0.0), step.seconds + half, step.exposed_seconds,
        rate, inputs.step_seconds / step.seconds, step.messages,
    )  # fmt: skip


def fit(inputs: Inputs, network: Network) -> Inputs:
    """The same inputs with the exchange's cost that makes a pair on one host take as long as it was
    measured to; without such a measurement unchanged."""
    if inputs.pair_seconds is None:
        return inputs
    pair = Cluster(1, 2, inputs.cores, network)
    low, high = 0.0, 32.0
    for _ in range(40):
        middle = (low + high) / 2
        inputs = replace(inputs, exchange_factor=middle)
        if simulate(inputs, pair).seconds < inputs.pair_seconds:
            low = middle
        else:
            high = middle
    return inputs
