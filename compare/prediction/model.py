"""The model: the networks between workers, and the time of a step on a cluster.

A rank computes. Its gradients get ready in their order, and one of its threads sends messages, one
after the other. The events of a step are the begins and ends of its messages, so their number does
not grow with the number of workers. docs/prediction.md has all assumptions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from compare.prediction.inputs import Inputs
from recipe.errors import UserError, near_match, refuse
from recipe.settings.flags import WIRE_BYTES

# --------------------------------------------------------------------------------- named networks

GBIT = 1e9 / 8  # bytes/s of 1 Gb/s
# Open MPI over TCP seldom sends in both directions at once, as the recorded check showed.
MPI_BOTH_WAYS = 2.0


@dataclass(frozen=True)
class Link:
    """One level of a network, as a worker sees it."""

    latency_seconds: float  # of a round in which each rank sends one message, software included
    bytes_per_second: float = math.inf  # between hosts: of a host, for all its workers together
    cpu_seconds_per_byte: float = 0.0  # CPU time of a rank for each byte that it sends
    both_ways_factor: float = 1.0  # time of two messages to each other / time of one


@dataclass(frozen=True)
class Network:
    """Links within a host and between hosts, and a rank's CPU time for a byte of fp32."""

    within: Link
    between: Link
    copy_seconds_per_byte: float = 0.0  # into a buffer and back
    cast_seconds_per_byte: float = 0.0  # to fp16 and back
    control: "Network | None" = None  # for the negotiation of Horovod's ranks; None: this network


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal hosts."""

    hosts: int
    workers_per_host: int
    cores_per_host: float
    network: Network

    @property
    def workers(self) -> int:
        """The number of workers on all hosts."""
        return self.hosts * self.workers_per_host


# From results/epyc-2-cores/2026-11-28-allreduce: torch.distributed over Gloo (through the loopback
# device) and mpi4py (through shared memory). Two workers need two rounds, in which each sends all
# bytes once: so the latency is half of the time of 4 KiB, and the CPU time of a byte is that of
# 64 MiB. The processors move these bytes themselves, so the only limit is their speed.
ON_CPUS = {
    "gloo": Link(0.58e-3, cpu_seconds_per_byte=0.64e-9),
    "mpi": Link(3.7e-6, cpu_seconds_per_byte=0.41e-9),
}
# From the same record, by torch.distributed over Gloo: the time of 64 MiB on the fp16 wire beyond
# half of their time in fp32. (Over MPI it is shorter, with Horovod over Gloo longer.) The figure of
# a copy is an assumption.
COPY, CAST = 0.2e-9, 0.42e-9
TCP, RDMA = 1448 / 1538, 4096 / 4166  # the payload's share of full packets of 1,500 and 4,096 bytes
TCP_1G = 55e-6  # half of a round trip of 110 us, serverfault.com question 791539
TCP_10G = 48e-6  # half of one of 96 us between EC2 instances, blogs.scalablelogic.com 2014-01
NCCL = 14e-6  # hwLat of a network, Simple, in NCCL's src/graph/tuning.cc
# Between hosts: nominal rate in Gb/s (IEEE 802.3; InfiniBand EDR, HDR and NDR), the payload's share
# of it, latency.
BETWEEN = {
    "1-ethernet": (1, TCP, TCP_1G),
    "10-ethernet": (10, TCP, TCP_10G),
    "25-ethernet": (25, TCP, TCP_10G),
    "100-ethernet": (100, TCP, TCP_10G),
    "200-ethernet": (200, TCP, TCP_10G),
    "400-ethernet": (400, TCP, TCP_10G),
    "25-roce": (25, RDMA, NCCL),
    "100-infiniband": (100, RDMA, NCCL),
    "200-infiniband": (200, RDMA, NCCL),
    "400-infiniband": (400, RDMA, NCCL),
}
# Within a host with GPUs: the latency of a ring (Simple) in NCCL's src/graph/tuning.cc, and bytes/s
# of a GPU: number of links x bandwidth of a link in its topo.h.
ISLANDS = {
    "pcie": Link(5.7e-6, 12e9),
    "nvlink-v100": Link(3.4e-6, 6 * 20e9),
    "nvlink-a100": Link(3.4e-6, 12 * 20e9),
    "nvlink-h100": Link(3.4e-6, 18 * 20.6e9),
}


def named_network(
    between: str, transport: str, island: str | None = None, links_per_host: float = 1
) -> Network:
    """Return a network of BETWEEN. Within a host, GPUs are connected as in ISLANDS and CPUs (island
    None) as in ON_CPUS. UserError for unknown names, and for an island that does not fit the
    transport."""
    for name, known in ((between, BETWEEN), (island, ISLANDS)):
        if name is not None and name not in known:
            raise UserError(f"{name!r} is no network: {near_match(name, known)}")
    refuse(
        (
            island and transport in ON_CPUS,
            f"--island {island} connects GPUs, but these runs exchanged gradients by {transport} on"
            " CPUs: leave it out, or give runs over NCCL",
        ),
        (
            not island and transport not in ON_CPUS,
            f"{transport} runs on GPUs: give their connection within a host, as in --island pcie",
        ),
    )
    gbit, payload, latency = BETWEEN[between]
    rate = gbit * GBIT * payload * links_per_host
    if island:
        link, control = Link(latency, rate), named_network(between, "mpi")
        return Network(ISLANDS[island], link, control=control)
    within = ON_CPUS[transport]  # its software accounts for most of the latency
    is_one_way = transport == "mpi" and payload == TCP
    link = replace(
        within,
        latency_seconds=within.latency_seconds + latency,
        bytes_per_second=rate,
        both_ways_factor=MPI_BOTH_WAYS if is_one_way else 1.0,
    )
    return Network(within, link, COPY, CAST)


# ---------------------------------------------------------------------------- a step on a cluster

# The uncertainty of each figure, as a relative standard deviation: the interval follows from these.
UNCERTAIN = {
    "compute": 0.02,  # of a step's computation, from one occasion to the next
    "spread": 0.5,  # of stragglers
    "latency": 0.3,
    "bandwidth": 0.05,
    "cpu": 0.15,  # CPU time of messages
    "sharing": 0.05,  # the loss of ranks that share cores, beyond the smaller share
    "model": 0.09,  # effects that are not in the model, from the errors of the recorded check
}
AS_TOLD = dict.fromkeys(UNCERTAIN, 1.0)
QUANTILE = 1.645  # of the normal distribution, for an interval of 90 %
TREE_RATE = 0.92  # as a share of a ring's rate, from NCCL's src/graph/tuning.cc


@dataclass(frozen=True)
class Prediction:
    """A step on a cluster, with a 90 % interval."""

    step_seconds: float
    low_seconds: float
    high_seconds: float
    exposed_seconds: float  # added by the exchange of gradients
    images_per_second: float  # of all workers
    efficiency: float  # throughput / that of the same number of lone workers


def allreduce(
    inputs: Inputs, cluster: Cluster, size: float, scale: Mapping[str, float]
) -> tuple[float, float, float]:
    """Return the seconds of latency, on the wire, and of each rank's CPU for `size` bytes.

    A ring sends 2 (n - 1) / n of a message through each rank, in 2 (n - 1) rounds. Halving and
    doubling sends the same amount in 2 log2(n) rounds, if n is a power of two (Thakur et al. 2005).
    Rounds between hosts have the latency between hosts. For other n, halving leaves some ranks out,
    and a neighbour works for each: half a message goes both ways, and one and a half go one way. A
    double binary tree also has 2 log2(n) rounds, and sends the whole message twice (Sanders et al.
    2009), at a little less than a ring's rate. NCCL takes the faster of ring and tree for each
    size.
    """
    hosts, per_host, workers = cluster.hosts, cluster.workers_per_host, cluster.workers
    within, between = cluster.network.within, cluster.network.between
    outer = between if hosts > 1 else within
    # The slowest link decides.
    seconds_per_byte = 1 / outer.bytes_per_second
    if hosts > 1 and per_host > 1:
        seconds_per_byte = max(seconds_per_byte, 1 / within.bytes_per_second)
    sent = 2 * (workers - 1) / workers * size
    # Rounds between hosts, and within a host. Each part of a message travels round a ring, which
    # enters each host once.
    across = min(hosts if hosts > 1 else 0, workers - 1)
    ring = (
        2 * across * between.latency_seconds + 2 * (workers - 1 - across) * within.latency_seconds
    )
    deep, low = math.ceil(math.log2(hosts)), math.ceil(math.log2(per_host))
    tree = 2 * deep * between.latency_seconds + 2 * low * within.latency_seconds
    latency, wire, cpu = ring, sent * seconds_per_byte, sent * outer.cpu_seconds_per_byte
    if inputs.algorithm == "halving":
        power = 2 ** int(math.log2(workers))
        folds = power < workers
        exchanged = (2 * (power - 1) / power + 0.5 * folds) * outer.both_ways_factor
        one_way = (exchanged + 1.5 * folds) * size / outer.bytes_per_second
        latency, wire = tree, max(wire, one_way)
    if inputs.algorithm == "tree":
        by_tree = tree, 2 * size * seconds_per_byte / TREE_RATE
        latency, wire = min((ring, wire), by_tree, key=sum)
    factor = inputs.exchange_factor
    return (
        # Ranks wait for each other once per message, however many rounds it has.
        (latency + 2 * (factor - 1) * outer.latency_seconds) * scale["latency"],
        wire / scale["bandwidth"],
        cpu * factor * scale["cpu"],
    )


def simulate(
    inputs: Inputs, cluster: Cluster, scale: Mapping[str, float] = AS_TOLD
) -> tuple[float, float]:
    """Go through the messages of a step. Return its seconds, and the seconds that the exchange of
    gradients adds. `scale` has a factor for each figure of UNCERTAIN."""
    workers, threads = cluster.workers, inputs.threads
    cores = cluster.cores_per_host / cluster.workers_per_host  # of a rank
    share = 1 + (max(1.0, threads / cores) - 1) * scale["sharing"]  # threads share a core
    free = min(1.0, max(0.0, cores - threads))  # share of a core for the sending thread
    # Ranks that compute at the same time on one machine compete for its memory.
    busy = max(1.0, min(1.0, cores / threads) * cluster.workers_per_host)
    slow = share * (1 + (inputs.contention - 1) * (busy - 1)) * scale["compute"]
    computed, ready = inputs.backward_seconds * slow, [t * slow for t in inputs.ready_seconds]
    sizes = inputs.gradient_bytes
    delay = ended = 0.0  # delay of the backward pass by messages; end of the last message
    narrow = WIRE_BYTES[inputs.wire_format] / 4  # gradients are fp32
    first = messages = agreed = 0
    while workers > 1 and first < len(sizes):
        last, size = first + 1, sizes[first]
        if inputs.engine == "ddp":  # a bucket is full when it has reached its limit
            limit = inputs.bucket_bytes if messages else inputs.first_bucket_bytes
            while last < len(sizes) and size < limit:
                size, last = size + sizes[last], last + 1
            begin = max(ready[last - 1] + delay, ended)
        else:
            begin = ended
            if first >= agreed:  # one negotiation covers all gradients ready when a cycle begins
                begin = max(ready[first] + delay + inputs.cycle_seconds / 2, ended)
                agreed = max(last, sum(seconds + delay <= begin for seconds in ready))
                begin += negotiation(inputs, cluster, scale)
            while last < agreed and (size + sizes[last]) * narrow <= inputs.fusion_bytes:
                size, last = size + sizes[last], last + 1
        latency, wire, cpu = allreduce(inputs, cluster, size * narrow, scale)
        copied = inputs.engine == "horovod" and last - first > 1
        cpu += size * narrow * cluster.network.copy_seconds_per_byte * copied * scale["cpu"]
        cpu += size * cluster.network.cast_seconds_per_byte * (narrow < 1) * scale["cpu"]
        left = max(0.0, computed + delay - begin)  # of the backward pass
        taken = min(cpu * share, left) * (1 - free)  # from it, as two threads share a core
        ended = begin + latency + max(wire, cpu * share + taken)
        delay += taken
        first, messages = last, messages + 1
    exposed = delay + max(0.0, ended - computed - delay)
    # The largest of n values with Gumbel's distribution is larger by scale x ln n, on average.
    straggler = inputs.spread_seconds * scale["spread"] * math.log(busy * cluster.hosts)
    seconds = inputs.step_seconds * slow + exposed + straggler
    return seconds * (scale["model"] if workers > 1 else 1.0), exposed


def negotiation(inputs: Inputs, cluster: Cluster, scale: Mapping[str, float]) -> float:
    """Return the seconds until Horovod's ranks agree on which gradients are ready: an all-reduce of
    a few bits, by MPI or Gloo, never by NCCL."""
    cluster = replace(cluster, network=cluster.network.control or cluster.network)
    return inputs.negotiates * allreduce(inputs, cluster, 0.0, scale)[0]


def predict_step(inputs: Inputs, cluster: Cluster) -> Prediction:
    """Return the step with its interval, by first-order propagation of the uncertainties."""
    seconds, exposed = simulate(inputs, cluster)
    offs = [
        simulate(inputs, cluster, {**AS_TOLD, name: 1 + sd})[0] - seconds
        for name, sd in UNCERTAIN.items()
    ]
    half = QUANTILE * math.hypot(*offs) / seconds
    return Prediction(
        step_seconds=seconds,
        low_seconds=seconds * math.exp(-half),
        high_seconds=seconds * math.exp(half),
        exposed_seconds=exposed,
        images_per_second=cluster.workers * inputs.batch_size / seconds,
        efficiency=inputs.step_seconds / seconds,
    )


def fit(inputs: Inputs, network: Network) -> Inputs:
    """Return the inputs with the exchange_factor at which the step of a pair on one host is as
    measured, or nearest to it. They stay unchanged without such a measurement, and on GPUs, where
    it does not show the latency of messages."""
    if inputs.pair_seconds is None or not network.within.cpu_seconds_per_byte:
        return inputs
    # Messages are never free: a factor below a quarter would be noise of the pair's step.
    pair, low, high = Cluster(1, 2, inputs.cores, network), 0.25, 32.0
    for _ in range(40):
        middle = (low + high) / 2
        seconds, _ = simulate(replace(inputs, exchange_factor=middle), pair)
        low, high = (low, middle) if seconds > inputs.pair_seconds else (middle, high)
    return replace(inputs, exchange_factor=high)


def at_batch(inputs: Inputs, batch_size: float) -> Inputs:
    """Return the inputs for another batch per worker: the time of forward and backward pass grows
    with the images, except for the fixed share."""
    ratio = batch_size / inputs.batch_size
    fixed = inputs.fixed_share or 0.0
    factor = fixed + (1 - fixed) * ratio
    return replace(
        inputs,
        batch_size=batch_size,
        ready_seconds=tuple(seconds * factor for seconds in inputs.ready_seconds),
        data_seconds=inputs.data_seconds * ratio,
        forward_seconds=inputs.forward_seconds * factor,
        backward_seconds=inputs.backward_seconds * factor,
    )
