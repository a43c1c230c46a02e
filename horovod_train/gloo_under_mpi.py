"""How Horovod's ranks meet over Gloo where MPI has started them.

Horovod 0.28.1 crashes in its first all-reduce if MPI is what its ranks agree by and Gloo what sums.
So Gloo does both here, as under horovodrun --gloo: its ranks read their place in the world from
variables, and find each other through a small server.
"""

import os
from threading import Thread

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from recipe.meeting import (
    keep_gloo_off_loopback,
    prepare_gloo,
    refuse_unknown_interfaces,
    server_address,
    start_mpi,
)
from recipe.world import World


def meet_through_mpi(world: World) -> None:
    """Set the variables by which Horovod's ranks find each other; rank 0 serves them until it ends.
    UserError where MPI cannot carry the server's address, or other hosts would not reach it."""
    comm = start_mpi(world, "start it with horovodrun --gloo").COMM_WORLD
    prepare_gloo(world)
    refuse_unknown_interfaces("HOROVOD_GLOO_IFACE")
    # Those with the same local rank, one of each host.
    peers = [rank for rank, local in enumerate(comm.allgather(world.local_rank))
             if local == world.local_rank]  # fmt: skip
    slot = SlotInfo(
        hostname=world.host,
        rank=world.rank,
        local_rank=world.local_rank,
        cross_rank=peers.index(world.rank),
        size=world.size,
        local_size=world.local_size,
        cross_size=len(peers),
    )
    slots = comm.gather(slot, root=0)
    address: tuple[str, int] | None = None
    if world.is_first:
        host, listens_at = server_address(world)
        server = RendezvousHTTPServer((listens_at, 0), RendezvousHandler, 0)
        server.daemon_threads = True  # nothing of it outlives this process
        server.init([SlotInfo(**one) for one in slots])  # it came as JSON
        Thread(target=server.serve_forever, daemon=True).start()
        address = host, server.server_port
    host, port = comm.bcast(address, root=0)
    keep_gloo_off_loopback(world, host)
    os.environ |= {f"HOROVOD_{name.upper()}": str(value) for name, value in vars(slot).items()}
    os.environ |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": host, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ.setdefault("HOROVOD_GLOO_IFACE", interface)
