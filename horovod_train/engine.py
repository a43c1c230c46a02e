"""Horovod, or a clear error where it cannot be imported, and what its start asks for beside
`hvd.init()`."""

import os

import torch

from recipe.config import Config
from recipe.errors import UserError, fail
from recipe.world import World, lone_copy_message, prepare_mpi, read_world

try:
    import horovod.torch as hvd
except ImportError as error:
    build = "python horovod_train/build_horovod.py"
    fail(read_world(), f"error: Horovod cannot be imported ({error}); build it: {build}")


def prepare(config: Config, world: World) -> None:
    """Set the variables that `hvd.init()` reads."""
    prepare_mpi(world)
    if config.profile_steps:
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # or hvd.start_timeline refuses
    if config.deterministic:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"  # what is fused is a matter of timing


def refuse_lone_copies(world: World) -> None:
    """UserError if Horovod found another number of ranks than the launcher has started."""
    if message := lone_copy_message(world, hvd.size(), "Start it with horovodrun or mpirun"):
        raise UserError(message)


def check_transport(config: Config, world: World, device: torch.device) -> str:
    """What carries the gradients: NCCL, MPI or Gloo. UserError for ranks that did not find each
    other and for Adasum without MPI; a warning where GPUs lack NCCL."""
    refuse_lone_copies(world)
    if config.use_adasum and not hvd.mpi_enabled():
        raise UserError("--use-adasum: needs MPI, not Gloo: start it by horovodrun --mpi or mpirun")
    if device.type == "cuda" and hvd.nccl_built():
        return "NCCL"
    if device.type == "cuda" and world.is_first:
        print("warning: this Horovod has no NCCL, gradients go through the CPU: make setup NCCL=1")
    return "MPI" if hvd.mpi_enabled() else "Gloo"
