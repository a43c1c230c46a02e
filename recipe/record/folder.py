"""The run folder: its name, and the lock that lets one run at a time write into it.

Rank 0 holds a lock on the folder's file `lock` as long as its process lives. The kernel releases it
when the process ends, however it ends. The file itself stays and means nothing.

The lock works between hosts if their file system passes locks on: NFS and CephFS do, and Lustre if
mounted with `flock`. Lustre with `localflock`, and BeeGFS by default, hold it within one host only.
If a file system has no locks at all, the run says so and continues.
"""

import errno
import fcntl
import json
import os
import time
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

from msgspec import convert

from recipe.ancestors import nearest_launcher
from recipe.errors import UserError, system_errors
from recipe.ranks import Ranks
from recipe.record.schema import METRICS
from recipe.settings.config import Config
from recipe.world import World

LOCK_FILE = "lock"
# A person, or a batch script that was warned of its end, creates this file to make the run save a
# checkpoint and end. The run then removes it. It is a file, because no signal passes through all
# launchers: torchrun and horovodrun die of the signals that srun and mpirun pass on.
STOP_FILE = "stop"
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
# The server of a shared file system releases a lost host's lock within this time (NFS: 90 s). A run
# that resumes on another host after such a loss waits for that.
LOST_HOST_WAIT_S = 120.0


def open_run_folder(config: Config, ranks: Ranks, engine: str) -> Path:
    """Create and return this run's folder, which rank 0 names for all ranks. It is locked until
    rank 0's process ends.

    The folder of a training that --evaluate looks at is left as it is, and may be in use. UserError
    if another run writes there, if nothing can be written, or if there is nothing to evaluate.
    """
    name = _claim(config, ranks.world, engine).name if ranks.world.is_first else ""
    return Path(config.log_dir, ranks.gather(name)[0])


def _claim(config: Config, world: World, engine: str) -> Path:
    arch = config.arch.replace(":", "-")  # of timm:NAME
    default = f"{datetime.now():%Y%m%d-%H%M%S}-{engine}-{arch}-{world.size}w"
    folder = Path(config.log_dir, config.name or default)
    checkpoints = folder / "checkpoints"
    has_weights = config.weights or config.pretrained or any(checkpoints.glob("step-*.pt"))
    if config.evaluate and config.resume == "auto" and not has_weights:  # of a random network
        raise UserError(
            f"--evaluate --resume auto: there is no checkpoint in {checkpoints}; check --name and "
            "--log-dir"
        )
    if config.evaluate and (folder / "metrics.jsonl").exists():
        return folder
    with one_sentence(folder):
        if config.name is None:
            folder = new_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if _lock(folder, world):
            for left_by_a_killed_run in checkpoints.glob(".*.partial"):
                left_by_a_killed_run.unlink()
        _remove_stale_stop_file(folder, world)
    return folder


def one_sentence(folder: Path) -> AbstractContextManager[None]:
    """Turn the error of a full or broken disk into a UserError that names the file, or else the
    run's folder."""
    remedy = "Mend it (on a full disk make room), or choose another --log-dir"
    return system_errors(folder, "the run cannot be written there", remedy)


def record_in(line: str) -> Any:
    """Return the record in a line of metrics.jsonl, a StepLine or another of METRICS; None if the
    line is damaged."""
    try:
        values = json.loads(line)
        return convert(values, METRICS[values["kind"]])
    except (ValueError, LookupError, TypeError):
        return None


def lines_in(run_folder: Path) -> list[str]:
    """Return the complete lines of a run's metrics.jsonl, if it has one. A run that was killed may
    have begun another line."""
    metrics = run_folder / "metrics.jsonl"
    text = metrics.read_bytes().decode(errors="replace") if metrics.exists() else ""
    return text.split("\n")[:-1]


def records(run_folder: Path, kind: str) -> list[Any]:
    """Return the records of one kind in the folder's metrics.jsonl, in their order."""
    begin = json.dumps({"kind": kind})[:-1]  # parse only these: a long run has mostly step lines
    lines = [line for line in lines_in(run_folder) if line.startswith(begin)]
    return [record for line in lines if (record := record_in(line))]


def new_folder(path: Path) -> Path:
    """Create and return the folder `path`, or `path`-2, -3, ... if that exists. Several callers at
    once each get a folder of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def _lock(folder: Path, world: World) -> bool:
    """Take the lock, and write its holder into the file. The file is never closed, so that the
    process's end releases the lock. Return False if the file system has no locks."""
    path, started, is_held = folder / LOCK_FILE, time.monotonic(), False
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    while not is_held:
        try:
            # This lock is this process's alone. Its forks (loader workers) would share a `flock`.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        except (BlockingIOError, PermissionError):
            holder, waited = os.fsdecode(path.read_bytes()).strip(), time.monotonic() - started
            message = f"{folder}: another run writes there: {holder}"
            if f" on {world.host} " in holder or waited > LOST_HOST_WAIT_S:
                raise UserError(f"{message}; wait for its end, or choose another --name") from None
            if waited < 1:
                print(
                    f"{message}; waiting for {LOST_HOST_WAIT_S:.0f} s, in case that host is lost",
                    flush=True,
                )
            time.sleep(1)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            print(
                f"warning: {folder}: this file system has no locks ({error.strerror}); nothing "
                "keeps a second run with this --name from damaging this one",
                flush=True,
            )
            break
    os.ftruncate(file, 0)
    os.pwrite(file, os.fsencode(f"process {os.getpid()} on {world.host} since {utc_now()}\n"), 0)
    os.fsync(file)
    return is_held


def _remove_stale_stop_file(folder: Path, world: World) -> None:
    """Remove a stop file that was meant for an earlier run, which ended without obeying it.

    Keep one that was made after this run's launcher started: an earlier rank of the same launch may
    have been lost before it saw the file. Times are those of the file system's clock, which has
    just dated the lock. Keep also one in which slurm/job.sh wrote this job's number before the
    launcher started.
    """
    path = folder / STOP_FILE
    try:
        made, words = path.stat().st_mtime, path.read_text(errors="replace").split()
    except FileNotFoundError:
        return
    age = time.time() - nearest_launcher(world).create_time()
    is_of_this_job = bool(words) and words == [os.environ.get("SLURM_JOB_ID")]
    if made < (folder / LOCK_FILE).stat().st_mtime - age and not is_of_this_job:
        path.unlink()
        print(f"removed {path}, which was made before this run was launched", flush=True)


def utc_now() -> str:
    """Return the time, such as 2026-01-31T12:00:00Z."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
