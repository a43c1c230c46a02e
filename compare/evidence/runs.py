"""What was recorded of one run: a whole training, or a side of a block of turns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare.evidence.reading import (
    TimedSummary,
    contradictions,
    metrics_of,
    parse,
    read_metrics,
    read_object,
)
from compare.plan.configurations import ENGINES
from compare.plan.plan import Outcome, Run
from recipe.errors import UserError
from recipe.record.schema import Environment, EpochLine, EvalLine, MetricsLine, Settings

MOST_STEPS = 500  # of a whole run that are recorded
MOST_LOAD = 0.1  # share of the cores that others may keep busy before a run's times are doubtful
GRADIENTS = Path("profile/gradients-rank-0.json")  # which predictions read
NO_SETTINGS: dict[str, Any] = {"log_dir": "", "name": None}  # of a user's own script


@dataclass(kw_only=True, eq=False)
class RunRecord(Outcome):
    """One planned run: its place in the plan, its outcome and, if it is complete, what it recorded.
    Or a side of a block of turns, which has no summary because it never ends by itself."""

    folder: Path  # where its trainer wrote; it need not be there any more
    block: int
    case: str  # "" in a plan without cases
    configuration: str
    engine: str
    launcher: str
    workers: int
    seed: int | None = None  # None: the user's own
    command: str = ""
    is_side: bool = False
    config: Settings = field(init=False, repr=False)  # these three in complete runs only
    environment: Environment = field(init=False, repr=False)
    summary: TimedSummary = field(init=False, repr=False)
    # Of each evaluation the better one, if the weights' moving average was evaluated, too: as for
    # the summary and for --desired-acc.
    evaluations: list[EvalLine] = field(default_factory=list, repr=False)
    epochs: list[EpochLine] = field(default_factory=list, repr=False)  # the complete ones
    metrics: list[dict[str, Any]] = field(default_factory=list, repr=False)  # lines of the file
    gradients: dict[str, Any] | None = field(default=None, repr=False)  # the profile's, of rank 0

    @property
    def name(self) -> str:
        return f"{self.configuration}-{self.workers}" if self.workers else self.configuration

    @property
    def is_complete(self) -> bool:
        return self.status == "completed"

    @property
    def has_failed(self) -> bool:
        """Return whether it ended without a record that can be used."""
        return self.status not in ("completed", "not run")

    @property
    def desired_acc(self) -> float | None:
        """The top-1 at which it was to end, percent; None if it had none."""
        return self.config.flags.get("desired_acc")

    @property
    def has_accuracy(self) -> bool:
        """Return whether it was evaluated; on random images accuracy means nothing."""
        return bool(self.evaluations) and self.config.data != "synthetic"

    def epochs_at(self, line: MetricsLine) -> float:
        """Return how many epochs the run had trained when it wrote this line."""
        return line.samples_seen * self.summary.epochs / self.summary.samples_seen

    def first_to_reach(self, top1: float) -> EvalLine | None:
        """Return the first evaluation whose top-1 is at least this, percent; None if none is."""
        return next((line for line in self.evaluations if line.top1 >= top1), None)

    @property
    def is_disturbed(self) -> bool:
        """Return whether other processes kept so many cores busy that its times are doubtful."""
        return (self.other_load or 0.0) > MOST_LOAD * self.environment.cores


def place_of(planned: Run, comparison: Path) -> dict[str, Any]:
    """Return the fields of a run, or of a side, that the plan determines."""
    configuration = planned.configuration
    return {
        "folder": comparison / planned.folder,
        "block": planned.block,
        "case": planned.case,
        "configuration": configuration.name,
        "engine": configuration.engine,
        "launcher": configuration.launcher,
        "workers": planned.workers,
        "seed": planned.seed,
    }


def read_run_folder(folder: Path) -> dict[str, Any]:
    """Return the contents of a trainer's run folder, by the names of `record.RunLine`."""
    gradients = folder / GRADIENTS
    return {
        "settings": read_object(folder / "config.json"),
        "environment": read_object(folder / "environment.json"),
        "summary": read_object(folder / "summary.json"),
        "metrics": with_few_steps(read_metrics(folder / "metrics.jsonl")),
        "gradients": read_object(gradients) if gradients.exists() else None,
    }


def with_few_steps(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, but of the steps at most MOST_STEPS, at equal distances.
    They serve for quantiles of a step's time; those of a long training would fill the record."""
    steps = [line.get("step") for line in metrics if line.get("kind") == "step"]
    kept = {*steps[:: math.ceil(len(steps) / MOST_STEPS) or 1]}
    return [line for line in metrics if line.get("kind") != "step" or line.get("step") in kept]


def take_environment(
    run: RunRecord, settings: dict[str, Any], environment: dict[str, Any], where: str
) -> None:
    """Give a run its settings and environment. UserError names the field that is wrong, also if
    the number of workers is not the planned one."""
    run.config = parse(settings, Settings, f"{where}: config.json")
    run.environment = parse(environment, Environment, f"{where}: environment.json")
    planned = 1 if ENGINES[run.engine].is_one_worker else run.workers
    ran = run.environment.world_size
    if planned and ran != planned:
        raise UserError(
            f"{where}: environment.json: world_size is {ran}, but the plan has {planned}"
        )


def take_training(
    run: RunRecord, summary: dict[str, Any], metrics: list[dict[str, Any]], where: str
) -> None:
    """Give a whole run its summary and metrics. UserError if they contradict each other."""
    run.summary = parse(summary, TimedSummary, f"{where}: summary.json")
    run.metrics = metrics
    last_step = metrics[-1].get("step") if metrics else None
    for problem in contradictions(run.config, run.summary, last_step):
        raise UserError(f"{where}: {problem}")
    by_step = dict[int, EvalLine]()
    for line in metrics_of(metrics, EvalLine, f"{where}: metrics.jsonl"):
        by_step[line.step] = max(by_step.get(line.step, line), line, key=lambda one: one.top1)
    run.evaluations = [*by_step.values()]
    run.epochs = metrics_of(metrics, EpochLine, f"{where}: metrics.jsonl")


def read_training(folder: Path) -> RunRecord:
    """Read the folder of a complete training that no comparison has started; UserError names what
    is wrong with it."""
    if not (folder / "summary.json").exists():
        raise UserError(
            f"{folder}: has no summary.json: the training has not ended, or this is no run folder"
        )
    written = read_run_folder(folder)
    environment = parse(written["environment"], Environment, f"{folder}: environment.json")
    run = RunRecord(
        folder=folder,
        block=0,
        case="",
        configuration=folder.name,
        engine=environment.engine,
        launcher=environment.launcher,
        workers=0,
    )
    take_environment(run, written["settings"], written["environment"], str(folder))
    take_training(run, written["summary"], written["metrics"], str(folder))
    return run
