"""DDP over MPI: a backend of torch.distributed made of mpi4py, since torch's wheels have none.

Import it when MPI has been prepared (`recipe.meeting.start_mpi`): mpi4py initialises MPI.
"""

# Of the signatures that torch's stubs have it calls one.
# mypy: disable-error-code="override"

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.futures import Future

NAME = "mpi4py"
SERIAL = 2**15  # elements that torch adds in the calling thread, whatever --threads says


def add_halves(own: Any, total: Any, datatype: MPI.Datatype) -> None:
    """MPI's sum of 16-bit floating-point numbers, which it does not have: each sum is rounded to
    the nearest half, as Horovod's is."""
    halves = [torch.frombuffer(memory, dtype=torch.float16) for memory in (own, total)]
    for addend, piece in zip(*(half.split(SERIAL) for half in halves), strict=True):
        piece.add_(addend)


SUM_OF_HALVES = MPI.Op.Create(add_halves, commute=True)


def memory_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's memory, as numbers that MPI knows: halves as whole numbers of their size."""
    array = tensor.detach().numpy()
    return array.view(np.uint16) if tensor.dtype == torch.float16 else array


class Exchange(dist.Work):
    """What was handed over, and may not be over yet."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self.future = future

    def wait(self, timeout: object = None) -> bool:
        """Wait for its end; raises its error. (The trainer's watch is what ends a wait in vain.)"""
        self.future.wait()
        return True

    def get_future(self) -> Future[Any]:
        return self.future


class MPIProcessGroup(dist.ProcessGroup):
    """The ranks of MPI's world, for tensors in the CPU's memory.

    A thread of its own communicates, while the backward pass goes on: what was handed over first
    comes first, which on all ranks is the same. Has what DDP and the scripts ask for.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch 2.11 takes no store
        self.comm = MPI.COMM_WORLD.Split(key=rank)  # no message of others is taken for one of these
        self.handed_over: SimpleQueue[Future[None] | None] = SimpleQueue()
        self.thread = Thread(target=self._communicate, name="MPI", daemon=True)
        self.thread.start()

    def _communicate(self) -> None:
        for begin in iter(self.handed_over.get, None):
            begin.set_result(None)  # runs what waits for it, in this thread

    def _hand_over(self, exchange: Callable[[], object], result: Sequence[Any]) -> Exchange:
        """Let the thread do it; its future is `result`, or its error."""

        def run(_: Future[None]) -> Sequence[Any]:
            exchange()
            return result

        begin: Future[None] = Future()
        over = begin.then(run)
        self.handed_over.put(begin)
        return Exchange(over)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Exchange:
        if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
            raise NotImplementedError(f"{opts.reduceOp}: over MPI there are only sums here")

        def exchange() -> None:
            for tensor in tensors:
                operation = SUM_OF_HALVES if tensor.dtype == torch.float16 else MPI.SUM
                self.comm.Allreduce(MPI.IN_PLACE, memory_of(tensor), operation)

        return self._hand_over(exchange, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Exchange:
        root = opts.rootRank

        def exchange() -> None:
            for tensor in tensors:
                self.comm.Bcast(memory_of(tensor), root)

        return self._hand_over(exchange, tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Exchange:
        def exchange() -> None:
            for gathered, own in zip(outputs, inputs, strict=True):
                rows = torch.empty((self.size(), *own.shape), dtype=own.dtype)
                self.comm.Allgather(memory_of(own.contiguous()), memory_of(rows))
                for tensor, row in zip(gathered, rows, strict=True):
                    tensor.copy_(row)

        return self._hand_over(exchange, outputs)

    def barrier(self, opts: Any) -> Exchange:
        return self._hand_over(self.comm.Barrier, [])

    def shutdown(self) -> None:
        """End when all that was handed over is done, before Python ends MPI."""
        self.handed_over.put(None)
        self.thread.join()
        self.comm.Free()

    def getBackendName(self) -> str:  # torch's name for it
        return NAME


def create(store: dist.Store, rank: int, size: int, timeout: object) -> MPIProcessGroup:
    """As torch.distributed calls it. Nothing waits for `timeout`: the trainer's watch does."""
    return MPIProcessGroup(store, rank, size)


dist.Backend.register_backend(NAME, create, devices=["cpu"])
