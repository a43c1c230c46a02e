"""What connects workers: links, networks that have a name, and the clusters made of them."""

import math
from dataclasses import dataclass, replace

from recipe.errors import near_match, refuse

GBIT = 1e9 / 8  # bytes/s of 1 Gb/s
# Open MPI over TCP seldom sends in both directions at once: seen in the recorded check.
MPI_BOTH_WAYS = 2.0


@dataclass(frozen=True)
class Link:
    """One level of a network, as a worker sees it."""

    latency_seconds: float  # of a round in which each sends a message to another, software included
    bytes_per_second: float = math.inf  # between hosts: of a host, for all its workers together
    cpu_seconds_per_byte: float = 0.0  # that a rank computes for each byte that it sends
    both_ways_factor: float = 1.0  # two messages to each other take so many times as long as one


@dataclass(frozen=True)
class Network:
    """Links within a host and between hosts, and what a rank's CPU does for a byte of fp32."""

    within: Link
    between: Link
    copy_seconds_per_byte: float = 0.0  # into a buffer and back
    cast_seconds_per_byte: float = 0.0  # to fp16 and back
    control: "Network | None" = None  # over which Horovod's ranks agree; None: over this one


@dataclass(frozen=True)
class Cluster:
    """Equal hosts."""

    hosts: int
    workers_per_host: int
    cores_per_host: float
    network: Network

    @property
    def workers(self) -> int:
        """All of them."""
        return self.hosts * self.workers_per_host


# Measured on a host of two cores (results/xeon-2-cores/2026-11-21-allreduce): Gloo through the
# loopback device, MPI through shared memory. The processors move these bytes themselves, so that
# there is no bandwidth but theirs.
ON_CPUS = {
    "gloo": Link(0.4e-3, cpu_seconds_per_byte=1.3e-9),
    "mpi": Link(5e-6, cpu_seconds_per_byte=0.7e-9),
}
# Of the same measurement: what 256 MiB take on the fp16 wire beyond half of their time in fp32,
# with torch's Gloo and Horovod's MPI alike. A copy is assumed.
COPY, CAST = 0.2e-9, 1.0e-9
TCP, RDMA = 1448 / 1538, 4096 / 4166  # the payload's share of full packets of 1,500 and 4,096 bytes
TCP_1G = 55e-6  # half of 110 us round trip, serverfault.com question 791539
TCP_10G = 48e-6  # half of 96 us round trip between EC2 instances, blogs.scalablelogic.com 2014-01
NCCL = 14e-6  # hwLat of a network, Simple, in NCCL's src/graph/tuning.cc
# Between hosts: Gb/s, share of it that is payload, latency. Rates are nominal ones (IEEE 802.3;
# InfiniBand EDR, HDR and NDR).
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
# Within a host with GPUs: bytes/s of a GPU (links x bandwidth of one in NCCL's src/graph/topo.h),
# and the latency of a ring, Simple, in its tuning.cc.
ISLANDS = {
    "pcie": Link(5.7e-6, 12e9),
    "nvlink-v100": Link(3.4e-6, 6 * 20e9),
    "nvlink-a100": Link(3.4e-6, 12 * 20e9),
    "nvlink-h100": Link(3.4e-6, 18 * 20.6e9),
}


def named_network(
    between: str, transport: str, island: str | None = None, links_per_host: float = 1
) -> Network:
    """A network of BETWEEN, with GPUs connected as in ISLANDS, or CPUs (None), within a host as in
    ON_CPUS; UserError says which names there are, and what does not fit."""
    refuse(
        *(
            (name not in known, f"{name!r} is no network: {near_match(name, known)}")
            for name, known in ((between, BETWEEN), (island, ISLANDS))
            if name is not None
        )
    )
    refuse(
        (
            island and transport in ON_CPUS,
            f"--island {island} connects GPUs, and these runs exchanged gradients by {transport} on"
            " CPUs: leave it out, or give runs over NCCL",
        ),
        (
            not island and transport not in ON_CPUS,
            f"{transport} runs on GPUs: say how a host connects them, as in --island pcie",
        ),
    )
    gbit, payload, latency = BETWEEN[between]
    rate = gbit * GBIT * payload * links_per_host
    if island:
        link, control = Link(latency, rate), named_network(between, "mpi")
        return Network(ISLANDS[island], link, control=control)
    own = ON_CPUS[transport]  # whose software is most of the latency
    by_turns = transport == "mpi" and payload == TCP
    link = replace(
        own, latency_seconds=own.latency_seconds + latency, bytes_per_second=rate,
        both_ways_factor=MPI_BOTH_WAYS if by_turns else 1.0,
    )  # fmt: skip
    return Network(own, link, COPY, CAST)
