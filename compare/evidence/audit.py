"""Audit a block of turns: what of it does not fit its plan, its sides' own records, or itself.

A damaged or mixed-up record is to be found here, before it is part of a verdict. Whoever changes
all of a record's files consistently is not found: only another measurement is proof against that.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from compare.evidence.turns import Block, Turn, quiet_load
from compare.plan.blocks import LEAD_IN_STEPS
from compare.plan.plan import TRAINERS
from compare.plan.record import FORMAT, PlanRecord
from recipe.record.schema import Environment, Settings

UNQUOTED = str.maketrans("", "", "'\"")  # keep.py may have changed what needs quotes
CLOCK_SECONDS = 0.05  # by which a turn may seem to begin too early: its time is rounded


def contradictions(
    block: Block,
    before: Sequence[Block],
    plan: PlanRecord,
    place: tuple[str, int],
    sides: Mapping[str, tuple[Settings, Environment]],
) -> Iterator[str]:
    """Yield what is wrong with a block of this case and number of workers, which comes after those
    that were measured before it."""
    yield from against_plan(block, plan, place)
    yield from against_sides(block, sides)
    turns = [*(one.turns[-1] for one in before[-1:]), *block.turns]
    yield from against_clock(turns, datetime.fromisoformat(plan.created_utc).timestamp())


def against_plan(block: Block, plan: PlanRecord, place: tuple[str, int]) -> Iterator[str]:
    """Yield in what it is another block than the plan's, as far as its version wrote that down."""
    runs = {run.configuration.name: run for run in plan.in_order(block.number, *place)}
    order = tuple(runs)
    if plan.format > 1:
        facts: tuple[tuple[str, Any, Any], ...] = (
            ("order", block.order, order if plan.format >= FORMAT else block.order),
            ("rounds", block.rounds, plan.rounds),
            ("rounds of its turns", len(block.of("speed")), plan.rounds * len(order)),
            ("sources", block.sources, plan.trainers_sha256),
            ("comparison", block.comparison, plan.order_seed),
        )
        for name, written, wanted in facts:
            if written != wanted:
                yield f"{name} is {written!r}, but the plan has {wanted!r}"
        for name, command in zip(block.order, block.commands, strict=False):
            one, words = runs[name].configuration, runs[name].trainer_words("runs/by-hand", "run")
            planned = f"{TRAINERS.get(one.engine)} {shlex.join(words)}"
            planned = shlex.join(one.command) if one.command else planned
            if not command.translate(UNQUOTED).endswith(planned.translate(UNQUOTED)):
                yield f"the command of {one.name} is {command}, and not that of the plan"
    for number in dict.fromkeys(turn.round for turn in block.of("speed")):
        names = [turn.side for turn in block.of("speed") if turn.round == number]
        if names != [*block.order][:: -1 if number % 2 else 1]:
            yield f"the turns of round {number} are of {names}, which is not their order"


def against_sides(block: Block, sides: Mapping[str, tuple[Settings, Environment]]) -> Iterator[str]:
    """Yield in what turns contradict the sides' settings, each other, or the rule by which a turn
    is left out."""
    cores = max(environment.cores for _, environment in sides.values())
    if block.quiet_cores > quiet_load(cores):
        yield f"quiet_cores is {block.quiet_cores:g}, which is much for {cores} cores"
    if len(set(block.steps.values())) > 1:
        yield f"its sides make {block.steps} steps a turn, and not the same number"
    for side, (settings, environment) in sides.items():
        passes = settings.batches_per_allreduce * environment.world_size
        images_per_step = (settings.batch_size or 0) * passes
        own = [turn for turn in block.turns if turn.side == side]
        expected = block.steps.get(side, 0) * images_per_step
        for turn in own:
            if turn.purpose != "trial" and not math.isclose(turn.images, expected or turn.images):
                yield f"a turn of {side} has {turn.images:g} images, and its steps {expected}"
            if turn.purpose == "disturbed" and turn.other_load <= block.quiet_cores:
                yield f"a turn of {side} was left out, and nobody had disturbed it"
        for before, after in pairwise(own):
            grown = (after.samples or 0) - (before.samples or 0)
            if after.samples and grown != after.images + LEAD_IN_STEPS * images_per_step:
                yield f"{side} counted {grown} samples to the end of a turn of {after.images:g}"


def against_clock(turns: Sequence[Turn], earliest: float) -> Iterator[str]:
    """Yield which turn began before the one before it had ended, or before the comparison."""
    for turn in turns:
        if turn.began is not None:
            if turn.began < earliest - CLOCK_SECONDS:
                yield f"a turn of {turn.side} began {earliest - turn.began:.1f} s too early"
            earliest = turn.began + turn.seconds
