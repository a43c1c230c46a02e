"""The report of a comparison, put together once: all that it says. text.py and html.py only write
it down."""

import datetime
import shlex
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from compare.evidence.equality import Fact, compare_facts
from compare.evidence.notices import notices
from compare.evidence.paired import HALF_WIDTHS_OF_80_PERCENT
from compare.evidence.records import Comparison, RunRecord
from compare.evidence.references import Reference
from compare.evidence.rows import (
    PhaseRow,
    SpeedRow,
    StepRow,
    TrainingRow,
    phase_differences,
    phase_rows,
    speed_rows,
    step_rows,
    training_rows,
)
from compare.evidence.verdicts import DIFFERENT, Verdict, correction_text, judge
from compare.evidence.words import count, percent_text, place_text
from compare.plan.plan_file import plan_words

TITLES = {"ddp": "PyTorch DDP", "horovod": "Horovod"}
IMAGENET_CROPS, IMAGENET_CLASSES = range(160, 321), 1000


class Report:
    """What a comparison shows; each part is found when it is first asked for, and kept."""

    def __init__(
        self,
        comparison: Comparison,
        references: Sequence[Reference] = (),
        price_per_hour: float | None = None,  # of all workers together
    ):
        self.comparison = comparison
        self.references = references
        self.price_per_hour = price_per_hour

    @cached_property
    def facts(self) -> dict[tuple[str, int], list[Fact]]:
        """What must be equal, by case and number of workers: of whole runs, and of sides."""
        one = self.comparison
        places = [(case, workers) for case in one.cases for workers in one.workers]
        return {place: compare_facts(one, *place) for place in places}

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Which configuration is faster."""
        return judge(self.comparison, self.facts)

    @cached_property
    def speed(self) -> list[SpeedRow]:
        """How fast each cell trained."""
        return speed_rows(self.comparison)

    @cached_property
    def trainings(self) -> list[TrainingRow]:
        """What whole trainings showed."""
        return training_rows(self.comparison)

    @cached_property
    def phases(self) -> list[PhaseRow]:
        """Where the time of a step goes."""
        return phase_rows(self.comparison)

    @cached_property
    def phase_differences(self) -> list[PhaseRow]:
        """In which phases two configurations differ."""
        return phase_differences(self.phases, self.verdicts)

    @cached_property
    def steps(self) -> list[StepRow]:
        """How long single steps took."""
        return step_rows(self.comparison)

    @cached_property
    def notices(self) -> list[tuple[str, list[str]]]:
        """What a reader must know beside the figures."""
        return notices(self.comparison)

    @cached_property
    def correction(self) -> str:
        """How the verdicts are corrected for their number."""
        return correction_text(self.comparison, self.verdicts)

    @property
    def is_of_imagenet(self) -> bool:
        """Tell whether images had ImageNet's size and number of classes: only of such does a speed
        say what 90 epochs of ImageNet would take."""
        runs = self.comparison.complete
        return bool(runs) and all(
            run.summary.fingerprint.get("num_classes") == IMAGENET_CLASSES
            and run.config.flags.get("train_crop_size") in IMAGENET_CROPS
            for run in runs
        )

    @property
    def title(self) -> str:
        """Name what was compared."""
        engines = {run.engine for run in self.comparison.written}
        if self.comparison.plan.null:
            return "A null test: each configuration against itself"
        if engines == TITLES.keys():
            return "PyTorch DDP and Horovod, the same training side by side"
        if len(self.comparison.configurations) == 1:
            (engine,) = engines
            return f"The training under {TITLES.get(engine, engine)} alone"
        return "One training, started in several ways"

    @property
    def subtitle(self) -> str:
        """Say what was trained on what: the figures mean nothing without it."""

        def all_values(value_of: Callable[[RunRecord], Any]) -> str:
            values = dict.fromkeys(value_of(run) for run in self.comparison.written)
            return " and ".join(str(value) for value in values if value is not None)

        environment = self.comparison.written[0].environment
        model = all_values(lambda run: run.config.arch) or "A model"
        data = all_values(lambda run: run.config.data or run.config.train_dir)
        batches = all_values(lambda run: run.config.batch_size)
        hosts, device = len(environment.hosts), environment.device_name or environment.cpu_model
        parts = [
            f"{model} on {data or 'the given images'}",
            f"batch {batches} a worker" if batches else "",
            all_values(lambda run: run.config.precision),
            f"{device}, {count(environment.cores, 'core')}" + f", {hosts} hosts" * (hosts > 1),
        ]
        return " · ".join(part for part in parts if part)

    @property
    def created(self) -> str:
        """When it was measured."""
        created = datetime.datetime.fromisoformat(self.comparison.plan.created_utc)
        return f"{created.day} {created:%B %Y, %H:%M} UTC"

    @property
    def not_beaten(self) -> list[str]:
        """Say of each place with a decided verdict which configurations no verdict finds slower."""
        judged = [v for v in self.verdicts if not (v.is_null_test or v.is_interaction)]
        lines = []
        for place in dict.fromkeys((verdict.case, verdict.workers) for verdict in judged):
            here = [v for v in judged if (v.case, v.workers) == place and v.speed is not None]
            beaten = {
                v.second if v.decision == "faster" else v.first
                for v in here
                if v.decision in DIFFERENT
            }
            labels = {v.first: v.first_label for v in here}
            labels |= {v.second: v.second_label for v in here}
            left = [label for name, label in labels.items() if name not in beaten]
            if beaten:
                at = place_text(*place) if place[0] else f"At {place_text(*place)}"
                lines.append(f"{at}, not beaten: {' or '.join(left) or 'none'}.")
        return lines

    @property
    def reproduce(self) -> list[str]:
        """The commands that make this comparison again."""
        plan = self.comparison.plan
        commit = self.comparison.written[0].environment.git_commit
        lines = [f"git checkout {commit}"] if commit else []
        lines += ["make setup", ". .venv/bin/activate"]
        inherited = plan.environment.inherited
        lines += [f"export {name}={shlex.quote(value)}" for name, value in inherited.items()]
        if plan.plan_file:
            lines.append(f"# in flags, what {plan.plan_file} asked for:")
        words = ["python", "compare/run.py", *plan_words(plan)]
        return [*lines, shlex.join(words), "python compare/report.py"]

    @property
    def limits(self) -> list[str]:
        """Say what the comparison does not show."""
        one = self.comparison
        run, is_cpu = one.written[0], one.written[0].environment.device == "cpu"
        *most, last = map(str, one.workers)
        numbers = f"{', '.join(most)} and {last} were" if most else f"{last} was"
        lines = [
            "GPUs. This was measured on a CPU: on a GPU a step computes many times faster and the "
            "gradients travel through NCCL, so neither the ratio nor its direction carries over."
            if is_cpu
            else f"Other devices than {run.environment.device_name}.",
            f"Other numbers of workers. {numbers} measured; nothing is known beyond them.",
        ]
        if len(run.environment.hosts) == 1:
            lines.append(
                "Networks. All workers ran on one host, where messages pass through its memory or "
                "its loopback. Between hosts, latency and bandwidth decide, and the engines may "
                "differ in other ways."
            )
        threads = {run.workers: run.environment.threads for run in one.written}
        if is_cpu and len(set(threads.values())) > 1:
            told = ", ".join(f"{n} x {count(threads[n], 'thread')}" for n in sorted(threads))
            lines.append(
                f"Scaling to more machines. All workers share "
                f"{count(run.environment.cores, 'core')} ({told}): the column “scaling” shows how "
                "well those cores were used, not what a second machine would bring."
            )
        lines.append(
            f"Other models and batches. {run.config.arch or 'The model'} at this batch has its "
            "own ratio of computing to communicating; a model with more weights, or a smaller "
            "batch, waits longer for its gradients."
        )
        widths = [v.corrected_half_width for v in self.verdicts if v.speed and v.speed.low]
        if widths:
            least, largest = (
                percent_text(HALF_WIDTHS_OF_80_PERCENT * end) for end in (min(widths), max(widths))
            )
            size = f"{least} to {largest} (it depends on the verdict)"
            lines.append(
                f"Small differences. Such a comparison shows a difference of "
                f"{least if least == largest else size} in four cases of five, and one of two "
                "thirds of that in half."
            )
        return lines
