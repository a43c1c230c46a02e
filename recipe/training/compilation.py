"""--compile: torch.compile for the network, in parts that hand over their gradients in turn."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from recipe.watch import expect_delay

# The last part of the network, whose gradients come first, is small, so that the exchange starts
# early. These are the sizes of DDP's buckets, unless a flag changes them.
LAST_PART_BYTES, PART_BYTES = 2**20, 25 * 2**20
# More versions than any training needs: one for each size of images and of batches, in training and
# in evaluation. Beyond torch's limit (8) the rest of a training would run without compilation.
MOST_VERSIONS = 1000


def compile_network(model: nn.Module, workers: int) -> None:
    """Have torch.compile compile `model`, in place, at its first forward pass with each size of
    images. Weights, their names, hooks of the whole network and copies (by deepcopy) work as
    before; copies share what is compiled.

    A compiled graph returns all gradients at the end of its backward pass, so none of their
    exchange could overlap with it. Therefore several workers compile the network in parts. torch
    cuts where it does for DDP itself: backwards from the outputs, after every `PART_BYTES` of
    weights. Both engines get the same parts. A single worker compiles it as a whole, which takes
    the host less time per step.
    """
    from torch._dynamo import config, lookup_backend  # here: these imports are slow
    from torch._dynamo.backends.distributed import DDPOptimizer

    config.optimize_ddp = False  # under DDP torch would cut the parts again
    config.recompile_limit = config.accumulated_recompile_limit = MOST_VERSIONS
    compile_graph: Callable[..., Any] = lookup_backend("inductor")
    if workers > 1:
        compile_graph = DDPOptimizer(PART_BYTES, compile_graph, LAST_PART_BYTES).compile_fn

    def announce_and_compile(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        expect_delay()  # half a minute or more
        return compile_graph(graph, inputs)

    # Not dynamic: a second size would make sizes symbolic, and kernels slower.
    forward = torch.compile(type(model).forward, backend=announce_and_compile, dynamic=False)
    # Not `model.compile()`: this would also trace the hooks of the whole network, which may count
    # steps or read a clock. And not a plain function: a copy would run this network.
    model.forward = MethodType(forward, model)
