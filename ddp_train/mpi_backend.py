"""DDP over MPI: a backend for torch.distributed, built on mpi4py, since torch's wheels have none.

Import it only after MPI has been prepared (`recipe.rendezvous.start_mpi`): mpi4py initialises MPI.
"""

# torch's stubs have several signatures for each method, of which torch calls only one.
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
SERIAL = 2**15  # torch adds this many elements in the calling thread, for any --threads


def add_halves(values: Any, total: Any, datatype: MPI.Datatype) -> None:
    """Add fp16 values, which MPI cannot do itself. Each sum is rounded to the nearest fp16 value,
    as in Horovod."""
    halves = [torch.frombuffer(memory, dtype=torch.float16) for memory in (values, total)]
    for addend, piece in zip(*(half.split(SERIAL) for half in halves), strict=True):
        piece.add_(addend)


SUM_OF_HALVES = MPI.Op.Create(add_halves, commute=True)


def memory_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's memory as a type that MPI knows: fp16 as 16-bit integers."""
    array = tensor.detach().numpy()
    return array.view(np.uint16) if tensor.dtype == torch.float16 else array


def sum_of(tensor: torch.Tensor) -> MPI.Op:
    """Return the operation that adds up tensors of this type."""
    return SUM_OF_HALVES if tensor.dtype == torch.float16 else MPI.SUM


class Exchange(dist.Work):
    """An operation that was handed to the communicating thread, and may still be running."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self.future = future

    def wait(self, timeout: object = None) -> bool:
        """Wait until it has ended; raise its error. (The trainer's watch ends a hopeless wait.)"""
        self.future.wait()
        return True

    def get_future(self) -> Future[Any]:
        return self.future


class MPIProcessGroup(dist.ProcessGroup):
    """The ranks of MPI's world, for tensors in the CPU's memory.

    A separate thread communicates while the backward pass goes on. It takes operations in the order
    in which they were handed over, which is the same on all ranks. Only the operations that DDP and
    the scripts need are implemented.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, unused-ignore]  # torch 2.11: no store
        self.comm = MPI.COMM_WORLD.Split(key=rank)  # keeps its messages apart from all others
        self.handed_over: SimpleQueue[Future[None] | None] = SimpleQueue()
        self.thread = Thread(target=self._communicate, name="MPI", daemon=True)
        self.thread.start()

    def _communicate(self) -> None:
        for begin in iter(self.handed_over.get, None):
            begin.set_result(None)  # runs the callbacks of this future, in this thread

    def _hand_over(self, exchange: Callable[[], object], result: Sequence[Any]) -> Exchange:
        """Queue `exchange` for the thread; its future becomes `result`, or its error."""

        def run(_: Future[None]) -> Sequence[Any]:
            exchange()
            return result

        begin: Future[None] = Future()
        over = begin.then(run)
        self.handed_over.put(begin)
        return Exchange(over)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Exchange:
        if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
            raise NotImplementedError(f"{opts.reduceOp}: over MPI only sums are implemented")

        def exchange() -> None:
            for tensor in tensors:
                self.comm.Allreduce(MPI.IN_PLACE, memory_of(tensor), sum_of(tensor))

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
            for gathered, sent in zip(outputs, inputs, strict=True):
                rows = torch.empty((self.size(), *sent.shape), dtype=sent.dtype)
                self.comm.Allgather(memory_of(sent.contiguous()), memory_of(rows))
                for tensor, row in zip(gathered, rows, strict=True):
                    tensor.copy_(row)

        return self._hand_over(exchange, outputs)

    def barrier(self, opts: Any) -> Exchange:
        return self._hand_over(self.comm.Barrier, [])

    def shutdown(self) -> None:
        """Finish all operations and end the thread, before Python finalises MPI."""
        self.handed_over.put(None)
        self.thread.join()
        self.comm.Free()

    def getBackendName(self) -> str:  # torch calls this name
        return NAME


def create(store: dist.Store, rank: int, size: int, timeout: object) -> MPIProcessGroup:
    """Create the process group, for torch.distributed. `timeout` is not used: the trainer's watch
    ends a run that hangs."""
    return MPIProcessGroup(store, rank, size)


dist.Backend.register_backend(NAME, create, devices=["cpu"])
