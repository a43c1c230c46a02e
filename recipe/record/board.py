"""TensorBoard's event files, written at once and by the caller's own thread: a full disk is an
OSError there, where torch's SummaryWriter has a thread that prints a traceback and ends."""

import os
import socket
import time
from pathlib import Path
from typing import Any, BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams


class Board:
    """One event file in `folder`, made with its first point.

    `first_step`, of a run that goes on, is the x-value from which TensorBoard is to forget what
    earlier files of the folder hold.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        self.folder, self.first_step = folder, first_step
        self.file: BinaryIO | None = None

    def draw(self, step: int, values: dict[str, float]) -> None:
        """Add a point at x = `step` to the curve of each tag; OSError if it cannot be written."""
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=points)))

    def describe(self, settings: dict[str, Any], results: dict[str, float | None]) -> None:
        """Add the hyper-parameters, and the figures that they led to."""
        plain = {
            key: value
            if isinstance(value, (int, float))
            else str(value).encode(errors="backslashreplace").decode()
            for key, value in settings.items()
        }
        figures = {f"hparam/{key}": value for key, value in results.items() if value is not None}
        for part in hparams(plain, figures):
            self._write(Event(summary=part))
        self.draw(0, figures)

    def _write(self, event: Any) -> None:
        if self.file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
            self.file = (self.folder / name).open("wb")
            self._write(Event(file_version="brain.Event:2"))
            if self.first_step is not None:
                begins = SessionLog(status=SessionLog.START)
                self._write(Event(step=self.first_step, session_log=begins))
        event.wall_time = time.time()
        RecordWriter(self.file).write(event.SerializeToString())
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
