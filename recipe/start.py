"""How a training script starts, and what whoever starts it from Python may hook into it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from recipe.config import Config, parse_args
from recipe.errors import one_message
from recipe.watch import start_watchdog
from recipe.world import World, read_world


def start(engine: str, words: list[str] | None = None) -> tuple[Config, World]:
    """This rank's settings, by default those of the command line, and its place; from now on the
    watchdog ends it in time. Call it before torch is loaded: --help and typing errors are answered
    at once, and the knobs' variables are set in time."""
    world = read_world()
    config = parse_args(engine, world, words)
    start_watchdog(world, config.stall_timeout)
    return config, world


@dataclass(frozen=True)
class Hooks:
    """What a `main` takes from another program that starts it, to measure its steps."""

    # Called when all that a step entails is over, be it a line of the record or a checkpoint, and
    # before the clocks of the next one start: with the session, which counts samples and phases,
    # and with the trained model where each rank holds all of it.
    step_ended: Callable[..., object] = lambda session, model=None: None
    # Whether the ranks exchange gradients in the next step, on all of them alike.
    exchanges: Callable[[], bool] = lambda: True
    # An epoch has at least so many images: those that there are come again in it.
    epoch_images: int = 0


def run(main: Callable[[Config, World, Hooks], int], config: Config, world: World) -> None:
    """Call a script's `main`; a user's error becomes one message, from one rank."""
    with one_message(world):
        sys.exit(main(config, world, Hooks()))
