"""All ranks of a DDP training call the same collectives in the same order, from the same lines,
with the same shapes, types and roots. If one rank makes one call more or less, a cluster hangs
until its watchdog ends it.

Eight ranks train in one process, in threads that take turns: each computes until it calls a
collective. When all have called the same one, it is carried out with the tensors of all. No two
compute at the same time, so they can share the process's globals.

`ddp_train/train.py`, the recipe and torch's DDP are the real ones. The network is tiny, and the
process group is the one below. The order is the same on GPUs. Not covered: Gloo, NCCL and MPI
themselves; and Horovod, whose ranks may call in any order, since its rank 0 decides by their names
what is sent next.
"""

import itertools
import math
import re
import shutil
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from making import TinyNet, a_world, folder_config, write_images
from torch._C._distributed_c10d import _create_work_from_future, _set_thread_isolation_mode
from torch.futures import Future
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from ddp_train import train
from recipe import session, watch
from recipe.errors import EXIT_SAVED
from recipe.record import fingerprint as environment
from recipe.record import resume
from recipe.record.folder import STOP_FILE
from recipe.settings.config import check
from recipe.start import Hooks
from recipe.training import wire_trial
from recipe.world import World

RANKS = 8
ODD = 5  # the rank that does, or gets, what the others do not
BACKEND = "lockstep"
ROOT = f"{Path(__file__).parents[1]}/"
PRODUCT = f"{ROOT}ddp_train/", f"{ROOT}recipe/"
Tensors = list[torch.Tensor]


@dataclass
class Call:
    """What a rank asks for, or how it ends: words, which must be the same on all ranks; its
    tensors; and what is done when all have asked, with everybody's tensors by rank."""

    words: str
    tensors: Any = None
    exchange: Callable[[list[Any]], None] | None = None


class GivenUp(BaseException):
    """Ends a rank that would wait for the others for ever."""


class RankThread(threading.Thread):
    """One rank. In each of its turns it runs on to the next collective, or to its end."""

    def __init__(self, number: int, main: Callable[[int], object]) -> None:
        super().__init__(daemon=True)
        self.number, self.main = number, main
        self.error: BaseException | None = None
        self.turns: SimpleQueue[bool] = SimpleQueue()
        self.calls: SimpleQueue[Call] = SimpleQueue()
        self.start()

    def run(self) -> None:
        try:
            self._wait()
            end = f"returns {self.main(self.number)}"
        except BaseException as error:
            self.error, end = error, f"raises {type(error).__name__}: {error}"
        if dist.is_initialized():
            dist.destroy_process_group()
        self.calls.put(Call(end))

    def _wait(self) -> None:
        if not self.turns.get():
            raise GivenUp

    def ask(self, call: Call) -> None:
        self.calls.put(call)
        self._wait()

    def take_turn(self) -> Call:
        self.turns.put(True)
        return self.calls.get()


@torch.no_grad()
def in_lockstep(main: Callable[[int], object]) -> list[str]:
    """Run main(rank) on all ranks; what they have asked for, and how they have ended, in words.
    AssertionError where they do not all ask for the same; what they raise if all raise the same."""
    ranks, told = [RankThread(number, main) for number in range(RANKS)], list[str]()
    try:
        while True:
            calls = [rank.take_turn() for rank in ranks]
            words = [call.words for call in calls]
            error = next((rank.error for rank in ranks if rank.error is not None), None)
            if len(set(words)) > 1:
                raise AssertionError(difference(words, told)) from error
            told.append(words[0])
            if calls[0].exchange is None:
                break
            calls[0].exchange([call.tensors for call in calls])
    finally:
        for rank in ranks:
            rank.turns.put(False)
            rank.join(60)
    if error is not None:
        raise error
    return told


def difference(words: list[str], told: list[str]) -> str:
    """Who asks for what, and what came before, on all ranks alike."""
    asking: dict[str, list[int]] = {}
    for rank, own in enumerate(words):
        asking.setdefault(own, []).append(rank)
    lines = [f"ranks {ranks}: {own}" for own, ranks in asking.items()]
    return "\n".join([f"after {len(told)} equal calls:", *lines, "before:", *told[-3:]])


def place() -> str:
    """The lines of the product that ask for something, the innermost first."""
    calls = [(frame.f_code, line) for frame, line in traceback.walk_stack(None)]
    return " < ".join(
        f"{code.co_filename.removeprefix(ROOT)}:{line} {code.co_name}"
        for code, line in calls
        if code.co_filename.startswith(PRODUCT)
    )


class LockstepGroup(dist.ProcessGroup):
    """The ranks, as torch sees them. It has the collectives that DDP and the recipe need; any other
    one is an error of torch's."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: object) -> None:
        super().__init__(rank, size)
        self.own = threading.current_thread()

    def _ask(self, name: str, tensors: Tensors, given: Any, exchange: Any) -> dist.Work:
        forms = [f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in tensors]
        self.own.ask(Call(f"{name} of {', '.join(forms)} at {place()}", given, exchange))
        over: Future[Tensors] = Future()
        over.set_result(tensors)
        return _create_work_from_future(over)

    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        def add(given: list[Tensors]) -> None:
            for addends in zip(*given, strict=True):
                total = torch.stack(addends).sum(dim=0, dtype=addends[0].dtype)
                for addend in addends:
                    addend.copy_(total)

        assert opts.reduceOp == dist.ReduceOp.SUM
        return self._ask("allreduce", tensors, tensors, add)

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        root = opts.rootRank

        def copy_root(given: list[Tensors]) -> None:
            for copies in zip(*given, strict=True):
                for copy in copies:
                    copy.copy_(copies[root])

        return self._ask(f"broadcast from {root}", tensors, tensors, copy_root)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        def collect(given: list[tuple[Tensors, torch.Tensor]]) -> None:
            for gathered, _ in given:
                for row, (_, values) in zip(gathered, given, strict=True):
                    row.copy_(values)

        (own,), (gathered,) = inputs, outputs
        return self._ask("allgather", inputs, (gathered, own), collect)

    def shutdown(self) -> None:
        """There is nothing to end."""

    def getBackendName(self) -> str:  # torch's name for it
        return BACKEND


dist.Backend.register_backend(BACKEND, LockstepGroup, devices=["cpu"])


class OwnClock:
    """Stands in for `time`. No two ranks' clocks run equally fast."""

    def __init__(self) -> None:
        self.readings = Counter[int]()

    def perf_counter(self) -> float:
        rank = dist.get_rank()
        self.readings[rank] += 1
        return self.readings[rank] * (rank + 1) / 4

    monotonic = perf_counter


def in_this_process(world: World, *_: object) -> dict[str, Any]:
    """The arguments of `init_process_group` for ranks that are threads of this process."""
    return {"store": dist.HashStore(), "rank": world.rank, "world_size": world.size}


@pytest.fixture(autouse=True)
def a_process_for_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What each rank has of its own, and what is left as it was."""
    if not hasattr(ThreadLocalWorld, "comms"):  # as in torch 2.11, whose own functions ask for it
        monkeypatch.setattr(ThreadLocalWorld, "comms", [], raising=False)
    monkeypatch.setattr(dist.distributed_c10d, "_world", ThreadLocalWorld())
    _set_thread_isolation_mode(True)  # of the names of process groups
    monkeypatch.setattr(train, "choose_transport", lambda *_: ("Gloo", BACKEND))
    monkeypatch.setattr(train, "rendezvous_arguments", in_this_process)
    monkeypatch.setattr(train, "build_model", lambda _, classes, download: TinyNet(classes))
    monkeypatch.setattr(session, "time", OwnClock())
    monkeypatch.setattr(wire_trial, "ROUNDS", (1, 2))
    monkeypatch.setattr(wire_trial, "gc", mock.Mock())  # eight collections take seconds
    monkeypatch.setattr(environment, "first_line_of", lambda *_: None)  # starts programs
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts one of its own there
    with mock.patch.dict(vars(watch), {"peers": {}, "_signs_of_life": deque()}):
        yield
    _set_thread_isolation_mode(False)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For 8 ranks 3 steps an epoch. The last two ranks get no validation image, and the only batch
    of each other one is short."""
    root = tmp_path_factory.mktemp("images")
    write_images(root / "train", 22)
    write_images(root / "val", 2)
    return root


def training(
    images: Path, root: Path, hooks: Callable[[int], Hooks] = lambda rank: Hooks(), **settings: Any
) -> list[str]:
    """What the ranks of such a training ask for. Rank 0 writes into `root`/run, and a gradient's
    bucket holds one of the weights."""
    config = folder_config(
        images,
        **{
            "log_dir": str(root),
            "name": "run",
            "max_steps": 4,
            "checkpoint_steps": 2,
            "bucket_cap_mb": 1e-6,
            "cuda": False,
            **settings,
        },
    )
    check(config, "ddp", RANKS)
    return in_lockstep(lambda rank: train.main(config, a_world(rank, RANKS), hooks(rank)))


def after_step(act: Callable[[Any, int], object]) -> Callable[[int], Hooks]:
    """Hooks that call act(session, rank) after each step."""
    return lambda rank: Hooks(step_ended=lambda session, model: act(session, rank))


# Settings, and an expression for what the ranks then ask for.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, r"check_same_weights < \S+ keep_checkpoint"),
    "one batch": ({"batch_norm": "sync"}, "batch_norm.py"),
    "averages": ({"batch_norm": "average", "model_ema": True}, r"allreduce of float32 \[8\]"),
    "measured": ({"wire_format": "auto"}, "settle_wire_format"),
    "halves": ({"wire_format": "fp16", "static_graph": True}, "allreduce of float16"),
    "masters": ({"precision": "O2"}, "train_masters"),
    "accumulated": ({"batches_per_allreduce": 2, "clip_grad_norm": 1.0}, "allreduce"),
    "now and then": ({"weight_check_steps": 1}, "check_weights"),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_make_the_same_calls(case: str, images: Path, tmp_path: Path) -> None:
    settings, words = CASES[case]
    calls = training(images, tmp_path, **settings)
    assert calls[-1] == "returns 0" and (tmp_path / "run" / "summary.json").exists()
    assert any(re.search(words, call) for call in calls)


def test_resuming_from_a_checkpoint_that_rank_0_reads(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(images, tmp_path)
    monkeypatch.setattr(resume, "PIECE_BYTES", 4000)
    for settings in ({"max_steps": 6}, {"evaluate": True}):
        calls = training(images, tmp_path, resume="auto", **settings)
        assert sum("broadcast from 0 of int64 [500]" in call for call in calls) > 1
        assert calls[-1] == "returns 0"


def test_a_rollback_after_one_rank_s_loss_was_not_finite(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = train.build_criterion

    def build_odd(config: Any) -> Callable[..., torch.Tensor]:
        criterion, steps = build(config), itertools.count(1)
        diverges_at = 4 if dist.get_rank() == ODD else math.inf
        return lambda *batch: criterion(*batch) * (math.nan if next(steps) == diverges_at else 1)

    monkeypatch.setattr(train, "build_criterion", build_odd)
    calls = training(images, tmp_path, rollback=1)
    assert any("load_on_all_ranks" in call for call in calls)
    assert calls[-1] == "returns 0"


@pytest.mark.parametrize("by", ["signal", "file"])
def test_one_rank_is_asked_to_stop(
    by: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, asked = list[int](), set[int]()
    monkeypatch.setattr(session, "is_asked_to_end", lambda: dist.get_rank() in asked)

    def ask(session: Any, rank: int) -> None:
        steps.append(session.progress.step)
        if by == "signal" and rank == ODD:
            asked.add(rank)
        if by == "file" and rank == 0:
            (session.folder / STOP_FILE).touch()

    calls = training(images, tmp_path, after_step(ask))
    assert calls[-1] == f"returns {EXIT_SAVED if by == 'signal' else 0}"
    assert steps == [step for step in (1, 2, 3) for _ in range(RANKS)], "rank 0's pace counts"


def test_one_rank_meets_a_bad_image(images: Path, tmp_path: Path) -> None:
    root = tmp_path / "images"
    shutil.copytree(images, root)
    (root / "train" / "c" / "20.png").write_bytes(b"no image")
    calls = training(root, tmp_path, bad_images="replace")
    assert any("take_replaced" in call for call in calls)
    assert "20.png" in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda odd: None if odd else total(3), "[5]: returns "),
        (lambda odd: total(3) if odd else None, "[5]: allreduce of float32 [3] at "),
        (lambda odd: total(4 if odd else 3), "[5]: allreduce of float32 [4]"),
        (
            lambda odd: total(3, dtype=torch.float16 if odd else None),
            "[5]: allreduce of float16 [3]",
        ),
        (lambda odd: dist.broadcast(torch.zeros(3), 1 + odd), "[5]: broadcast from 2 of"),
        (lambda odd: 1 / 0 if odd else total(3), "[5]: raises ZeroDivisionError"),
    ],
    ids=["fewer", "more", "shape", "type", "root", "failure"],
)
def test_a_difference_on_one_rank_is_found(ask: Callable[[bool], object], told: str) -> None:
    def main(rank: int) -> None:
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=RANKS)
        total(1)
        ask(rank == ODD)

    with pytest.raises(AssertionError, match="after 1 equal calls") as caught:
        in_lockstep(main)
    assert f"ranks {told}" in str(caught.value)


def total(*shape: int, **others: Any) -> None:
    dist.all_reduce(torch.zeros(shape, **others))
