"""The floor: the same training with nothing but mpi4py's Allreduce in the place of an engine.

    mpirun -np 2 python baselines/mpi4py_train.py

The loop is that of horovod_train/train.py; what it gets instead of Horovod stands below. When the
backward passes of a step are over, one message averages all gradients: nothing hides behind
computation. An engine that is not faster than this is not worth its installation.
"""

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from recipe.config import Config
from recipe.errors import UserError, one_message
from recipe.start import Hooks, start
from recipe.world import World, lone_copy_message, prepare_mpi, read_world

ENGINE = "mpi4py"

if __name__ == "__main__":  # before torch is loaded
    config, world = start(ENGINE)

import mpi4py
import torch

prepare_mpi(read_world())
mpi4py.rc.initialize = __name__ == "__main__"  # loader workers import this file, and are no ranks
from mpi4py import MPI  # its import initialises MPI

comm = MPI.COMM_WORLD


# -- The engine ------------------------------------------------------------------------------------
def allreduce(values: torch.Tensor, op: object, name: str) -> torch.Tensor:
    """The sum of the ranks' values."""
    total = values.clone()
    comm.Allreduce(MPI.IN_PLACE, total.numpy())
    return total


def broadcast(values: torch.Tensor, root_rank: int, name: str = "") -> torch.Tensor:
    """One rank's values, on each rank."""
    comm.Bcast(values.numpy(), root_rank)
    return values


def broadcast_parameters(state: dict[str, torch.Tensor], root_rank: int) -> None:
    """Give each rank one rank's weights and buffers."""
    for values in state.values():
        broadcast(values, root_rank)


def average_gradients(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Make the gradients the averages over ranks."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    message = torch.cat([weight.grad.flatten() for weight in weights])
    message /= comm.size
    comm.Allreduce(MPI.IN_PLACE, message.numpy())
    pieces = message.split([weight.numel() for weight in weights])
    for weight, piece in zip(weights, pieces, strict=True):
        weight.grad.copy_(piece.view_as(weight))


def distributed_optimizer(optimizer: Any, **_: object) -> Any:
    """The optimizer, with what the loop asks of Horovod's."""
    optimizer.skip_synchronize = nullcontext
    optimizer.set_backward_passes_per_step = lambda passes: None  # the loop does not ask for them
    return optimizer


# -- In Horovod's place ----------------------------------------------------------------------------
def prepare(config: Config, world: World) -> None:
    """UserError for what this engine lacks, and for ranks that did not find each other."""
    for flag, is_given in {
        f"--wire-format {config.wire_format}": config.wire_format != "fp32",
        f"--transport {config.transport}": config.transport not in ("auto", "mpi"),
        "--profile-steps": config.profile_steps is not None,
    }.items():
        if is_given:
            raise UserError(f"{flag}: not supported by this script; remove it")
    if message := lone_copy_message(world, comm.size, "Start it with mpirun"):
        raise UserError(message)


def check_transport(config: Config, world: World, device: torch.device) -> str:
    """MPI; UserError for GPUs, whose memory not every MPI knows."""
    if device.type != "cpu":
        raise UserError("plain MPI sends what lies in the CPU's memory; add --no-cuda")
    return "MPI"


hvd = SimpleNamespace(
    init=lambda: None,
    shutdown=lambda: None,
    allreduce=allreduce,
    broadcast=broadcast,
    broadcast_parameters=broadcast_parameters,
    DistributedOptimizer=distributed_optimizer,
    Compression=SimpleNamespace(none=None),
    SyncBatchNorm=None,  # on the CPU it is the recipe's
    Sum=None,
    Average=None,
    start_timeline=None,
    stop_timeline=None,
)
sys.modules["horovod_train.engine"] = SimpleNamespace(  # type: ignore[assignment]
    hvd=hvd,
    prepare=prepare,
    check_transport=check_transport,
    average_gradients=average_gradients,
)


def main(config: Config, world: World, hooks: Hooks) -> None:
    """Train as `config` says. Every rank calls this."""
    from horovod_train import train

    if not MPI.Is_initialized():
        MPI.Init_thread()
    train.ENGINE = ENGINE
    train.main(config, world, hooks)


if __name__ == "__main__":
    with one_message(world):
        main(config, world, Hooks())
