"""What rows 4 and 5 share: two workers against two independent single workers at once.

Both fill two cores, so that nothing but the exchange of gradients (and waiting for the slower rank)
is in the ratio: neither the second core's share of caches and memory, nor the clock rate that the
processor can hold with all cores busy. Each process has one thread, and none is bound to a core, as
horovodrun and torchrun start them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness import ablation, bench
from benchmarks.harness.blocks import REACHED, run_blocks
from benchmarks.harness.sides import Workload, trainer_side
from compare.evidence.records import ENGINES
from compare.evidence.turns import Block
from compare.running.sides import Side

WORKERS = 2


@dataclass(frozen=True)
class Tuning:
    """What an engine's two workers are started with beside the workload."""

    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    configuration: str = ""  # of compare's table; "": the engine's usual one


TRANSPORTS_OF_DDP = {"over Gloo": Tuning(), "over MPI": Tuning(configuration="ddp-mpi")}


def measure_scaling(
    options: bench.Options,
    number: int,
    question: str,
    workload: Workload,
    steps: int,
    goals: dict[str, float],
    tunings: dict[str, dict[str, Tuning]],
) -> bench.Measured:
    """Rows of each engine under each of its tunings; `tunings` is {engine: {name: tuning}}."""
    rows: list[bench.Row] = []
    all_sides: list[Side] = []
    all_blocks: dict[str, list[Block]] = {}
    details: dict[str, object] = {}
    for engine, goal in goals.items():
        single = trainer_side(f"{engine}-singles", engine, workload, steps, copies=WORKERS)
        teams = {
            name: trainer_side(
                f"{engine}-{name}".replace(",", "").replace(" ", "-"),
                engine,
                workload,
                steps,
                workers=WORKERS,
                flags=tuning.flags,
                environment=dict(tuning.environment),
                configuration=tuning.configuration,
            )
            for name, tuning in tunings[engine].items()
        }
        sides: Sequence[Side] = [single, *teams.values()]
        judged = [(team.name, single.name, goal) for team in teams.values()]
        blocks = run_blocks(sides, options, f"{number} {engine}", judged)
        all_sides += sides
        all_blocks[engine] = blocks
        for name, team in teams.items():
            title = f"2 workers / 2 alone, {question}, {ENGINES[engine]} {name}"
            note = f"{workload}; no process bound to a core"
            row = bench.Row(number, title, goal, notes=(note,))
            row = row.compared(blocks, team.name, single.name, confidence=options.confidence)
            if (row.verdict != REACHED and not options.quick) or options.profile:
                found = ablation.measure(team, options.out / "ablation" / team.name)
                details[f"{team.name}, ablation"] = found
                row = bench.with_note(row, f"binds: {ablation.sentence(found)}")
            rows.append(row)
    return bench.Measured(rows, all_sides, all_blocks, details)
