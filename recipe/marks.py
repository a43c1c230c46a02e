"""What a rank and its watcher (rank_forker.py) tell each other, in memory that both share.

A rank that nobody watches writes there, too, and nobody asks it to end.
"""

import ctypes
import mmap


class Marks(ctypes.Structure):
    """A rank's marks since its start, all 0 at first. The watcher writes `is_watched` and
    `is_asked`."""

    _fields_ = (
        ("is_watched", ctypes.c_bool),  # a watcher replaces it when another rank is lost
        ("has_made_step", ctypes.c_bool),
        ("batch_s", ctypes.c_double),  # the longest of the last batches
        ("is_writing", ctypes.c_bool),  # a checkpoint
        ("is_leaving", ctypes.c_bool),  # it has seen what looks like another rank's loss
        ("is_complete", ctypes.c_bool),  # it will not exchange anything any more
        ("is_asked", ctypes.c_bool),  # to end, since another rank was lost
    )

    def clear(self) -> None:
        """Set all to 0, for a new rank."""
        ctypes.memset(ctypes.addressof(self), 0, ctypes.sizeof(self))


marks = Marks.from_buffer(mmap.mmap(-1, ctypes.sizeof(Marks)))  # a fork shares them
