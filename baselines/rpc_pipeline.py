"""A network in pieces on several ranks, that one of them drives: RRefs, distributed autograd and a
distributed optimizer, torch's tools for model parallelism by remote calls.

    torchrun --nproc-per-node 2 baselines/rpc_pipeline.py

Each rank gets a piece of the network. Rank 0 runs the training as if it were alone, and reaches the
pieces by RRefs, which are references to objects on other ranks. A call for a piece's output returns
an RRef at once, and the next piece fetches the output when it is there. Distributed autograd notes
all calls of a step in a context. Its backward pass goes back through the ranks, and leaves the
gradients in the context, on the ranks that have the weights. The distributed optimizer has each
rank change its own. With --batches-per-allreduce a step has several micro-batches, all under way at
once, so that the pieces work at the same time.

Use it where a network is no chain of equal stages, such as one that decides while it runs what it
calls: a step is ordinary Python on one rank. For plain chains pipeline.py has less overhead and
schedules better: here all forward passes come before the first backward pass, so each rank holds
the activations of all micro-batches.

It costs remote calls: some ten a step beside the data, each a fraction of a millisecond and more.
Only rank 0 is in the run folder's figures of memory and CPU time.

RPC pickles what it sends, so whoever reaches its ports can run any code. It listens at the loopback
interface on one host, and else at the one that GLOO_SOCKET_IFNAME names.

Weights are bit-equal to single_process.py's. With --batches-per-allreduce above 1 they are only
nearly equal: micro-batches reach a piece in any order, and so do their gradients.
"""

from recipe.config import Config
from recipe.errors import UserError, one_message
from recipe.start import Hooks, start
from recipe.world import World

ENGINE = "rpc_pipeline"

if __name__ == "__main__":  # before torch is loaded
    config, world = start(ENGINE)

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from threading import Lock

import torch
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer

from recipe.loop import Parts, Rung, prepare, train
from recipe.ranks import remote_calls
from recipe.training.metrics import Sums, batch_sums
from recipe.training.model import build_optimizer, pieces_of

LACKS = ("optimizer", "precision", "loss_scale", "clip_grad_norm", "model_ema", "compile")


# -- On each rank ----------------------------------------------------------------------------------
class Piece:
    """Some blocks of the network, and what changes their weights."""

    here: "Piece"  # that of this rank

    def __init__(self, layers: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        self.layers, self.optimizer, self.lock = layers, optimizer, Lock()
        Piece.here = self

    def forward(self, images: rpc.RRef) -> torch.Tensor:
        """The output for what `images` refers to. One micro-batch at a time: BatchNorm's statistics
        are written."""
        given = images.to_here()
        with self.lock:
            return self.layers(given)

    def weights(self) -> list[rpc.RRef]:
        """A reference to each weight."""
        return [rpc.RRef(weight) for weight in self.layers.parameters()]

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def contents(self) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        """A copy of what is here, for whoever asks by RPC."""
        return self.layers, self.optimizer


def optimizer_here(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    """What the distributed optimizer calls on each rank for one of its `weights`."""
    return Piece.here.optimizer


# -- On rank 0 -------------------------------------------------------------------------------------
class Driver:
    """Trains the pieces from afar."""

    def __init__(self, config: Config, ranks: int) -> None:
        self.config, self.ranks = config, ranks
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # the step's micro-batches
        self.step = ExitStack()

    def distribute(self, parts: Parts) -> None:
        """Send each rank its piece."""
        self.copies = pieces_of(parts.model, self.config, self.ranks)
        self.pieces = []
        for rank, layers in enumerate(self.copies):
            optimizer, state = build_optimizer(layers, self.config), parts.optimizer.state
            optimizer.state.update((w, state[w]) for w in layers.parameters() if w in state)
            self.pieces.append(rpc.remote(f"rank{rank}", Piece, args=(layers, optimizer)))
        weights = [weight for piece in self.pieces for weight in piece.rpc_sync().weights()]
        self.optimizer = DistributedOptimizer(optimizer_here, weights)

    def forward_backward(
        self,
        parts: Parts,
        images: torch.Tensor,
        targets: torch.Tensor,
        sync_gradients: bool,
        lap: Callable,
    ) -> Sums:
        """Once the step's last micro-batch is there, pass all through the pieces, and back."""
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
            loss = parts.criterion(outputs, targets)
            sums += batch_sums(outputs, targets, loss)
            losses.append(loss / len(self.waiting))
        lap("forward")
        autograd.backward(self.context, losses)
        self.waiting.clear()
        return sums

    def update(self, parts: Parts, rate: float) -> None:
        """Have each rank change its weights by the gradients in the step's context."""
        with self.step:  # at its end the ranks forget the context
            torch.futures.wait_all([piece.rpc_async().set_rate(rate) for piece in self.pieces])
            self.optimizer.step(self.context)

    def whole(self, parts: Parts) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The pieces' weights and momentum, in the network on rank 0 that they are pieces of."""
        for own, piece in zip(self.copies, self.pieces, strict=True):
            layers, optimizer = piece.rpc_sync().contents()
            own.load_state_dict(layers.state_dict())
            for mine, theirs in zip(own.parameters(), layers.parameters(), strict=True):
                parts.optimizer.state[mine] = optimizer.state[theirs]
        return parts.model, parts.optimizer


def main(config: Config, world: World, hooks: Hooks) -> None:
    """Train, or hold a piece, as `config` says. Every rank calls this."""
    device = prepare(config, world, LACKS)
    if device.type != "cpu":
        raise UserError("this script sends what lies in the CPU's memory; add --no-cuda")
    optimizers_log = logging.getLogger("torch.distributed.optim.optimizer")
    optimizers_log.setLevel(logging.ERROR)  # "might be slow"
    with remote_calls(config, world):
        if world.is_first:
            driver = Driver(config, world.size)
            rung = Rung(
                name=ENGINE,
                transport="TensorPipe",
                distribute=driver.distribute,
                forward_backward=driver.forward_backward,
                update=driver.update,
                whole=driver.whole,
            )
            train(config, replace(world, size=1, local_size=1), device, rung, hooks)


if __name__ == "__main__":
    with one_message(world):
        main(config, world, Hooks())
