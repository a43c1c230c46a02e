"""Trainings by Horovod on hosts that come and go."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from launching import SMALL, TRAINERS

from recipe.record.resume import lines_by_step


def command(folder: Path, flags: str = "", interface: str = "lo", more: str = "") -> list[str]:
    """Train in this folder, for ever, on ranks where a file `slots` in it says."""
    launcher = f"horovodrun -np 2 --min-np 1 --max-np 3 --network-interfaces {interface} {more}"
    words = f"{SMALL.partition('--max-steps')[0]} --epochs 100000 --log-interval 1"
    place = f"--log-dir {folder.parent} --name {folder.name} --resume auto"
    return [
        *launcher.split(), "--host-discovery-script", f"cat {folder}/slots",
        sys.executable, TRAINERS["horovod"], *f"{words} {place} {flags}".split(),
    ]  # fmt: skip


def write_slots(folder: Path, text: str) -> None:
    """At once, for it is read each second."""
    new = folder / "slots.new"
    new.write_text(f"{text}\n")
    new.replace(folder / "slots")


def ranks_among(processes: Iterable[psutil.Process]) -> dict[int, psutil.Process]:
    """Those that train, by their rank: each below one that watches over it."""
    found = {}
    for process in processes:
        with suppress(psutil.Error):
            if "HOROVOD_ELASTIC" in process.parent().environ():
                found[int(process.environ()["HOROVOD_RANK"])] = process
    return found


def steps_in(folder: Path) -> list[dict[str, Any]]:
    """A run's steps so far."""
    return [line for lines in lines_by_step(folder, "step").values() for line in lines]


def images_of(step: dict[str, Any]) -> int:
    """Of all ranks."""
    return round(step["images_per_second"] * step["seconds"])


def checked_steps(folder: Path) -> list[dict[str, Any]]:
    """A run's steps, that leave no image of the stream out and have none twice."""
    steps, seen = steps_in(folder), 0
    for step in steps:
        seen += images_of(step)
        assert step["samples_seen"] == seen, step
    return steps
