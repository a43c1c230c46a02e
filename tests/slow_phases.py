"""Runs a trainer with known delays in the phases of its steps: slow_phases.py TRAINER ARGS...

Step 0 is slow in its data, step 1 in forward, step 2 in backward, step 3 in the exchange, step 4 in
the optimizer, and again.
"""

import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import recipe.data.loading

CYCLE = ("data", "forward", "backward", "exchange", "optimizer")
DELAY_SECONDS = 0.2

trainer = sys.argv[1]
step = -1  # counted by the batches that come to the device


def delayed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, slower by DELAY_SECONDS in its steps of the cycle."""

    def slower(*args: Any, **kwargs: Any) -> Any:
        global step
        step += phase == "data"
        if phase == CYCLE[step % len(CYCLE)]:
            time.sleep(DELAY_SECONDS)
        return function(*args, **kwargs)

    return slower


recipe.data.loading.to_device = delayed("data", recipe.data.loading.to_device)
functional.cross_entropy = delayed("forward", functional.cross_entropy)
torch.Tensor.backward = delayed("backward", torch.Tensor.backward)
torch.optim.SGD.step = delayed("optimizer", torch.optim.SGD.step)

if "horovod_train" in trainer:
    import horovod.torch as hvd

    plain = hvd.DistributedOptimizer

    def slow_exchange(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = plain(*args, **kwargs)
        optimizer.synchronize = delayed("exchange", optimizer.synchronize)
        return optimizer

    hvd.DistributedOptimizer = slow_exchange
else:
    from torch.distributed import GradBucket
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    init = DistributedDataParallel.__init__

    def slow_init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        slow_allreduce = delayed("exchange", allreduce_hook)

        def hook(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            return (slow_allreduce if bucket.is_last() else allreduce_hook)(None, bucket)

        self.register_comm_hook(None, hook)

    DistributedDataParallel.__init__ = slow_init

sys.argv = [trainer, *sys.argv[2:]]
runpy.run_path(trainer, run_name="__main__")
