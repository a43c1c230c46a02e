"""The run folder: its name, its lock, and the file by which a run is asked to stop."""

import errno
import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from unittest import mock

import pytest
from making import a_config, a_world, in_ranks

from recipe.errors import UserError
from recipe.files import partial_name, replace_file
from recipe.ranks import Collective, Ranks
from recipe.record import folder as folders
from recipe.record.folder import open_run_folder
from recipe.settings.config import Config


def opened(config: Config, host: str = "here") -> Path:
    """As rank 0 of one, in this process, which then holds the lock until the test run's end."""
    return open_run_folder(config, Ranks(a_world(host=host)), "ddp")


def hold_open(config: Config, host: str, is_open: Event) -> None:
    os.setsid()
    opened(config, host)
    if os.fork() > 0:
        is_open.set()
    signal.pause()


@contextmanager
def another_run(log_dir: Path, name: str, host: str = "here") -> Iterator[BaseProcess]:
    """Another process that has opened a run folder, with a fork that outlives it."""
    context = multiprocessing.get_context("fork")
    config, is_open = a_config(log_dir=str(log_dir), name=name), context.Event()
    process = context.Process(target=hold_open, args=(config, host, is_open))
    process.start()
    try:
        assert is_open.wait(300)
        yield process
    finally:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def test_one_run_at_a_time_and_a_killed_one_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = a_config(log_dir=str(tmp_path), name="run", resume="auto")
    partial = tmp_path / "run/checkpoints/.step-000000010.pt.elsewhere-7.partial"
    partial.parent.mkdir(parents=True)
    with another_run(tmp_path, "run") as other:
        partial.touch()
        (tmp_path / "run/stop").touch()
        before = sorted(path.name for path in tmp_path.rglob("*"))
        holder = rf"process {other.pid} on here since 20\S+Z"
        with pytest.raises(UserError, match=rf"run: another run writes there: {holder}; wait"):
            opened(config)
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
        other.kill()
        other.join()
        assert opened(config) == tmp_path / "run"  # though the fork is still there
        assert not partial.exists()
    # What runs is evaluated all the same, in a folder of its own.
    (tmp_path / "live/checkpoints").mkdir(parents=True)
    (tmp_path / "live/checkpoints/step-000000001.pt").touch()
    (tmp_path / "live/metrics.jsonl").touch()
    with another_run(tmp_path, "live"):
        assert opened(replace(config, name="live", evaluate=True)) == tmp_path / "live"


def test_a_lost_host_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file server frees the lock of a host that is gone only after a while."""
    config = a_config(log_dir=str(tmp_path), name="run")
    with another_run(tmp_path, "run", host="gone") as other:
        monkeypatch.setattr(folders.time, "sleep", lambda seconds: (other.kill(), other.join()))
        assert opened(config) == tmp_path / "run"
        assert "waiting for 120 s, in case that host is lost" in capsys.readouterr().out
    with another_run(tmp_path, "taken", host="gone"):
        monkeypatch.setattr(folders, "LOST_HOST_WAIT_S", -1.0)
        with pytest.raises(UserError, match=r"taken: another run writes .*\d+ on gone"):
            opened(replace(config, name="taken"))


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_locks = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    partial = tmp_path / "run/checkpoints/.step-000000010.pt.elsewhere-7.partial"
    partial.parent.mkdir(parents=True)
    partial.touch()
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    assert opened(a_config(log_dir=str(tmp_path), name="run")) == tmp_path / "run"
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and "has no locks (No locks available); nothing keeps" in told
    assert partial.exists()  # perhaps another run's, which is writing it


def test_names_of_a_job_array_do_not_collide(tmp_path: Path) -> None:
    """Many jobs that start in the same second."""
    config = a_config(log_dir=str(tmp_path / "runs"), arch="vgg11")
    folders = [opened(config) for _ in range(9)]
    assert len(set(folders)) == 9
    assert all("-ddp-vgg11-1w" in folder.name and folder.is_dir() for folder in folders)


@pytest.mark.parametrize("name", [None, "größe 2"])
def test_rank_0_names_the_folder(name: str | None, tmp_path: Path) -> None:
    """Another rank's clock may be past the second's boundary; and its `--name` is not asked."""

    def as_rank(rank: int, sum_over_ranks: Collective) -> Path:
        config = a_config(log_dir=str(tmp_path), name="other" if rank else name)
        return open_run_folder(config, Ranks(a_world(rank, 2), sum_over_ranks), "ddp")

    first, second = in_ranks(2, as_rank)
    assert first == second and name in (None, first.name)


@pytest.mark.parametrize(
    ("made_by", "seconds_ago", "launched_ago", "is_kept"),
    [
        ("", 3600, 0, False),
        ("16\n", 3600, 0, False),  # another job
        ("17\n", 3600, 0, True),  # this job, which was warned before it had started this
        ("", 0, 0, True),  # while the run starts
        ("", 3600, 7200, True),  # for ranks of this run that are lost
        ("", 7200, 3600, False),
    ],
)
def test_a_stop_file_of_an_earlier_run_is_removed(
    made_by: str,
    seconds_ago: int,
    launched_ago: int,
    is_kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    launcher = mock.Mock(**{"create_time.return_value": time.time() - launched_ago})
    monkeypatch.setattr(folders, "nearest_launcher", lambda _: launcher)
    stop = tmp_path / "run/stop"
    stop.parent.mkdir()
    stop.write_text(made_by)
    os.utime(stop, (time.time() - seconds_ago,) * 2)
    opened(a_config(log_dir=str(tmp_path), name="run"))
    assert stop.exists() == is_kept
    assert ("removed " in capsys.readouterr().out) != is_kept


def test_a_mistyped_name_is_not_evaluated(tmp_path: Path) -> None:
    """It would be a random network."""
    config = a_config(log_dir=str(tmp_path), name="typo", resume="auto", evaluate=True)
    with pytest.raises(UserError, match=r"there is no checkpoint in .*typo/checkpoints; check"):
        opened(config)
    assert not (tmp_path / "typo").exists()
    opened(replace(config, weights="file"))  # slurm/job.sh always says --resume auto
    assert (tmp_path / "typo").exists()


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*choose another --log-dir"):
        opened(a_config(log_dir=str(tmp_path / "file"), name="run"))


# ---- files that are there whole or, as before, not at all ----


def test_a_file_is_whole_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    replace_file(path, "old")
    partial_name(path).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == [path.name]
    replace_file(path, "newer")
    assert path.read_text() == "newer" and os.listdir(tmp_path) == [path.name]


def test_a_partial_file_is_this_process_s_own(tmp_path: Path) -> None:
    name = partial_name(tmp_path / "best.pt").name
    assert name.startswith(".best.pt.") and name.endswith(f"-{os.getpid()}.partial")
