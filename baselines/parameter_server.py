"""A parameter server: one rank holds the weights, the others train and send it their gradients.

    torchrun --nproc-per-node 3 baselines/parameter_server.py
    torchrun --nproc-per-node 3 baselines/parameter_server.py --synchronous

The last rank is the server, the others are trainers. After its backward pass a trainer pushes its
gradients, and the server answers with the current weights. Normally the server applies each push at
once, at the learning rate divided by the number of trainers (Dean et al. 2012, DistBelief), so that
no trainer waits for another. But pushes of other trainers come in between, so gradients belong to
weights that are a few updates old. The server counts this staleness, and the run prints it at its
end. With --synchronous the server waits for one push from each trainer, averages them, makes one
update, and then answers all. That is the purpose of torch's `async_execution`: a call returns a
future, and no thread of the server waits for it.

Use it if workers differ in speed: a slow one delays no other, except every --log-interval steps,
when all meet to write their metrics. With equal workers an all-reduce is better.

It costs a rank that does not train. And the server's link is the bottleneck: in each step it
receives 4 bytes per weight from each trainer, and sends as many back to each. In a ring all-reduce
each rank sends less than 8 bytes per weight, for any number of ranks.

RPC pickles what it sends, so anyone who can reach its ports can run any code. On one host it
listens at the loopback interface, otherwise at the interface that GLOO_SOCKET_IFNAME names.

With --synchronous and two trainers the weights are bit-equal to those of ddp_train/train.py with
two workers, and with one trainer to single_process.py; with more, only the order of additions
differs from DDP's. Without --synchronous they depend on the order of pushes, and differ from run to
run.
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

from recipe.loop import BEYOND_PLAIN_SGD, Rung
from recipe.record.schema import RungFigures
from recipe.training.state import Trainables

Answer = tuple[int, torch.Tensor]  # number of updates so far, and all weights after them: [n]


# -- On the server ---------------------------------------------------------------------------------
class Server:
    """Holds the weights and their optimizer. An update needs the pushes of `group` trainers."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, trainers: int, group: int) -> None:
        self.weights, self.optimizer = list(model.parameters()), optimizer
        self.trainers, self.group = trainers, group
        self.lock = Lock()  # each call runs in a separate thread
        self.version = 0  # updates so far
        self.staleness: Counter[int] = Counter()  # number of pushes by age of weights, in updates
        self.pushed: dict[int, torch.Tensor] = {}  # gradients for the next update, by trainer
        self.coming: torch.futures.Future = torch.futures.Future()  # the answer after that update

    def answer(self) -> Answer:
        """Return the current weights."""
        return self.version, parameters_to_vector(self.weights).detach()

    def take(
        self, trainer: int, version: int, gradients: torch.Tensor, rate: float
    ) -> torch.futures.Future:
        """Take a trainer's gradients for the next update, and make it when all have arrived."""
        coming = self.coming
        self.staleness[self.version - version] += 1
        self.pushed[trainer] = gradients
        if len(self.pushed) == self.group:
            # Added up in a fixed order, so that the sum has the same bits in each run.
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
    """Create the server from the arguments that a trainer sends."""
    global server
    server = Server(*arguments)


@rpc.functions.async_execution
def push(*arguments: object) -> torch.futures.Future:
    """Return the future of `Server.take`."""
    with server.lock:
        return server.take(*arguments)


def pull() -> tuple[Answer, dict, Counter[int]]:
    """Return the weights, the optimizer's state, and the staleness so far."""
    with server.lock:
        return server.answer(), server.optimizer.state_dict(), server.staleness


# -- On the trainers -------------------------------------------------------------------------------
class Trainer(Rung):
    """The part of a trainer that the server does for it."""

    name, transport, servers = "parameter_server", "TensorPipe", 1
    has_remote_calls = is_for_cpu = True
    lacks = (
        *BEYOND_PLAIN_SGD,
        "weight_check_steps",  # trainers hold weights of different age
    )
    version = 0  # of this trainer's weights

    def distribute(self) -> None:
        """Let rank 0 send the server everything that it needs."""
        self.weights, trainers = list(self.model.parameters()), self.world.size
        if self.world.is_first:
            group = trainers if SYNCHRONOUS in sys.argv else 1
            arguments = (self.model, self.optimizer, trainers, group)
            rpc.rpc_sync(self.server, begin, args=arguments)
        dist.barrier()

    def update(self, rate: float) -> None:
        """Push this step's gradients, and use the weights in the answer."""
        gradients = parameters_to_vector([weight.grad for weight in self.weights])
        arguments = (self.world.rank, self.version, gradients, rate)
        self.take(rpc.rpc_sync(self.server, push, args=arguments))

    def take(self, answer: Answer) -> None:
        """Continue from these weights."""
        self.version, values = answer
        with torch.no_grad():
            torch._foreach_copy_(self.weights, in_shapes_of(values, self.weights))

    def unsharded(self) -> Trainables:
        """Give every trainer the server's weights after all pushes so far."""
        dist.barrier()
        answer, state, self.staleness = rpc.rpc_sync(self.server, pull)
        self.take(answer)
        self.optimizer.load_state_dict(state)
        dist.barrier()  # before any trainer pushes again
        return self

    def measured(self) -> RungFigures:
        """Return the age of the weights for which gradients were pushed, in updates."""
        if not self.staleness:
            return RungFigures()
        updates = sum(age * pushes for age, pushes in self.staleness.items())
        return RungFigures(
            staleness=updates / self.staleness.total(), largest_staleness=max(self.staleness)
        )


main = Trainer.main
