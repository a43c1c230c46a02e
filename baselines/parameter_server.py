"""A parameter server: one rank holds the weights, the others train and send it their gradients.

    torchrun --nproc-per-node 3 baselines/parameter_server.py
    torchrun --nproc-per-node 3 baselines/parameter_server.py --synchronous

The last rank is the server, the others are trainers. After its backward pass a trainer pushes its
gradients, and the answer is the weights as they are then. Normally the server applies each push at
once, at the learning rate divided by the number of trainers (Dean et al. 2012, DistBelief): nobody
waits for another. But the pushes of others come in between, so gradients are of weights that are a
few updates old. The server counts this staleness, and the run prints it at its end. With
--synchronous it waits for one push of each trainer, averages them, makes one update, and then
answers all. That is what torch's `async_execution` is for: a call returns a future, and no thread
of the server's waits for it.

Use it where workers differ in speed: a slow one holds up nobody, within --log-interval steps, after
which all meet to write their metrics. Among equal workers an all-reduce does better.

It costs a rank that does not train. And the server's link is the bottleneck: in each step it takes
4 bytes a weight from each trainer, and sends as many back to each. In a ring each rank sends less
than 8 bytes a weight, however many ranks there are.

RPC pickles what it sends, so whoever reaches its ports can run any code. It listens at the loopback
interface on one host, and else at the one that GLOO_SOCKET_IFNAME names.

With --synchronous and two trainers the weights are bit-equal to those of ddp_train/train.py with
two workers, and with one trainer to single_process.py; with more, only the order of additions is
another one than DDP's. Without it they depend on who comes first, and differ from run to run.
"""

import sys

from recipe.start import run_script

SYNCHRONOUS = "--synchronous"

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__, [word for word in sys.argv[1:] if word != SYNCHRONOUS])

from collections import Counter
from threading import Lock

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _unflatten_dense_tensors as in_shapes_of
from torch.distributed import rpc
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer

from recipe.loop import Rung
from recipe.record.schema import RungFigures
from recipe.training.state import Trainables

Answer = tuple[int, torch.Tensor]  # how many updates the weights have had, and all of them: [n]


# -- On the server ---------------------------------------------------------------------------------
class Server:
    """The weights, and what changes them. An update takes the pushes of `group` trainers."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, trainers: int, group: int) -> None:
        self.weights, self.optimizer = list(model.parameters()), optimizer
        self.trainers, self.group = trainers, group
        self.lock = Lock()  # each call comes in a thread of its own
        self.version = 0  # updates so far
        self.staleness: Counter[int] = Counter()  # updates since the weights that were pushed for
        self.pushed: dict[int, torch.Tensor] = {}  # for the coming update, by trainer
        self.coming: torch.futures.Future = torch.futures.Future()  # its answer

    def answer(self) -> Answer:
        """The weights as they are now."""
        return self.version, parameters_to_vector(self.weights).detach()

    def take(
        self, trainer: int, version: int, gradients: torch.Tensor, rate: float
    ) -> torch.futures.Future:
        """Add gradients to those of the coming update, and make it if they are all there."""
        coming = self.coming
        self.staleness[self.version - version] += 1
        self.pushed[trainer] = gradients
        if len(self.pushed) == self.group:
            # In one order, whoever came first: the sum has the same bits in each run.
            mean = sum(self.pushed[trainer] / self.group for trainer in sorted(self.pushed))
            gradients = in_shapes_of(mean, self.weights)
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad = gradient
            for group in self.optimizer.param_groups:
                group["lr"] = rate * self.group / self.trainers
            self.optimizer.step()
            self.version += 1
            self.pushed.clear()
            self.coming = torch.futures.Future()
            coming.set_result(self.answer())
        return coming


def begin(*arguments: object) -> None:
    """Become the server of what a trainer sends."""
    global server
    server = Server(*arguments)


@rpc.functions.async_execution
def push(*arguments: object) -> torch.futures.Future:
    """What `Server.take` answers, once it does."""
    with server.lock:
        return server.take(*arguments)


def pull() -> tuple[Answer, dict, Counter[int]]:
    """The weights, the optimizer's state, and the staleness so far."""
    with server.lock:
        return server.answer(), server.optimizer.state_dict(), server.staleness


# -- On the trainers -------------------------------------------------------------------------------
class Trainer(Rung):
    """What a trainer does by the server instead of by itself."""

    name, transport, servers = "parameter_server", "TensorPipe", 1
    has_remote_calls = is_for_cpu = True
    lacks = (
        "optimizer", "precision", "loss_scale", "clip_grad_norm", "model_ema",
        "weight_check_steps",  # trainers hold weights of different age
    )  # fmt: skip
    version = 0  # of the weights here

    def distribute(self) -> None:
        """Rank 0 sends the server all that it needs."""
        self.weights, trainers = list(self.model.parameters()), self.world.size
        if self.world.is_first:
            group = trainers if SYNCHRONOUS in sys.argv else 1
            arguments = (self.model, self.optimizer, trainers, group)
            rpc.rpc_sync(self.server, begin, args=arguments)
        dist.barrier()

    def update(self, rate: float) -> None:
        """Push this step's gradients, and take the weights that come back."""
        gradients = parameters_to_vector([weight.grad for weight in self.weights])
        arguments = (self.world.rank, self.version, gradients, rate)
        self.take(rpc.rpc_sync(self.server, push, args=arguments))

    def take(self, answer: Answer) -> None:
        """Train on from these weights."""
        self.version, values = answer
        with torch.no_grad():
            torch._foreach_copy_(self.weights, in_shapes_of(values, self.weights))

    def whole(self) -> Trainables:
        """The server's weights after all pushes so far, on each trainer."""
        dist.barrier()
        answer, state, self.staleness = rpc.rpc_sync(self.server, pull)
        self.take(answer)
        self.optimizer.load_state_dict(state)
        dist.barrier()  # before one of them pushes again
        return self

    def measured(self) -> RungFigures:
        """How old the weights were that gradients were pushed for."""
        if not self.staleness:
            return RungFigures()
        updates = sum(age * pushes for age, pushes in self.staleness.items())
        return RungFigures(
            staleness=updates / self.staleness.total(), largest_staleness=max(self.staleness)
        )


main = Trainer.main
