"""Hosts that come and go, under `horovodrun --host-discovery-script`.

Horovod's driver starts one process per slot, and removes the whole host from the job if that
process dies. So this process only watches, and another one with the same arguments trains. After a
fault or a change of hosts, all ranks start again from the last checkpoint: each watcher ends its
trainer, asks the driver for the new place of its slot, and starts a trainer there. The driver
answers when all slots have asked or ended. The trainer knows nothing of this. Watchers communicate
through one word on the driver's server, which forgets it when it assigns places.
"""

import os
import signal
import sys
import threading
import time
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException

from recipe.ancestors import own_world
from recipe.errors import EXIT_SAVED, UserError, fail, one_message
from recipe.rank_forker import RankForker, look_s
from recipe.settings.config import parse_args

WORD = "/training/word"
AGAIN, OVER, HOSTS = "again", "over", "hosts"  # start again; end; start again, but save first
# The numbers in the driver's answer.
PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
# Time for ranks to find each other, and for all slots to ask: a little above the driver's limit.
RENDEZVOUS_S = 60 + int(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", "600"))
# Wait after an error: its cause may be the loss of another rank, which that one's watcher reports.
ANOTHER_S = 1.0


def supervise() -> None:
    """Under Horovod's elastic driver, watch a process that trains, and end with it. Return in the
    process that trains, and in all other cases."""
    if os.environ.pop("HOROVOD_ELASTIC", "") != "1":
        return
    world = own_world()
    config = parse_args("horovod", world)  # reports errors at once
    if config.resume != "auto" or config.name is None:
        message = (
            "error: horovodrun --host-discovery-script: after a change of hosts the run starts "
            "from the last checkpoint; add --resume auto --name RUN"
        )
        fail(world, message if world.is_first else "", exit_code=2)
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(RENDEZVOUS_S))
    with one_message(world):
        forker = RankForker("horovod_train.train")
        from horovod_train.announcements import Announcements  # loads Horovod's launcher

        announcements = Announcements(os.environ["HOROVOD_GLOO_IFACE"])
        _request("PUT", f"/worker_addresses/{_slot()}", announcements.for_driver, RENDEZVOUS_S)
        while True:
            announcements.pause()  # a process that forks should have one thread
            if forker.start():
                return
            announcements.listen()
            exit_code = _watch_over(forker, announcements.changed)
            if exit_code is not None:
                sys.exit(exit_code)
            announcements.changed.clear()  # the new place includes the change
            place = _ask_for_place()
            if place["HOROVOD_RANK"] == "-1":  # the slot is no longer in the job
                sys.exit(0)
            os.environ |= place


def _watch_over(forker: RankForker, changed: threading.Event) -> int | None:
    """Return the exit code of the process that trains, or None if all ranks must start again."""
    word = ""
    while forker.wait(look_s(int(os.environ["HOROVOD_SIZE"]))) is None:
        if (word := _hear()) in (AGAIN, OVER):
            break
        if changed.is_set() and not word:
            print("hosts have come or gone: all ranks go on from a checkpoint", flush=True)
            changed.clear()
            _say(HOSTS)
            os.kill(forker.rank, signal.SIGUSR1)
    exit_code, word = forker.end(), _hear()
    on_one_host = os.environ["HOROVOD_LOCAL_SIZE"] == os.environ["HOROVOD_SIZE"]
    if word != OVER and forker.is_lost(exit_code, on_one_host):
        _say(AGAIN)
        return None
    if not word and exit_code not in (0, EXIT_SAVED):  # it has reported an error
        time.sleep(ANOTHER_S)
        word = _hear() or OVER
        _say(word)
        if word == OVER and exit_code < 0:
            name = signal.Signals(-exit_code).name
            print(f"rank {os.environ['HOROVOD_RANK']} was killed by {name}", file=sys.stderr)
    if word == OVER:
        return max(1, exit_code)
    has_ended = exit_code == 0 or not word  # complete, or saved on a signal
    return exit_code if has_ended else None


def _request(method: str, path: str, body: str | None = None, timeout_s: float = 5.0) -> str:
    """Return the answer of the driver's server, "" if it has none. OSError or HTTPException if the
    server is gone."""
    address, port = (os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    with closing(HTTPConnection(address, int(port), timeout=timeout_s)) as connection:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.read().decode() if answer.status == 200 else ""


def _hear() -> str:
    with suppress(OSError, HTTPException):
        return _request("GET", WORD)
    return ""


def _say(word: str) -> None:
    with suppress(OSError, HTTPException):  # the driver is gone, and will assign no place either
        _request("PUT", WORD, word)


def _slot() -> str:
    return f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"


def _ask_for_place() -> dict[str, str]:
    """Return the variables of this slot's new place, once the driver has heard from all slots.
    UserError if it assigns none."""
    try:  # only once: the driver would count a second request as another slot
        numbers = _request("GET", f"/rank_and_size/{_slot()}", timeout_s=RENDEZVOUS_S)
    except (OSError, HTTPException) as error:
        raise UserError(
            f"horovodrun's driver has assigned no new place ({error}): it is gone, or waits for "
            "a host that is gone; start it again"
        ) from None
    return {
        f"HOROVOD_{name}": number for name, number in zip(PLACE, numbers.split(","), strict=True)
    }
