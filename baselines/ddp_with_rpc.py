"""A hybrid: DDP trains the network's trunk, and its last layer is on a parameter server.

    torchrun --nproc-per-node 3 baselines/ddp_with_rpc.py

The last rank is the server, the others are trainers. A trainer computes the features of its images,
and gets the last layer's output from the server by RPC. Distributed autograd records the call, and
its backward pass goes through the server and back: the gradient of the last layer stays on the
server, and DDP averages the trunk's gradients among the trainers as usual. At the end of a step the
server has one gradient from each trainer. It averages them and makes one update, for which all
trainers wait.

Use it if one layer is too large for a worker, and a batch needs only a few of its values: the
embeddings of recommender systems and language models, or a classifier with millions of classes.
Features are sent instead of that layer's gradients.

It costs a rank that does not train, and a trainer waits for the server in the middle of each step.
For a layer as small as ImageNet's classifier plain DDP is faster.

RPC pickles what it sends, so anyone who can reach its ports can run any code. On one host it
listens at the loopback interface, otherwise at the interface that GLOO_SOCKET_IFNAME names.

With two trainers the weights are bit-equal to those of ddp_train/train.py with two workers, and
with one to single_process.py. With more, only the order of additions in the last layer differs.
"""

from recipe.errors import UserError
from recipe.start import run_script

if __name__ == "__main__":  # before torch is loaded
    run_script(__file__)

import copy
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import autograd, rpc
from torch.nn.parallel import DistributedDataParallel

from recipe.loop import BEYOND_PLAIN_SGD, Rung
from recipe.training.metrics import Sums, batch_sums
from recipe.training.model import build_optimizer
from recipe.training.state import Trainables


# -- On the server ---------------------------------------------------------------------------------
def begin(*kept: object) -> None:
    """Take the last layer and its optimizer, which a trainer sends."""
    global head, optimizer
    head, optimizer = kept


def classify(features: torch.Tensor) -> torch.Tensor:
    """Return the last layer's output [N, classes]."""
    return head(features)


def update_head(contexts: list[int], rate: float) -> None:
    """Make one update by the mean of the gradients in the trainers' contexts of this step."""
    # Added up in a fixed order, so that the sum has the same bits in each run.
    gradients = [autograd.get_gradients(context) for context in contexts]
    for weight in head.parameters():
        weight.grad = sum(gradient[weight] / len(contexts) for gradient in gradients)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def head_and_optimizer() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """Return the last layer and its optimizer; RPC sends the caller a copy."""
    return head, optimizer


# -- On the trainers -------------------------------------------------------------------------------
class TrunkTrainer(Rung):
    """The part of a trainer that involves the server."""

    name, servers, has_remote_calls, is_for_cpu = "ddp_with_rpc", 1, True, True
    lacks = (
        *BEYOND_PLAIN_SGD,
        "batches_per_allreduce",
        "compile",
    )

    def distribute(self) -> None:
        """Send the last layer to the server; DDP trains the other layers."""
        model, state = self.model, self.optimizer.state
        if not isinstance(getattr(model, "fc", None), nn.Linear):
            raise UserError(
                f"--arch {self.config.arch}: this script needs a network whose last layer is `fc`; "
                "choose a resnet, regnet or shufflenet"
            )
        if self.world.is_first:
            optimizer = build_optimizer(model.fc, self.config)
            optimizer.state.update((w, state[w]) for w in model.fc.parameters() if w in state)
            rpc.rpc_sync(self.server, begin, args=(model.fc, optimizer))
        self.step = ExitStack()
        trunk = copy.copy(model)  # shares the model's layers
        trunk._modules = {**model._modules, "fc": nn.Identity()}
        self.weights = list(trunk.parameters())
        # BatchNorm's statistics are exchanged by --batch-norm.
        self.network = DistributedDataParallel(trunk, broadcast_buffers=False)

    def forward_backward(
        self, images: torch.Tensor, targets: torch.Tensor, sync_gradients: bool, lap: Callable
    ) -> Sums:
        """Run the trunk here and the last layer on the server, forward and backward. The gradients
        stay in the step's context."""
        self.context = self.step.enter_context(autograd.context())
        outputs = rpc.rpc_sync(self.server, classify, args=(self.network(images),))
        loss = self.criterion(outputs, targets)
        sums = batch_sums(outputs, targets, loss)
        lap("forward")
        autograd.backward(self.context, [loss])
        return sums

    def update(self, rate: float) -> None:
        """Update the trunk here while the server updates the last layer."""
        with self.step:  # at its end all ranks discard the context
            contexts = self.ranks.gather(self.context)
            if self.world.is_first:
                done = rpc.rpc_async(self.server, update_head, args=(contexts, rate))
            gradients = autograd.get_gradients(self.context)
            for weight in self.weights:
                weight.grad = gradients[weight]
            self.optimizer.step()  # skips the last layer, which has no gradient here
            if self.world.is_first:
                done.wait()
            dist.barrier()  # before any trainer uses the updated last layer

    def unsharded(self) -> Trainables:
        """Return the network with the server's last layer and momentum."""
        head, optimizer = rpc.rpc_sync(self.server, head_and_optimizer)
        for mine, theirs in zip(self.model.fc.parameters(), head.parameters(), strict=True):
            mine.data.copy_(theirs.data)
            self.optimizer.state[mine] = optimizer.state[theirs]
        return self


main = TrunkTrainer.main
