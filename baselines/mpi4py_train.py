"""The lower bound for an engine: the same training with only mpi4py's Allreduce in its place.

    mpirun -np 2 python baselines/mpi4py_train.py

After the backward passes of a step one message averages all gradients, so communication does not
overlap with computation. An engine that is not faster than this is not worth installing.
"""

from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__)

from collections.abc import Callable

import torch
from torch._utils import _unflatten_dense_tensors as in_shapes_of

from recipe.loop import Rung
from recipe.rendezvous import start_mpi
from recipe.training.metrics import Sums


class PlainMPI(Rung):
    """Averages the gradients directly by MPI, under any launcher that starts MPI's ranks."""

    name, transport, launcher, has_group, is_for_cpu = "mpi4py", "MPI", None, False, True
    has, lacks = ("transport",), ("transport gloo", "transport nccl")

    def prepare(self) -> None:
        """Start MPI."""
        mpi = start_mpi(self.world, "start ddp_train/train.py with torchrun")
        self.comm, self.in_place = mpi.COMM_WORLD, mpi.IN_PLACE

    def forward_backward(
        self, images: torch.Tensor, targets: torch.Tensor, sync_gradients: bool, lap: Callable
    ) -> Sums:
        """Compute gradients as in one process, then average them over ranks."""
        sums = super().forward_backward(images, targets, sync_gradients, lap)
        if sync_gradients:
            weights = [w for group in self.optimizer.param_groups for w in group["params"]]
            message = torch.cat([w.grad.flatten() for w in weights])
            message /= self.comm.size
            self.comm.Allreduce(self.in_place, message.numpy())
            torch._foreach_copy_([w.grad for w in weights], in_shapes_of(message, weights))
        return sums

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' values, in a new tensor."""
        total = values.clone()
        self.comm.Allreduce(self.in_place, total.numpy())
        return total

    def from_rank_0(self, values: torch.Tensor) -> torch.Tensor:
        """Return rank 0's values on every rank."""
        self.comm.Bcast(values.numpy())
        return values


main = PlainMPI.main
