"""Trainings on hosts that come and go, and which images each of their steps used."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from launching import ROOT, SMALL, TRAINERS

from recipe.record.folder import records

# As a sitecustomize: each rank records the images of each step as it reads them, and to which
# start of the run it belongs. (Without loader workers it reads them when it needs them.) It sleeps
# in each step, so that few steps pass while the tests wait for the launcher.
AUDIT = """
import builtins, json, os, sys, time
real_import = builtins.__import__
def patched(name, *args, **kwargs):
    imported = real_import(name, *args, **kwargs)
    if name == "recipe.session" and builtins.__import__ is patched:
        builtins.__import__ = real_import
        audit(sys.modules[name].Session)
    return imported
def audit(kind):
    from recipe.data.loading import Images
    from recipe.data.images import TrainTransform
    sessions, real_read, real_init = [], Images.__getitems__, kind.__init__
    def init(self, *words, **named):
        sessions.append(self)
        real_init(self, *words, **named)
    def read(self, batch):
        if isinstance(self.transform, TrainTransform):
            own = sessions[0]
            world = own.ranks.world
            start = own.reader.first_step, world.size
            rank, pid, (_, keys) = world.rank, os.getpid(), batch
            line = [own.progress.step + 1, time.time(), start, rank, pid, keys]
            with open("{folder}/audit-%d.jsonl" % os.getpid(), "a") as file:
                file.write(json.dumps(line) + chr(10))
            time.sleep(0.05)
        return real_read(self, batch)
    Images.__getitems__, kind.__init__ = read, init
builtins.__import__ = patched
"""


LOG_INTERVAL = 5  # steps


def audited(folder: Path) -> dict[str, str]:
    """The environment in which ranks record what they read, in this folder."""
    (folder / "sitecustomize.py").write_text(AUDIT.replace("{folder}", str(folder)))
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def check_audit(folder: Path, num_images: int = 1438) -> None:
    """In the steps that count, the ranks have read each image once per epoch."""
    lines = defaultdict[int, list[list[Any]]](list)  # by step
    for path in folder.glob("audit-*.jsonl"):
        for step, *others in map(json.loads, path.read_text().splitlines()):
            lines[step].append(others)
    epochs = defaultdict[int, list[int]](list)
    # By start and rank: of two starts at the same step the second counts.
    last: dict[str, int] = {}
    for _, start, rank, pid, _ in sorted(line for own in lines.values() for line in own):
        last[f"{start} {rank}"] = pid
    recorded = {step["step"]: images_of(step) for step in steps_in(folder)}
    for step in range(1, max(recorded) + 1):
        own = sorted(lines[step])  # by time: if a step was repeated, the last one counts
        start = own[-1][1]
        ranks = {
            rank: keys
            for _, its, rank, pid, keys in own
            if its == start and pid == last[f"{start} {rank}"]
        }
        assert [*sorted(ranks)] == [*range(start[1])], step
        assert sum(map(len, ranks.values())) == recorded.get(step, 12 * start[1]), step
        for epoch, index in (key for keys in ranks.values() for key in keys):
            epochs[epoch].append(index)
    assert len(epochs) > 1, "no epoch has ended"
    for epoch, indices in epochs.items():
        assert len(set(indices)) == len(indices), f"images come twice in epoch {epoch}"
        assert epoch == max(epochs) or len(indices) == num_images, f"images lack in epoch {epoch}"


def command(folder: Path, flags: str = "", interface: str = "lo", more: str = "") -> list[str]:
    """Train without an end, in this folder, with ranks where its file `slots` says."""
    launcher = f"horovodrun -np 2 --min-np 1 --max-np 3 --network-interfaces {interface} {more}"
    words = f"{SMALL.partition('--max-steps')[0]} --epochs 100000 --log-interval {LOG_INTERVAL}"
    place = f"--log-dir {folder.parent} --name {folder.name} --resume auto"
    return [
        *launcher.split(),
        "--host-discovery-script",
        f"cat {folder}/slots",
        sys.executable,
        TRAINERS["horovod"],
        *f"{words} {place} {flags}".split(),
    ]


def write_slots(folder: Path, text: str) -> None:
    """Replace the file `slots` atomically, since it is read each second."""
    new = folder / "slots.new"
    new.write_text(f"{text}\n")
    new.replace(folder / "slots")


def ranks_among(processes: Iterable[psutil.Process]) -> dict[int, psutil.Process]:
    """The processes that train, by their rank: each is the child of its watcher."""
    found = {}
    for process in processes:
        with suppress(psutil.Error):
            parent = process.parent()
            is_rank = parent.cmdline() == process.cmdline()
            if is_rank and "HOROVOD_ELASTIC" in parent.environ():
                found[int(process.environ()["HOROVOD_RANK"])] = process
    return found


def steps_in(folder: Path) -> list[dict[str, Any]]:
    """A run's steps so far."""
    return [vars(line) for line in records(folder, "step")]


def images_of(step: dict[str, Any]) -> int:
    """The images of a step, of all ranks."""
    return round(step["images_per_second"] * step["seconds"])


def checked_steps(folder: Path) -> list[dict[str, Any]]:
    """A run's steps. Checks that they leave no image of the stream out and use none twice; steps
    that ended when a rank was lost may have no figures."""
    steps, unknown, before = steps_in(folder), steps_without_figures(folder), (0, 0)
    for step in steps:
        number, seen = step["step"], step["samples_seen"]
        missing = unknown & {*range(before[0] + 1, number)}
        assert number - before[0] - len(missing) == 1, step
        skipped = seen - images_of(step) - before[1]  # by at least one rank, at most three
        assert 12 * len(missing) <= skipped <= 36 * len(missing), step
        before = number, seen
    return steps


def steps_without_figures(folder: Path) -> set[int]:
    """The steps that ended, by the record, before the ranks had exchanged their figures."""
    text = (folder / "metrics.jsonl").read_text()
    spans = re.findall(r"no figures of steps (\d+) to (\d+)", text)
    return {step for begin, end in spans for step in range(int(begin), int(end) + 1)}
