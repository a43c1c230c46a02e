"""What was recorded of one run: a whole training, or a side of a block of turns."""

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
from recipe.record.schema import Environment, EvalLine, Settings

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
    # Of the trained weights, not of their moving average.
    evaluations: list[EvalLine] = field(default_factory=list, repr=False)
    metrics: list[dict[str, Any]] = field(default_factory=list, repr=False)  # lines of the file
    gradients: dict[str, Any] | None = field(default=None, repr=False)  # the profile's, of rank 0

    @property
    def name(self) -> str:
        return f"{self.configuration}-{self.workers}" if self.workers else self.configuration

    @property
    def is_complete(self) -> bool:
        return self.status == "completed"

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
        "metrics": read_metrics(folder / "metrics.jsonl"),
        "gradients": read_object(gradients) if gradients.exists() else None,
    }


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
    evaluations = metrics_of(metrics, EvalLine, f"{where}: metrics.jsonl")
    run.evaluations = [line for line in evaluations if line.weights == "model"]
