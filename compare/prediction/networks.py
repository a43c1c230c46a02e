"""What connects workers: links measured or named, and clusters made of them."""

import math
from dataclasses import dataclass, replace

GBIT = 1e9 / 8  # bytes/s of 1 Gb/s


@dataclass(frozen=True)
class Link:
    """One level of a network, as a worker sees it."""

    latency_seconds: float  # of a message without contents, software included
    bytes_per_second: float = math.inf  # of all workers of a host together
    cpu_seconds_per_byte: float = 0.0  # that a rank computes for each byte that it sends


@dataclass(frozen=True)
class Network:
    """Links within a host and between hosts."""

    name: str
    within: Link
    between: Link
    copy_seconds_per_byte: float = 0.0  # of the CPU, into a buffer and back, of fp32
    cast_seconds_per_byte: float = 0.0  # of the CPU, to fp16 and back, of fp32
    source: str = ""


@dataclass(frozen=True)
class Cluster:
    """Equal hosts."""

    hosts: int
    workers_per_host: int
    cores_per_host: float  # below 1 where "hosts" share a machine's cores
    network: Network

    @property
    def workers(self) -> int:
        """All of them."""
        return self.hosts * self.workers_per_host


# Measured on a host of two cores (results/xeon-2-cores/2026-11-21-allreduce): Gloo over the
# loopback device, MPI through shared memory. The processors move these bytes, so that there is no
# bandwidth but theirs.
ON_CPUS = {
    "gloo": Link(0.4e-3, cpu_seconds_per_byte=1.3e-9),
    "mpi": Link(5e-6, cpu_seconds_per_byte=0.7e-9),
}
COPY, CAST = 0.2e-9, 0.4e-9  # of the same measurement


def on_cpus(
    transport: str, gbit_per_s: float | None = None, latency_seconds: float | None = None
) -> Network:
    """Hosts without GPUs, and between them Ethernet of this rate; None: as fast as the CPUs."""
    within = ON_CPUS[transport]
    between = replace(
        within,
        latency_seconds=within.latency_seconds if latency_seconds is None else latency_seconds,
        bytes_per_second=math.inf if gbit_per_s is None else gbit_per_s * GBIT,
    )
    name = "one host" if gbit_per_s is None else f"{gbit_per_s:g} Gb/s"
    return Network(name, within, between, COPY, CAST)
