"""Everything that the report of a comparison says, computed once. formats.py only formats it."""

import datetime
import json
import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from compare.evidence.accuracy import (
    UNEQUAL,
    accuracy_rows,
    has_seeds,
    judge_accuracies,
    judge_times,
    not_reached,
)
from compare.evidence.extension import MOST_TIMES, extension_of, is_open
from compare.evidence.goals import goals_of
from compare.evidence.memory import KINDS, Leak, NewPages, leaks, new_pages
from compare.evidence.occasions import RECORDED_SPREAD, Key, over_occasions, pool
from compare.evidence.paired import HALF_WIDTHS_OF_80_PERCENT, Estimate
from compare.evidence.record import Record, is_being_written
from compare.evidence.rows import (
    phase_differences,
    phase_rows,
    speed_rows,
    training_rows,
)
from compare.evidence.runs import RunRecord
from compare.evidence.verdicts import Verdict, interaction, judge
from compare.evidence.words import (
    count,
    counted_text,
    percent_text,
    place_text,
    ratio_text,
    short,
    shortest_unique_names,
    three_digits,
    without_paths,
)
from compare.page.accuracy import not_reached_text
from compare.page.headline import (
    OF_ENGINES,
    headline,
    headline_of_accuracy,
    headline_of_occasions,
)
from compare.page.labels import labels_of
from compare.page.sentences import claim, correction_text, interval_text, said
from compare.plan.blocks import MIN_BLOCKS
from compare.plan.configurations import ENGINES, PEERS
from compare.plan.environment import ROOT, path_from_here
from compare.plan.plan import percentage
from compare.plan.plan_file import plan_table, sources_sha256
from recipe.record.schema import Environment
from recipe.settings.flags import Config

# The fields of environment.json that describe a run. The others describe machine and software.
OF_THE_RUN = {
    "format",
    "engine",
    "version",
    "world_size",
    "local_size",
    "rank_hosts",
    "variables",
    "command",
    "started_utc",
}
ENVIRONMENT = [field.name for field in fields(Environment) if field.name not in OF_THE_RUN]
# The flags and the variable by which a record shows whether an engine is stock.
# Earlier records do not have SLEEP.
VIEW, SLEEP, YIELD = "gradient_as_bucket_view", "sleeping_poll", "OMPI_MCA_mpi_yield_when_idle"
# The last two are of earlier records: a file of settings, each of which they give as well.
NOT_SETTINGS = {"log_dir", "name", "seed", "knobs", "knob_variables"}
NOT_RECORDED = "not recorded"
# Fields that may differ between occasions of one question: the version of this project, the names
# of its presets (the settings of a preset are compared one by one), folders, and the momentary
# clock of the GPU. (Of scripts' own code the digest is compared.)
OF_OCCASION = {"git_commit", "preset", "cache_dir", "interpreter", "script", "gpu_clock_mhz"}


WARNINGS = "Warnings: these figures may be unreliable"
OF_ONE_STEP = (
    "each turn has one counted step, so half of the time goes into lead-in steps, which do not "
    "count, and exposed communication rests on few steps: give --steps 3 or more"
)
FEW_BLOCKS = (
    f"{MIN_BLOCKS} blocks only, the fewest that have an interval; they hardly show how much "
    "launches differ"
)
MUCH_SCATTER = (
    "the blocks vary much more than their turns predict (in brackets: their variance / the "
    "predicted one): launches differ much here, so few blocks say little"
)
LITTLE_SCATTER = (
    "the blocks vary much less than their turns predict (in brackets: their variance / the "
    "predicted one), by chance or because disturbances even out within a block. So intervals may "
    "be wider than necessary; of two sides with fewer than five blocks, where only blocks count, "
    "they may be too narrow by luck"
)
TOO_LONG = (
    f"On this machine it would take more than {MOST_TIMES} times as long as this measurement to "
    "decide the rest."
)
MISSING = "Not in these figures"
WITHOUT_HOROVOD = "Horovod is not installed there; python horovod_train/build_horovod.py builds it"
WITHOUT_MPI = "mpi4py or mpirun is not installed there"
TO_MEND = "restore the file, or give the same command of run.py again, which says how to go on"
MEMORY = "Memory"
# The largest values that the GNU C library takes (man 3 mallopt).
KEEP_MEMORY = "MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_MMAP_THRESHOLD_=2147483647"
UNREACHED = "Trainings that did not reach the accuracy"
ASIDE = "Runs that failed or were disturbed (not used for speed)"


class Report:
    """What a comparison shows."""

    def __init__(self, record: Record):
        self.record = record
        # What must be equal among whole runs and among sides.
        self.facts = [fact for group in record.groups for fact in group.facts]
        self.labels = labels_of(record)
        self.verdicts = judge(record, self.labels)
        self.goals = goals_of(record)
        self.interactions = {
            group.place: found
            for group in record.groups
            if (found := interaction(record, group, self.verdicts)) is not None
        }
        self.times = judge_times(record, self.labels)
        self.accuracies = judge_accuracies(record, self.labels)
        self.accuracy = accuracy_rows(record)
        self.correction = correction_text(record, self.verdicts, self.times, self.accuracies)
        self.counted = counted_text(record.groups)
        self.speed = speed_rows(record)
        self.trainings = training_rows(record)
        self.phases = phase_rows(record)
        self.phase_differences = phase_differences(record, self.verdicts)
        self.notices = notices(record)

    @property
    def title(self) -> str:
        """The report's title: what was compared."""
        plan, engines = self.record.plan, {run.engine for run in self.record.written}
        if plan.side:
            return "Scripts, side by side" if len(plan.side) > 1 else "A script"
        if plan.null:
            return "A null test: each configuration against itself"
        if len(engines) == 1:
            return f"The training under {ENGINES[engines.pop()].title} alone"
        if engines <= PEERS.keys():
            peers = " and ".join(title for name, title in PEERS.items() if name in engines)
            return f"{peers}, the same training side by side"
        return "One training, started in several ways"

    @property
    def subtitle(self) -> str:
        """Model, data, machine and time, without which the figures mean nothing."""

        def all_values(value_of: Callable[[RunRecord], Any]) -> str:
            values = dict.fromkeys(value_of(run) for run in self.record.written)
            return " and ".join(str(value) for value in values if value is not None)

        environment = self.record.written[0].environment
        model = all_values(lambda run: run.config.arch) or "A model"
        data = all_values(lambda run: run.config.data or run.config.train_dir)
        batches = all_values(lambda run: run.config.batch_size)
        hosts, device = len(environment.hosts), environment.device_name or environment.cpu_model
        created = datetime.datetime.fromisoformat(self.record.plan.created_utc)
        machine = f"{device}, {count(environment.cores, 'core')}"
        parts = [
            "" if self.record.plan.side else f"{model} on {data or 'the given images'}",
            f"batch {batches} a worker" if batches else "",
            all_values(lambda run: run.config.precision),
            f"{machine}, {hosts} hosts" if hosts > 1 else machine,
            f"{created.day} {created:%B %Y, %H:%M} UTC",
        ]
        return " · ".join(part for part in parts if part)

    @property
    def ratios(self) -> dict[Key, Estimate]:
        """The finished speed ratios that have an interval, and the interactions, by case, workers
        and the labels of both sides."""
        # Labels contain flags, and flags contain paths, which keep.py shortens in kept records.
        judged = {
            (*v.place, without_paths(v.first_label), without_paths(v.second_label)): v
            for v in self.verdicts
            if v.is_finished and v.speed and v.speed.error
        }
        finished = {v.place for v in judged.values()}
        transports = [*dict.fromkeys(transport for _, transport in self.record.square)]
        return {key: v.speed for key, v in judged.items() if v.speed} | {
            (*place, f"{OF_ENGINES} over {transports[0]}", f"that over {transports[1]}"): speed
            for place, speed in self.interactions.items()
            if place in finished and speed.error
        }

    @property
    def caution(self) -> str:
        """What stands above all figures of runs whose ranks shared a GPU; "" of others."""
        sharing = [group for group in self.record.groups if group.ranks_per_gpu]
        if not sharing:
            return ""
        most = max(group.ranks_per_gpu or 0 for group in sharing)
        places = "; ".join(place_text(*group.place) for group in sharing)
        where = f"At {places}: " if len(sharing) < len(self.record.groups) else ""
        return (
            f"{where}{most} ranks shared a GPU: this checks correctness; speeds mean nothing, and "
            "none is judged."
        )

    @property
    def headline(self) -> list[str]:
        """The whole result in a few sentences."""
        if self.record.problem:
            return ["Nothing is decided: part of the record cannot be read."]
        if all(group.ranks_per_gpu for group in self.record.groups):
            return [self.caution, *filter(None, [self.equal_weights]), *self.unequal]
        of_accuracy = headline_of_accuracy(self.accuracies)
        is_unequal = any(verdict.decision in UNEQUAL for verdict in self.accuracies)
        return [
            *filter(None, [self.caution]),
            *headline(self.asked, self.goals),
            *(of_accuracy if self.times or is_unequal else []),
        ]

    @property
    def asked(self) -> list[Verdict]:
        """The verdicts that answer the plan: where it asks for times to an accuracy, those on times
        in place of those on speed."""
        timed = {(time.place, time.first, time.second): time for time in self.times}
        return [
            timed.get((speed.place, speed.first, speed.second), speed) for speed in self.verdicts
        ]

    @property
    def unequal(self) -> list[str]:
        """Which pairs' weights, or more than the plan varies, are not equal, in a sentence each."""
        return [
            said(
                pair,
                claim(pair)
                if pair.differences
                else f"the final weights of {pair.first_label} and {pair.second_label} are not "
                "bit-equal in each block",
            )
            for pair in self.verdicts
            if pair.differences or not all(pair.equal_weights)
        ]

    @property
    def next_step(self) -> tuple[str, str]:
        """How this comparison decides more: a sentence, and the command for it, which is empty if
        none does so. Both are if all is decided, or if this is a kept record or one of other
        sources, which run.py refuses to extend."""
        record, end = self.record, list[str]()
        times = () if record.is_by_turns else self.times  # more turns are no more trainings
        findings = [*self.verdicts, *times, *self.goals]
        later = extension_of(record, findings)
        is_elsewhere = record.folder.resolve().is_relative_to(ROOT / "results")
        is_changed = record.plan.trainers_sha256 not in (None, sources_sha256(record.plan))
        if record.problem or is_elsewhere or is_changed:
            return "", ""
        if not (record.unfinished or later):
            return (TOO_LONG if any(map(is_open, findings)) else ""), ""
        if record.unfinished and is_being_written(record.folder):
            return "The measurement is still running.", ""
        text = "This command continues the measurement:"
        if later:
            what = "narrow the intervals" if record.plan.null else "decide more"
            left = count(math.ceil(later.seconds_left / 60), "minute")
            text = f"To {what}, measure about {left} more on this machine:"
            end = ["--blocks", str(later.blocks)]
        if later and record.plan.blocks is None:
            minutes = max(math.ceil(later.seconds / 60), math.floor(record.plan.minutes) + 1)
            end = ["--minutes", str(minutes), "--until-interval", percentage(later.until_interval)]
        own = [path_from_here("compare/run.py"), str(record.path), "--out", str(record.folder)]
        return text, shlex.join(["python", *own, *end])

    @property
    def equal_weights(self) -> str:
        """Which pairs' whole trainings ended with bit-equal weights, in one sentence. The verdicts
        of the other pairs say where theirs did not."""
        trained = [verdict for verdict in self.verdicts if verdict.equal_weights]
        if not (equal := [verdict for verdict in trained if all(verdict.equal_weights)]):
            return ""
        pairs = "each pair"
        if equal != trained:
            pairs = f"{len(equal)} of {count(len(trained), 'pair')}"
        blocks = min(len(verdict.equal_weights) for verdict in equal)
        return f"The trainings of {pairs} ended with identical weights ({count(blocks, 'block')})."

    @property
    def ours(self) -> str:
        """Which of this project's own settings the runs recorded. Users who start an engine with
        its defaults measure without them."""
        runs = self.record.written
        over_mpi = [run for run in runs if run.environment.transport == "MPI"]
        on_cpus = [run for run in runs if run.environment.device == "cpu"]
        settings = [
            (
                any(run.engine == "ddp" for run in over_mpi),
                "DDP over MPI runs on mpi4py in a Python thread",
            ),
            (
                any(run.engine == "ddp" and run.config.flags.get(VIEW) for run in runs),
                "DDP's gradients are views of its buckets",
            ),
            (
                any(run.engine == "horovod" and run.config.flags.get(SLEEP) for run in on_cpus),
                "Horovod sleeps between two polls of its gradients",
            ),
            (
                any(
                    SLEEP in run.config.flags and run.environment.variables.get(YIELD) != "0"
                    for run in over_mpi
                ),
                "MPI yields its core between two polls",
            ),
        ]
        ours = "; ".join(text for applies, text in settings if applies)
        return ours and f"Not stock: {ours}. The plan stock measures their effect."

    @property
    def provenance(self) -> str:
        """How many blocks the record has, and its head, by which any later change of it is found;
        "" if something is wrong with it."""
        if self.record.problem:
            return ""
        blocks = count(self.record.num_blocks, "block")
        return f"The record: {blocks}, SHA-256 {self.record.head}."

    @property
    def reach(self) -> str:
        """How far one occasion reaches: the first pair's ratio over occasions, as pooling gives it
        for this one alone. "" where occasions need not differ as the recorded ones."""
        first = self.verdicts[0] if self.verdicts else None
        if first is None or first.speed is None or first.obstacle or first.is_null_test:
            return ""
        if not self.record.group_at(*first.place).is_as_recorded or not first.speed.error:
            return ""
        pooled, _ = pool([first.speed])
        at = f" at {place_text(*first.place)}" if len(self.record.groups) > 1 else ""
        return (
            "These intervals are for this occasion. On the recorded machines a ratio differed "
            f"between occasions by a standard deviation of {100 * RECORDED_SPREAD:.2f} %; if it "
            f"does here, {first.first_label} / {first.second_label}{at} over all occasions is "
            f"{ratio_text(pooled)}, {interval_text(pooled)}."
        )

    @property
    def reproduce(self) -> list[str]:
        """The commands that repeat this comparison."""
        plan = self.record.plan
        commits = {run.configuration: run.environment.git_commit for run in self.record.written}
        commit, tool = next(iter(commits.values())) or "", ""
        changed = "  # files were changed since" if commit.endswith("+") else ""
        lines = [f"git checkout {commit.removesuffix('+')}{changed}"] if commit else []
        lines += ["make setup", ". .venv/bin/activate"]
        if plan.side:  # each in its own repository
            tool = "TOOL/"
            lines = ["# In the folder in which run.py was started; TOOL is this project's folder."]
            lines += [f"# {name} had commit {own}." for name, own in commits.items() if own]
            lines.append(". TOOL/.venv/bin/activate")
        inherited = plan.environment.inherited
        lines += [f"export {name}={shlex.quote(value)}" for name, value in inherited.items()]
        entries = [f'  "{key}": {json.dumps(value)}' for key, value in plan_table(plan).items()]
        written = ["cat > plan.json << 'END'", "{", *",\n".join(entries).split("\n"), "}", "END"]
        commands = ["run.py plan.json --out runs/again", "report.py runs/again"]
        return [*lines, *written, *(f"python {tool}compare/{words}" for words in commands)]

    @property
    def limits(self) -> list[str]:
        """What the comparison does not show."""
        runs, workers = self.record.written, ", ".join(map(str, self.record.plan.workers))
        environment = runs[0].environment
        threads = {run.environment.threads for run in runs}
        widths = [
            verdict.speed.corrected_half_width(verdict.family)
            for verdict in self.verdicts
            if verdict.speed and verdict.speed.low
        ]
        limits = [f"Devices other than {environment.device_name}."]
        if environment.device == "cpu":
            limits = [
                "GPUs. This was measured on a CPU: on a GPU a step computes many times faster "
                "and the gradients travel through NCCL, so neither the ratio nor its direction "
                "carries over."
            ]
        if self.record.plan.side:
            limits.append("That the scripts train equally well: only they know what they compute.")
        else:
            limits += [
                f"Numbers of workers other than {workers}: they were not measured.",
                f"Other models and batch sizes. {runs[0].config.arch or 'The model'} at "
                "this batch size has its own ratio of computation to communication; with more "
                "weights or a smaller batch, a step waits longer for its gradients.",
            ]
        if self.accuracies:
            images = max(run.evaluations[-1].num_images for run in runs if run.has_accuracy)
            limits.append(
                f"Other validation images. Each seed was evaluated on the same {images:,}, of "
                f"which one is {100 / images:.2g} points of top-1: intervals cover what the seed "
                "changes, not what other images would."
            )
        if len(environment.hosts) == 1:
            limits.append(
                "Networks. All workers ran on one host, where messages "
                "pass through memory or the loopback interface. Between hosts, latency and "
                "bandwidth decide, and the engines may differ in other ways."
            )
        if environment.device == "cpu" and len(threads) > 1:
            limits.append(
                f"Scaling to more machines. All workers share {count(environment.cores, 'core')}; "
                "the more workers, the fewer threads each has. The column “scaling” shows how well "
                "those cores were used, not what a second machine would bring."
            )
        if widths:
            shown = percent_text(HALF_WIDTHS_OF_80_PERCENT * max(widths))
            limits += [
                "Other occasions. An interval describes this hour on this machine. When "
                "comparisons were repeated on the recorded machines, their ratios differed between "
                "occasions by a standard deviation of up to 6.1 % (stock engines, two occasions) "
                "and up to 3.1 % (squares of engines and transports). Measure again at "
                "other hours, and give report.py all folders.",
                f"Small differences. A difference must be about {shown} to be found in 80 of 100 "
                "such comparisons, and two thirds of that to be found in 50. Some verdicts may "
                "show smaller ones.",
            ]
        return limits


class SideBySide:
    """Several reports side by side: before and after a change, or two machines.

    Their runs were not made in the same blocks. A ratio between two of them would include whatever
    changed on the machines in between, so there is none. The ratios that each measured within its
    own blocks are pooled if they answer the same question.
    """

    def __init__(self, reports: Sequence[Report]):
        self.reports = reports
        records = [report.record for report in reports]
        self.names = shortest_unique_names([record.folder for record in records])
        # Their full names would make a table too wide.
        self.letters = [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(reports))]
        self.cautions = [
            f"{letter}: {report.caution}"
            for letter, report in zip(self.letters, reports, strict=True)
            if report.caution
        ]
        # In what the comparisons differ, apart from the order and the noise of their runs: a value
        # for each comparison. Several values within a comparison are joined.
        settings = dict.fromkeys(
            name
            for record in records
            for run in record.written
            for name in run.config.flags | run.environment.variables
            if name not in NOT_SETTINGS
        )
        values: dict[str, Sequence[str]] = {
            "measured by": [record.plan.measure for record in records],
            "scripts": [json.dumps(record.plan.scripts, sort_keys=True) for record in records],
        }
        for name in dict.fromkeys((*ENVIRONMENT, *settings)):
            values[name] = [without_paths(values_text(record, name)) for record in records]
        self.differences = {name: texts for name, texts in values.items() if len({*texts}) > 1}
        others = [name for name, texts in self.differences.items() if asks_other(name, texts)]
        pooled = over_occasions(
            [report.ratios for report in reports],
            all(group.is_as_recorded for record in records for group in record.groups),
        )
        self.occasions = [] if others else pooled
        is_null_test = any(record.plan.null for record in records)
        self.headline = "" if is_null_test else headline_of_occasions(self.occasions)
        self.not_pooled = ""
        if pooled and others:
            self.not_pooled = (
                "These comparisons are not pooled over occasions, because they ask different "
                f"questions. They differ in: {', '.join(others)}."
            )


def asks_other(name: str, values: Sequence[str]) -> bool:
    """Return whether comparisons with these values of a setting, or of a field of the environment,
    ask different questions. Names of hosts and GPUs may differ. A setting, or a field of the
    environment, that a record lacks counts as its default: the version that wrote the record did
    not have it yet."""
    if name in ("hosts", "CUDA_VISIBLE_DEVICES"):
        values = [str(value.count(",")) for value in values]
    default = getattr(Config(), name, getattr(Environment, name, NOT_RECORDED))
    known = short(default) or "none"
    meant = {known if value == NOT_RECORDED else value for value in values}
    return name not in OF_OCCASION and len(meant) > 1


def values_text(record: Record, name: str) -> str:
    """Return the values of a setting, or of a field of the environment, in the cells' order."""
    runs = sorted(record.written, key=lambda run: (run.case, run.workers, run.configuration))
    recorded = (
        vars(run.environment)
        if name in ENVIRONMENT
        else run.config.flags | run.environment.variables
        for run in runs
    )
    values = (fields.get(name, NOT_RECORDED) for fields in recorded)
    return "; ".join(dict.fromkeys(short(value) or "none" for value in values))


def notices(record: Record) -> list[tuple[str, list[str]]]:
    """Return warnings and missing runs as lists with headings; those that do not affect a speed
    verdict have a list of their own."""
    plan, known, of_runs = record.plan, record.plan.known(), notices_of_runs(record)
    found = {
        WARNINGS: [
            *plan.warnings,
            *unfinished_groups(record),
            *(doubtful_blocks(record) if plan.pairs() else ()),
            *correlated_blocks(record),
            *same_code(record),
            *no_own_code(record),
            *of_runs[WARNINGS],
            *disturbed_blocks(record),
        ],
        MISSING: [
            *(
                f"{name}: {WITHOUT_HOROVOD if known[name].engine == 'horovod' else WITHOUT_MPI}"
                for name in plan.left_out
            ),
            *of_runs[MISSING],
            *([f"unreadable: {record.problem}; {TO_MEND}"] if record.problem else []),
        ],
        UNREACHED: [
            not_reached_text(run)
            for group in (record.groups if has_seeds(record) else ())
            for run in not_reached(group)
        ],
        MEMORY: [*memory_texts(record)],
        ASIDE: [
            *of_runs[ASIDE],
            *(
                f"{failure.place}: failed, and was run again; see {record.output_of(failure)}"
                for failure in record.earlier_failures
            ),
        ],
    }
    return [(title, lines) for title, lines in found.items() if lines]


def notices_of_runs(record: Record) -> dict[str, list[str]]:
    """Return, by heading, which whole runs are missing, and which other processes disturbed."""
    judged = {name for pair in record.plan.pairs() for name in pair}
    found = defaultdict[str, list[str]](list)
    for run in record.runs:
        folder = run.folder.relative_to(record.folder)
        matters = not record.is_by_turns and run.block > 0 and run.configuration in judged
        if not run.is_complete:
            found[MISSING if matters else ASIDE].append(f"{folder}: {trouble(record, run)}")
        elif run.is_disturbed:
            cores = count(run.environment.cores, "core")
            found[WARNINGS if matters else ASIDE].append(
                f"{folder}: other processes kept {run.other_load:.1f} of {cores} busy"
            )
    return found


def unfinished_groups(record: Record) -> Iterator[str]:
    """Yield a warning for each group of which nothing is decided yet."""
    for place, so_far in record.unfinished.items():
        why = (
            "nothing is decided, because part of the record cannot be read"
            if record.problem
            else "the measurement is not finished, so nothing is decided; the same command of "
            f"run.py continues it: {so_far}"
        )
        yield f"{place_text(*place)}: {why}"


def disturbed_blocks(record: Record) -> Iterator[str]:
    """Yield a warning for each block of turns that never was quiet."""
    for group in record.groups:
        for block in group.turns:
            if block.other_load > block.quiet_cores:
                yield (
                    f"turns, {place_text(*group.place)}, block {block.number}: other processes "
                    f"kept up to {block.other_load:.2f} cores busy in the rounds that count"
                )


def memory_texts(record: Record) -> Iterator[str]:
    """Yield which sides' memory grows, and which take much from the system in each step."""
    sides = [*record.configurations]
    for group in record.groups:
        told = [leak_text(leak) for leak in leaks(group.turns, sides)]
        told += [pages_text(pages) for pages in new_pages(group.turns, sides)]
        yield from (f"{place_text(*group.place)}: {text}" for text in told)


def leak_text(leak: Leak) -> str:
    """Return what the report says of memory that grows."""
    grown = three_digits(1e-6 * leak.bytes_per_100_steps)
    return (
        f"the {KINDS[leak.kind]} of {leak.side} grew by {grown} MB in 100 steps, in each of "
        f"{leak.blocks} blocks: a leak, or a cache that fills up slowly"
    )


def pages_text(pages: NewPages) -> str:
    """Return what the report says of memory that is taken from the system in each step."""
    return (
        f"each rank of {pages.side} takes {pages.per_step:,.0f} pages from the system in each "
        f"step, which is at least {100 * pages.share:.0f} % of its time. Their number differs from "
        f"launch to launch; to avoid it, set {KEEP_MEMORY} for each side"
    )


def doubtful_blocks(record: Record) -> Iterator[str]:
    """Yield warnings of turns and blocks from which intervals follow less surely, each with the
    places that it concerns."""
    places = defaultdict[str, list[str]](list)
    error = 0.005 / len(record.groups)  # at most 1 % false warnings in all groups together
    for group in record.groups:
        if group.place in record.unfinished:
            continue
        place, scatter = place_text(*group.place), group.scatter
        steps = [number for block in group.turns for number in block.steps.values()]
        if 1 in steps and not record.plan.side:
            places[OF_ONE_STEP].append(place)
        if group.num_blocks == MIN_BLOCKS:
            places[FEW_BLOCKS].append(place)
        if scatter and scatter.variance_ratio > scatter.quantile(1 - error):
            places[MUCH_SCATTER].append(f"{place} ({scatter.variance_ratio:.3g})")
        if scatter and scatter.variance_ratio < scatter.quantile(error):
            places[LITTLE_SCATTER].append(f"{place} ({scatter.variance_ratio:.2g})")
    for text, concerned in places.items():
        yield f"{'; '.join(concerned)}: {text}"


def correlated_blocks(record: Record) -> Iterator[str]:
    """Yield a warning for each pair whose blocks resemble those before them."""
    num_estimates = len(record.plan.pairs()) * len(record.groups)
    for group in record.groups:
        for (first, second), ratio in group.estimates.items():
            lag, p_value = ratio.serial_correlation()
            if p_value < 0.01 / num_estimates:  # at most 1 % false warnings in all of them together
                yield (
                    f"{place_text(*group.place)}, {first} / {second}: each block's ratio resembles "
                    f"the one before (lag-1 correlation {lag:.2f}); the interval assumes "
                    "independent blocks, so it is too narrow"
                )


def same_code(record: Record) -> Iterator[str]:
    """Yield a warning for each pair of scripts that ran the same code in each block though their
    commits differ."""
    ran = {(side.block, side.configuration): side.environment for side in record.sides}
    for first, second in record.plan.pairs():
        in_blocks = [
            (ran[block, first], ran[block, second])
            for block, name in ran
            if name == first and (block, second) in ran
        ]
        commits = [(a.git_commit, b.git_commit) for a, b in in_blocks]
        differ = all(a and b and a != b for a, b in commits)
        if commits and differ and all(a.code_sha256 == b.code_sha256 for a, b in in_blocks):
            yield (
                f"{first} and {second} ran the same code, though their commits differ "
                f"({', '.join(map(short, commits[0]))}): the commits change no module that the "
                "scripts load"
            )


def no_own_code(record: Record) -> Iterator[str]:
    """Yield a warning for each script that loaded nothing of its work tree."""
    unknown = (
        side.configuration
        for side in record.sides
        if side.environment.script and not side.environment.code_sha256
    )
    for name in dict.fromkeys(unknown):
        yield (
            f"no module of {name} came from its work tree, but from an installed package: the "
            "record cannot say which code ran"
        )


def trouble(record: Record, run: RunRecord) -> str:
    """Say what became of a run that is not complete."""
    if run.status == "not run":
        return run.status
    code = "" if run.exit_code is None else f" with exit code {run.exit_code}"
    failure = record.failure(str(run.folder.relative_to(record.folder)))
    if run.status == "unreadable":
        return f"unreadable: {failure.output}"
    return f"{run.status}{code}; see {record.output_of(failure)}"
