"""How a run ends when something is wrong: one clear message, from one rank, and exit code not 0."""

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from recipe.world import World

# Ranks other than 0 hold their message back, so that an error that all ranks share is told once:
# rank 0 tells it and leaves, and the launcher ends the others while they wait. An error that only
# rank 3 has comes out 2 s late.
OTHER_RANK_DELAY_S = 2.0
# A rank that lost its peer is a victim: the rank that failed speaks first. It speaks up only if
# nobody ended it.
LOST_PEER_DELAY_S = 15.0
LOST_PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Horovod has been shut down",
    "Shutdown msg from rank",
    "shutdown in progress",
    "Read error",
    "gloo/transport",
    "ncclRemoteError",
    "ncclSystemError",
)


class UserError(ValueError):
    """A mistake that its user can mend: the message holds the value, what is wrong with it, and
    what to do."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` is the consequence of another rank's end rather than a cause of its own."""
    return type(error).__name__ == "HorovodInternalError" or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER_SIGNS)
    )


def fail(world: World, message: str, exit_code: int = 1) -> NoReturn:
    """Print `message` from one rank and end this process with `exit_code`.

    `os._exit`, because the tidy ways out (MPI_Finalize, Horovod's shutdown) wait for all ranks, and
    the others may hang in a collective that this rank never joins. The launcher then ends the rest.
    """
    if world.rank != 0:
        time.sleep(OTHER_RANK_DELAY_S)
        message = message and f"[rank {world.rank} on {world.host}] {message}"
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


@contextmanager
def one_message(world: World) -> Iterator[None]:
    """Turn whatever ends the body early into one message and an exit code that is not 0."""
    try:
        yield
    except UserError as error:
        fail(world, f"error: {error}")
    except KeyboardInterrupt:
        fail(
            world,
            "interrupted: `--resume auto` with the same --name goes on from the last checkpoint",
            130,
        )
    except Exception as error:
        if is_lost_peer(error):
            time.sleep(LOST_PEER_DELAY_S)
        fail(world, traceback.format_exc())
