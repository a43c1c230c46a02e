"""A hybrid: the network's trunk is trained by DDP, its last layer lives on a parameter server.

    torchrun --nproc-per-node 3 baselines/ddp_with_rpc.py

The last rank is the server, the others are trainers. A trainer computes the features of its images,
and calls the server for the last layer's output by RPC. Distributed autograd notes the call, and
its backward pass goes through the server and back: there it leaves the layer's gradient, here DDP
averages the trunk's among the trainers as usual. At the end of a step the server has one gradient
of each trainer. It averages them too, and makes one update.

Use it where one layer is too large for each worker and most of its values are of no use to a batch:
the embeddings of recommender systems and language models, or a classifier of millions of classes.
The features travel instead of that layer's gradients.

It costs a rank that does not train, and a trainer waits for the server in the middle of each step.
For a layer as small as ImageNet's classifier plain DDP is faster.

RPC pickles what it sends, so whoever reaches its ports can run any code. It listens at the loopback
interface on one host, and else at the one that GLOO_SOCKET_IFNAME names.

With two trainers the weights are bit-equal to those of ddp_train/train.py with two workers, and
with one to single_process.py. With more, only the order of additions in the last layer is another.
"""

from recipe.errors import UserError
from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__)

import copy
from collections.abc import Callable
from contextlib import ExitStack
from threading import Lock

import torch
from torch import nn
from torch.distributed import autograd, rpc
from torch.nn.parallel import DistributedDataParallel

from recipe.loop import Rung
from recipe.training.metrics import Sums, batch_sums
from recipe.training.model import build_optimizer
from recipe.training.state import Trainables


# -- On the server ---------------------------------------------------------------------------------
class HeadServer:
    """The last layer, and what changes it."""

    def __init__(self, head: nn.Linear, optimizer: torch.optim.Optimizer, trainers: int) -> None:
        self.head, self.optimizer, self.trainers = head, optimizer, trainers
        self.lock = Lock()  # each call comes in a thread of its own
        self.contexts: dict[int, int] = {}  # of this step, by trainer: where their gradients are
        self.done: torch.futures.Future = torch.futures.Future()  # when the step is

    def take(self, trainer: int, context: int, rate: float) -> torch.futures.Future:
        """Note where a trainer's gradients are, and make the update if all trainers' are there."""
        self.contexts[trainer] = context
        done = self.done
        if len(self.contexts) == self.trainers:
            # In one order, whoever came first: the sum has the same bits in each run.
            gradients = [autograd.get_gradients(self.contexts[n]) for n in range(self.trainers)]
            for weight in self.head.parameters():
                weight.grad = sum(of_one[weight] / self.trainers for of_one in gradients)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.contexts.clear()
            self.done = torch.futures.Future()
            done.set_result(None)
        return done


def begin(*arguments: object) -> None:
    """Become the server of what a trainer sends."""
    global server
    server = HeadServer(*arguments)


def classify(features: torch.Tensor) -> torch.Tensor:
    """The last layer's output [N, classes]."""
    return server.head(features)


@rpc.functions.async_execution
def update_head(*arguments: object) -> torch.futures.Future:
    """Done when `HeadServer.take` has a call of each trainer."""
    with server.lock:
        return server.take(*arguments)


def head_and_optimizer() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A copy of the last layer and its momentum, for whoever asks by RPC."""
    return server.head, server.optimizer


# -- On the trainers -------------------------------------------------------------------------------
class TrunkTrainer(Rung):
    """What a trainer does together with the server."""

    name, servers, has_remote_calls, is_for_cpu = "ddp_with_rpc", 1, True, True
    lacks = (
        "optimizer", "precision", "loss_scale", "clip_grad_norm", "model_ema",
        "batches_per_allreduce", "compile",
    )  # fmt: skip

    def distribute(self) -> None:
        """Send the last layer to the server; let DDP train the others."""
        model, state = self.model, self.optimizer.state
        if not isinstance(getattr(model, "fc", None), nn.Linear):
            raise UserError(
                f"--arch {self.config.arch}: this script takes a network's layer `fc` apart, which "
                "it lacks; choose a resnet, regnet or shufflenet"
            )
        if self.world.is_first:
            optimizer = build_optimizer(model.fc, self.config)
            optimizer.state.update((w, state[w]) for w in model.fc.parameters() if w in state)
            rpc.rpc_sync(self.server, begin, args=(model.fc, optimizer, self.world.size))
        self.step = ExitStack()
        trunk = copy.copy(model)  # of the same layers
        trunk._modules = {**model._modules, "fc": nn.Identity()}
        self.weights = list(trunk.parameters())
        self.network = DistributedDataParallel(trunk)
        # BatchNorm's statistics travel as --batch-norm says.
        self.network.broadcast_buffers = False

    def forward_backward(
        self, images: torch.Tensor, targets: torch.Tensor, sync_gradients: bool, lap: Callable
    ) -> Sums:
        """The trunk here, the last layer there, and back; gradients stay in the step's context."""
        self.context = self.step.enter_context(autograd.context())
        outputs = rpc.rpc_sync(self.server, classify, args=(self.network(images),))
        loss = self.criterion(outputs, targets)
        sums = batch_sums(outputs, targets, loss)
        lap("forward")
        autograd.backward(self.context, [loss])
        return sums

    def update(self, rate: float) -> None:
        """Update the trunk here while the server updates the last layer."""
        with self.step:  # at its end all forget the context
            arguments = (self.world.rank, self.context, rate)
            done = rpc.rpc_async(self.server, update_head, args=arguments)
            gradients = autograd.get_gradients(self.context)
            for weight in self.weights:
                weight.grad = gradients[weight]
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()  # without the last layer, which has no gradient here
            done.wait()

    def whole(self) -> Trainables:
        """The network with the server's last layer, and its momentum."""
        head, optimizer = rpc.rpc_sync(self.server, head_and_optimizer)
        for mine, theirs in zip(self.model.fc.parameters(), head.parameters(), strict=True):
            mine.data.copy_(theirs.data)
            self.optimizer.state[mine] = optimizer.state[theirs]
        return self


main = TrunkTrainer.main
