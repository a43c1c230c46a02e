"""Ranks that are lost: what `torchrun --max-restarts` starts for each of its ranks.

torchrun's agent starts all ranks anew when one has ended, and each loads torch again. So the
process that it starts only watches, and forks the one that trains (recipe/nursery.py). After a loss
all watchers fork another one. Which generation of ranks there is they tell each other on the
agents' store; the agents do not see it.

Whatever else ends a rank, an error or a signal, ends its watcher, too, and is its agent's business.
"""

import math
import os
from contextlib import suppress
from typing import Any

from recipe.errors import OWN_RANK, one_message
from recipe.nursery import GENERATION, Nursery, leave_like, look_s
from recipe.settings.config import parse_args
from recipe.watch import nearest_launcher, own_world


def supervise() -> None:
    """Under `torchrun --max-restarts`, with --resume auto, watch over a process that trains, and
    end with it; otherwise, and in that process, return."""
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not most or not has_store or OWN_RANK in os.environ:
        return
    world = own_world()
    config = parse_args("ddp", world)  # its errors come at once
    if config.resume != "auto" or config.name is None:
        return
    with one_message(world):
        nursery = Nursery("ddp_train.train", config.knob_variables)
        from torch.distributed import TCPStore

        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*address, is_master=False)
        generation = int(store.compare_set(GENERATION, "", "0"))
        if store.check([_end_of(generation)]):  # before an agent has started this process
            generation = _next(store, generation)
        while True:
            os.environ[GENERATION] = str(generation)
            if nursery.start():
                return
            with suppress(RuntimeError):  # an agent is gone, and its store
                while nursery.wait(look_s(world.size)) is None:
                    if int(store.get(GENERATION)) > generation:
                        break
                is_lost = nursery.is_lost(nursery.end())
                if is_lost and generation < most and not store.check([_end_of(generation)]):
                    generation = _next(store, generation)
                    continue
                store.set(_end_of(generation), "")
                if is_lost and generation == most:  # the agent would start it as often again
                    nearest_launcher(world).terminate()
            leave_like(nursery.end(math.inf))


def _end_of(generation: int) -> str:
    """The name on the store of what says that a rank of it has ended otherwise than by a loss."""
    return f"{GENERATION} {generation} is over"


def _next(store: Any, generation: int) -> int:
    """The generation that follows, or a later one: whoever is first counts."""
    return int(store.compare_set(GENERATION, str(generation), str(generation + 1)))
