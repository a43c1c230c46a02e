"""A network split over several ranks, and driven by one of them: RRefs, distributed autograd and a
distributed optimizer, torch's tools for model parallelism by remote calls.

    torchrun --nproc-per-node 2 baselines/rpc_pipeline.py

Each rank gets a piece of the network. Rank 0 runs the training as if it were alone, and uses the
pieces through RRefs, which are references to objects on other ranks. A call for a piece's output
returns an RRef at once, and the next piece fetches the output when it is ready. Distributed
autograd records all calls of a step in a context. Its backward pass goes back through the ranks,
and leaves the gradients in the context, on the ranks that have the weights. The distributed
optimizer lets each rank update its own weights. With --batches-per-allreduce a step has several
micro-batches, all in flight at once, so that the pieces work at the same time.

Use it for a network that is not a chain of equal stages, such as one that decides at run time what
to call: a step is ordinary Python on one rank. For plain chains pipeline.py has less overhead and a
better schedule: here all forward passes come before the first backward pass, so each rank holds the
activations of all micro-batches.

It costs remote calls: about ten per step beside the data, each a fraction of a millisecond or more.
The run folder's figures of memory and CPU time cover only rank 0.

RPC pickles what it sends, so anyone who can reach its ports can run any code. On one host it
listens at the loopback interface, otherwise at the interface that GLOO_SOCKET_IFNAME names.

Weights are bit-equal to single_process.py's. With --batches-per-allreduce above 1 they are only
nearly equal: micro-batches reach a piece in any order, and so do their gradients.
"""

from recipe.ranks import Ranks
from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__)

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from threading import Lock

import torch
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer

from recipe.loop import BEYOND_PLAIN_SGD, Rung
from recipe.training.metrics import Sums, batch_sums
from recipe.training.model import build_optimizer, split_resnet
from recipe.training.state import Trainables


# -- On each rank ----------------------------------------------------------------------------------
class Piece:
    """Some blocks of the network, and their optimizer."""

    here: "Piece"  # the piece of this rank

    def __init__(self, layers: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        self.layers, self.optimizer, self.lock = layers, optimizer, Lock()
        Piece.here = self

    def forward(self, images: rpc.RRef) -> torch.Tensor:
        """Return the output for the tensor that `images` refers to. Computes one micro-batch at a
        time, because BatchNorm's statistics are written."""
        given = images.to_here()
        with self.lock:
            return self.layers(given)

    def weights(self) -> list[rpc.RRef]:
        """Return a reference to each weight."""
        return [rpc.RRef(weight) for weight in self.layers.parameters()]

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def contents(self) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        """Return the layers and their optimizer; RPC sends the caller a copy."""
        return self.layers, self.optimizer


def optimizer_here(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return this rank's optimizer; the distributed optimizer calls this for each weight."""
    return Piece.here.optimizer


# -- On rank 0 -------------------------------------------------------------------------------------
class Driver(Rung):
    """Trains the pieces by remote calls."""

    name, transport, has_group = "rpc_pipeline", "TensorPipe", False
    has_remote_calls = is_for_cpu = True
    lacks = (
        *BEYOND_PLAIN_SGD,
        "compile",
        "weight_check_steps",  # each rank has different weights
    )

    def prepare(self) -> None:
        """Let rank 0 train alone."""
        optimizers_log = logging.getLogger("torch.distributed.optim.optimizer")
        optimizers_log.setLevel(logging.ERROR)  # silences the warning "might be slow"
        self.trains, self.workers = self.world.is_first, self.world.size  # others only hold pieces
        self.world = replace(self.world, size=1, local_size=1)
        self.ranks = Ranks(self.world)
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # the step's micro-batches
        self.step = ExitStack()

    def distribute(self) -> None:
        """Send each rank its piece."""
        self.copies = split_resnet(self.model, self.config, self.workers)
        self.pieces = []
        for rank, layers in enumerate(self.copies):
            optimizer, state = build_optimizer(layers, self.config), self.optimizer.state
            optimizer.state.update((w, state[w]) for w in layers.parameters() if w in state)
            self.pieces.append(rpc.remote(f"rank{rank}", Piece, args=(layers, optimizer)))
        weights = [weight for piece in self.pieces for weight in piece.rpc_sync().weights()]
        self.distributed = DistributedOptimizer(optimizer_here, weights)

    def forward_backward(
        self, images: torch.Tensor, targets: torch.Tensor, sync_gradients: bool, lap: Callable
    ) -> Sums:
        """When the step's last micro-batch has arrived, run all through the pieces and back."""
        self.waiting.append((images, targets))
        sums = torch.zeros(4, dtype=torch.float64)
        if not sync_gradients:
            return sums
        self.context = self.step.enter_context(autograd.context())
        coming = []
        for images, _ in self.waiting:
            passed = rpc.RRef(images)
            for piece in self.pieces[:-1]:
                passed = piece.remote().forward(passed)
            coming.append(self.pieces[-1].rpc_async().forward(passed))
        losses = []
        for future, (_, targets) in zip(coming, self.waiting, strict=True):
            outputs = future.wait()
            loss = self.criterion(outputs, targets)
            sums += batch_sums(outputs, targets, loss)
            losses.append(loss / len(self.waiting))
        lap("forward")
        autograd.backward(self.context, losses)
        self.waiting.clear()
        return sums

    def update(self, rate: float) -> None:
        """Let each rank update its weights by the gradients in the step's context."""
        with self.step:  # at its end the ranks discard the context
            torch.futures.wait_all([piece.rpc_async().set_rate(rate) for piece in self.pieces])
            self.distributed.step(self.context)

    def unsharded(self) -> Trainables:
        """Copy the pieces' weights and momentum into the complete network on rank 0."""
        for part, piece in zip(self.copies, self.pieces, strict=True):
            layers, optimizer = piece.rpc_sync().contents()
            part.load_state_dict(layers.state_dict())
            for mine, theirs in zip(part.parameters(), layers.parameters(), strict=True):
                self.optimizer.state[mine] = optimizer.state[theirs]
        return self


main = Driver.main
