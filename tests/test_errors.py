"""One clear message, from one rank, and an exit code that is not 0."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from making import CPU, a_config, a_world, write_images
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from recipe import errors, watch
from recipe.data.batches import open_data, validation_batches
from recipe.errors import (
    EXIT_LOST_PEER,
    LostPeer,
    UserError,
    fail,
    is_lost_peer,
    limit_reached,
    one_message,
    sentence,
)
from recipe.files import control_groups


@pytest.fixture(autouse=True)
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record waits instead of waiting; os._exit raises SystemExit."""
    waits: list[float] = []
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(errors.time, "sleep", waits.append)
    # Tests that run at the same time count as other jobs.
    monkeypatch.setenv("SLURM_JOB_ID", f"test-{os.getpid()}-{time.time_ns()}")
    return waits


def test_a_rank_without_a_free_descriptor_prints_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the lock, two ranks may print the same error; better than none."""

    def none_is_free(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(errors.socket, "socket", none_is_free)
    assert code_of(lambda: fail(a_world(0, 2), "error: alas")) == 1
    assert capsys.readouterr().err == "error: alas\n"


def test_a_job_s_name_may_hold_any_bytes() -> None:
    assert errors.job_on_host({"TORCHELASTIC_RUN_ID": "gr\udcf6\udcdfe"})


def test_a_message_has_no_control_characters() -> None:
    """They could come from a file's name, or from someone else's record."""
    assert str(UserError("a\x1b[2Jb\u202e\x9b\xe9\udce9\n\tc")) == "a?[2Jb??\xe9\udce9\n\tc"


def code_of(action: Callable[[], object]) -> int:
    with pytest.raises(SystemExit) as ended:
        action()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("rank", "size", "message", "code", "said"),
    [
        (0, 1, "so it is", 1, "so it is\n"),
        (3, 4, "so it is", 5, "[rank 3 on node7] so it is\n"),
        # When one rank ends, the launcher ends all: rank 0 may not have printed its error yet.
        (0, 2, "", 0, ""),
        (1, 2, "", 0, ""),
    ],
)
def test_rank_0_prints_at_once_and_others_later_with_their_rank(
    rank: int,
    size: int,
    message: str,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    sleeps: list[float],
) -> None:
    assert code_of(lambda: fail(a_world(rank, size, host="node7"), message, code)) == code
    assert capsys.readouterr() == ("", said)
    assert (sum(sleeps) >= errors.OTHER_RANK_DELAY_S) == any(sleeps) == (rank > 0)


def test_torchrun_prints_the_message_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert code_of(lambda: fail(a_world(0, 1), "two\nlines", 3)) == 3
    failure = ProcessFailure(0, 7, 3, str(tmp_path / "error.json"))
    assert "traceback : two\n  lines" in str(ChildFailedError("train.py", {0: failure}))


WRAPPED = (  # by a DataLoader's worker
    "Caught UserError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
    "last):\n  File x\nOSError: no\n\nrecipe.errors.UserError: two\nlines\n"
)


def raising(error: BaseException, rank: int = 0, size: int = 1) -> Callable[[], None]:
    def body() -> None:
        with one_message(a_world(rank, size, host="node7")):
            raise error

    return body


NOT_DETERMINISTIC = (  # as ATen's alertNotDeterministic writes it
    "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you "
    "set 'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for ..."
)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("--epochs 0: must be at least 1"), 1, r"error: --epochs 0: must be at least 1"),
        (UserError(WRAPPED), 1, "error: two\nlines"),
        (KeyboardInterrupt(), 130, r"interrupted: `--resume auto` .*"),
        (
            RuntimeError(NOT_DETERMINISTIC),
            1,
            "error: --deterministic: adaptive_avg_pool2d_backward_cuda does not have a "
            "deterministic implementation; choose another --arch, or leave it out",
        ),
        # Limits of the system: raised here, in a loader worker, by torch and by multiprocessing.
        *(
            (
                error,
                1,
                rf"error: {said}: the limit here is \d+ {what} .*, and a rank has .*; raise .*",
            )
            for error, said, what in (
                (
                    OSError(errno.EMFILE, "Too many open files"),
                    r"\[Errno 24\] Too .*",
                    "open files",
                ),
                (RuntimeError("received 0 items of ancdata"), "received .*", "open files"),
                (
                    OSError(
                        "Caught OSError in worker 0.\nOSError: [Errno 24] Too many open files\n"
                    ),
                    "OSError.*files",
                    "open files",
                ),
                (
                    RuntimeError("[gloo/transport/tcp/pair.cc:1] socket: Too many open files"),
                    ".*files",
                    "open files",
                ),
                (RuntimeError("can't start new thread"), "can't .*", "processes and threads"),
                (
                    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
                    r"\[Errno 11\] .*",
                    "processes and threads",
                ),
                (EOFError("unexpected EOF"), "unexpected EOF", "processes and threads"),
            )
        ),
        # The same words from a transport are no limit of this user.
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:9] read: Resource temporarily unavailable"),
            EXIT_LOST_PEER,
            r"(?s)Traceback .*pair.cc.*\n",
        ),
        (RuntimeError("x"), 1, r"(?s)Traceback .*test_errors.py.*RuntimeError: x\n"),
        *(
            (error, 1, rf"error: memory ran out: {words}; give a smaller --batch-size, .*")
            for error, words in (
                (MemoryError(), "MemoryError: the limit here is .* GiB of a process .ulimit -v."),
                (
                    RuntimeError(
                        "Caught MemoryError in worker 0.\nMemoryError: Unable to allocate 9"
                    ),
                    "MemoryError: Unable to allocate 9: the limit here is .* GiB of a process.*",
                ),
                (
                    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas`"),
                    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas`",
                ),
                (
                    RuntimeError("[x] can't allocate memory: you tried to allocate 9 bytes. [y]"),
                    "you tried to allocate 9 bytes: the limit here is .*",
                ),
                (
                    torch.OutOfMemoryError(
                        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total "
                        "capacity of 79.1 GiB of which 1 MiB is free. Including non-PyTorch"
                    ),
                    "CUDA .* GPU 0 has a total capacity of 79.1 GiB of which 1 MiB is free",
                ),
                (
                    RuntimeError("NCCL error\nCuda failure 2 'out of memory'\nmore"),
                    "Cuda failure 2 'out of memory'",
                ),
            )
        ),
    ],
)
def test_messages_and_exit_codes(
    error: BaseException,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors.resource, "getrlimit", lambda limit: (40, 40))
    assert code_of(raising(error)) == code
    assert re.fullmatch(said + "\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("membership", "file", "said"),
    [
        (
            "0::/job\n",
            "memory.max",
            "2 GiB of this container or job (its control group's memory.max)",
        ),
        ("4:memory:/job\n", "memory/job/memory.limit_in_bytes", "2 GiB of this container"),
        ("0::/job\n", "other", "GiB of this host"),
        ("0::/job\n", "job/pids.max", "is 7 processes and threads of this container or job"),
        (
            "5:pids:/job\n",
            "pids/pids.max",
            "(its control group's pids.max), and a rank has about 30",
        ),
    ],
)
def test_a_container_s_limits_are_in_the_message(
    membership: str, file: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "membership").write_text(membership)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("7\n" if "pids" in file else f"{2**31}\n")
    places = {"membership": tmp_path / "membership", "root": tmp_path}
    monkeypatch.setattr(errors, "control_groups", partial(control_groups, **places))
    monkeypatch.setattr(errors.resource, "getrlimit", lambda limit: (resource.RLIM_INFINITY,) * 2)
    thread = limit_reached(RuntimeError("can't start new thread"))
    assert said in (thread if "pids" in file else limit_reached(MemoryError()))


class HorovodInternalError(RuntimeError):
    """Has the name of Horovod's error."""


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"), True),
        (
            RuntimeError("[c10d/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting"),
            True,
        ),
        # This one is about this host itself.
        (RuntimeError("[gloo/transport/tcp/device.cc:84] Unable to find address for: eth9"), False),
        (RuntimeError("eof (this error originated at tensorpipe/transport/uv/x.cc:2)"), True),
        (RuntimeError("Application timeout: Connection reset by peer"), True),
        (HorovodInternalError("anything"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("Connection closed by peer"), False),
        (UserError("Connection refused"), False),
    ],
)
def test_lost_peer(error: Exception, lost: bool, sleeps: list[float]) -> None:
    assert is_lost_peer(error) == lost
    assert code_of(raising(error)) == (EXIT_LOST_PEER if lost else 1)
    assert (
        round(sum(sleeps)) == lost * errors.LOST_PEER_DELAY_S
    )  # the rank that failed speaks first


@pytest.mark.parametrize("error", [RuntimeError("ncclSystemError: no space"), LostPeer()])
@pytest.mark.parametrize("is_asked", [False, True])
def test_a_rank_under_watch_speaks_unless_another_was_lost(
    error: Exception,
    is_asked: bool,
    sleeps: list[float],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors.marks, "is_watched", True)
    monkeypatch.setattr(errors.marks, "is_asked", is_asked)
    assert code_of(raising(error)) == EXIT_LOST_PEER
    assert (type(error).__name__ in capsys.readouterr().err) != is_asked
    assert round(sum(sleeps)) == (0 if is_asked else errors.LOST_PEER_DELAY_S)


def test_corrupt_image_in_a_loader_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's error arrives as a whole traceback. Users see only its last sentence."""
    monkeypatch.undo()  # the loader's own exits and sleeps are real
    root = write_images(tmp_path / "images", 1, "ab")
    config = a_config(train_dir=str(root), val_dir=str(root), cache_dir=str(tmp_path / "cache"))
    data, image = open_data(config), root / "b" / "0.png"
    image.write_bytes(b"no image")
    with pytest.raises(UserError) as raised:
        list(validation_batches(data, config, a_world(), CPU, workers=1))
    assert "Traceback" in str(raised.value)  # else torch has changed, and `sentence` may go
    assert re.fullmatch(f"{image}.*", sentence(raised.value))


@pytest.mark.parametrize(
    ("launcher", "seconds"), [("none", 60), ("srun", 60), ("torchrun", 30), ("mpirun", 1)]
)
def test_a_checkpoint_may_take_as_long_as_the_launcher_waits(
    launcher: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(
        errors.concurrent.futures, "wait", lambda futures, seconds: waits.append(seconds)
    )
    monkeypatch.setattr(watch, "_asked", None)
    monkeypatch.setattr(watch, "_obeys", False)
    rank = a_world(1, 2, launcher=launcher)
    assert code_of(lambda: watch._receive(rank, signal.SIGTERM)) == 128 + signal.SIGTERM
    assert seconds / 2 < waits[0] <= seconds


def test_the_process_really_ends() -> None:
    """Its output is flushed, and no exit handler runs: those of MPI and Horovod would wait for the
    other ranks."""
    code = (
        "import atexit, threading, time; from recipe.errors import UserError, one_message\n"
        "from recipe.command import prepare_output; from recipe.world import World\n"
        "prepare_output()\n"  # what all commands begin with: a line is written at once
        "atexit.register(print, 'exit handler'); threading.Thread(target=time.sleep, args=[900])"
        ".start()\n"
        "print('output')\n"
        "with one_message(World(0, 1, 0, 1, 'none', 'here')): raise UserError('sorry')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (1, "output\n", "error: sorry\n")


def test_after_ctrl_c_another_tool_has_time_to_end_what_it_started(tmp_path: Path) -> None:
    cleaned = tmp_path / "cleaned"
    slow = (
        "import pathlib, time\n"
        "print('runs', flush=True)\n"
        "try: time.sleep(900)\n"
        f"except KeyboardInterrupt: time.sleep(1); pathlib.Path({str(cleaned)!r}).touch()"
    )
    code = (
        "import sys; from recipe.command import run_main, run_other_tool\n"
        f"sys.exit(run_main('outer', lambda _: run_other_tool([sys.executable, '-c', {slow!r}])))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as outer:
        assert outer.stdout
        assert outer.stdout.readline() == b"runs\n"
        os.killpg(outer.pid, signal.SIGINT)
        assert outer.wait(timeout=600) == 130
    assert cleaned.exists()
