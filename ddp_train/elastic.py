"""Replace lost ranks quickly, under `torchrun --max-restarts`.

torchrun's agent restarts all ranks when one has ended, and each must load torch again. Here the
process that the agent starts is only a watcher: it forks the process that trains
(recipe/rank_forker.py). After a loss all watchers fork a new one. They agree on the generation of
ranks through the agent's store; the agent does not notice. On several hosts there are no watchers:
if a host is lost, only the agents can replace its ranks.

If a rank ends in another way, by an error or a signal, its watcher ends too, and the agent decides.
"""

import os
from contextlib import suppress
from typing import Any

from recipe.ancestors import nearest_launcher, own_world
from recipe.errors import one_message
from recipe.fork_server import leave_like
from recipe.rank_forker import GENERATION, RankForker, look_s
from recipe.settings.config import parse_args


def supervise() -> None:
    """Under `torchrun --max-restarts` with --resume auto, on one host, watch a process that trains,
    and end with it. Return in the process that trains, and in all other cases."""
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not most or not has_store:
        return
    world = own_world()
    if world.local_size < world.size:
        return
    config = parse_args("ddp", world)  # reports errors at once
    if config.resume != "auto" or config.name is None:
        return
    with one_message(world):
        forker = RankForker("ddp_train.train")
        from torch.distributed import TCPStore

        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*address, is_master=False)
        generation = int(store.compare_set(GENERATION, "", "0"))
        if store.check([_end_of(generation)]):  # it ended before an agent started this process
            generation = _next(store, generation)
        while True:
            os.environ[GENERATION] = str(generation)
            if forker.start():
                return
            with suppress(RuntimeError):  # an agent is gone, and the store with it
                while forker.wait(look_s(world.size)) is None:
                    if int(store.get(GENERATION)) > generation:
                        break
                is_lost = forker.is_lost(forker.end())
                if is_lost and generation < most and not store.check([_end_of(generation)]):
                    generation = _next(store, generation)
                    continue
                store.set(_end_of(generation), "")
                if is_lost and generation == most:  # else the agent would allow as many restarts
                    nearest_launcher(world).terminate()
            leave_like(forker.end())


def _end_of(generation: int) -> str:
    """Return the key in the store that marks a generation as over, because a rank of it has ended
    in another way than by a loss."""
    return f"{GENERATION} {generation} is over"


def _next(store: Any, generation: int) -> int:
    """Return the generation that follows, or a later one; the first watcher to ask creates it."""
    return int(store.compare_set(GENERATION, str(generation), str(generation + 1)))
