"""How ranks find each other that MPI has started, and at which interface Gloo listens: both engines
ask for the same. MPI carries addresses here, and no gradient.
"""

import ipaddress
import os
import socket
from contextlib import suppress
from typing import Any

import msgspec
import psutil

from recipe.errors import UserError, refuse
from recipe.world import World, lone_copy_message, prepare_mpi


def prepare_gloo(world: World) -> None:
    """Choose the interface at which Gloo listens, unless the user has: the one chosen for NCCL,
    beside which Gloo carries what lies in the CPU's memory; or, if all ranks are on one host, the
    loopback, since others have no business with its ports."""
    interface = os.environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if interface not in psutil.net_if_addrs():  # such as a list of prefixes
        interface = "lo" if world.local_size == world.size else ""
    if interface in psutil.net_if_addrs() and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    refuse_unknown_interfaces("GLOO_SOCKET_IFNAME")


def refuse_unknown_interfaces(variable: str) -> None:
    """UserError if a variable names a network interface that this host lacks; it may hold several,
    with commas."""
    given, there = os.environ.get(variable, ""), psutil.net_if_addrs()
    unknown = [name for name in given.split(",") if name and name not in there]
    told = f"{variable}={given}: this host has no network interface {', '.join(unknown)}"
    refuse((unknown, f"{told}; it has {', '.join(there)}"))


def keep_gloo_off_loopback(world: World, first_host: str) -> None:
    """On several hosts, unless an interface is chosen, name the one that leads to `first_host` for
    Gloo, which listens at the address of this host's name: on Debian and Ubuntu that is 127.0.1.1,
    which no other host reaches.

    UserError if there is none.
    """
    if world.local_size == world.size or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name = socket.gethostname()
    own = "127.0.0.1"  # Gloo's address for a host without one
    with suppress(OSError):
        own = str(socket.getaddrinfo(name, None)[0][4][0]).partition("%")[0]
    if not ipaddress.ip_address(own).is_loopback:
        return
    interfaces = own_addresses()
    # On the first host itself its name may stand for 127.0.1.1, too: then the way to the outside,
    # by an address that is nobody's (RFC 5737). Nothing is sent to either.
    found = []
    for other in (first_host, "192.0.2.1"):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((other, 9))
            found.append(interfaces.get(asking.getsockname()[0]))
    if len(set(interfaces.values())) == 1:
        found += interfaces.values()
    if chosen := next(filter(None, found), None):
        os.environ["GLOO_SOCKET_IFNAME"] = chosen
        return
    raise UserError(
        f"{name}: this host's name resolves to {own}, where other hosts cannot reach it: let "
        "/etc/hosts give it the address that they reach, or set GLOO_SOCKET_IFNAME to the "
        "interface that leads to them; there are " + ", ".join(psutil.net_if_addrs())
    )


def own_addresses() -> dict[str, str]:
    """The interface of each IPv4 address of this host that others may reach."""
    return {
        address.address: interface
        for interface, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
        and not ipaddress.ip_address(address.address).is_loopback
    }


def start_mpi(world: World, instead: str) -> Any:
    """mpi4py's MPI, initialised; UserError, with what to do `instead`, where it is missing or sees
    other ranks than the launcher has started. What ranks tell each other by its lower-case methods
    travels as JSON: nothing that comes over the network is unpickled."""
    prepare_mpi(world)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter: it finds no library of MPI
        raise UserError(
            f"mpi4py is needed here ({error}): pip install mpi4py, or {instead}"
        ) from None
    remedy = (
        "mpi4py was built for another MPI: reinstall it with this mpirun's mpicc on PATH, or "
        f"{instead}"
    )
    if message := lone_copy_message(world, MPI.COMM_WORLD.size, remedy):
        raise UserError(message)
    MPI.pickle.__init__(msgspec.json.encode, msgspec.json.decode)  # type: ignore[misc]
    return MPI


def server_address(world: World) -> tuple[str, str]:
    """Rank 0's host as the others reach it, and where its server is to listen: on one host nobody
    else has business with it. By which address the others come to a host's name is not known."""
    host = "127.0.0.1" if world.local_size == world.size else _own_address()
    return host, "" if host == socket.gethostname() else host


def _own_address() -> str:
    """This host as the others reach it: by the interface that the user chose for Gloo, or for NCCL
    if that is the name of one (see `prepare_gloo`), else by its name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interface:
        return socket.gethostname()
    names = interface.split(",")
    found = [address for address, name in own_addresses().items() if name in names]
    refuse((not found, f"GLOO_SOCKET_IFNAME={interface}: has no IPv4 address that others reach"))
    return found[0]
