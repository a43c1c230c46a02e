"""What --tune found, in words and as the file of knobs that it writes."""

import os
import platform
import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare.evidence.load import most_load
from compare.evidence.paired import Estimate
from compare.evidence.records import ENGINES
from compare.plan.configurations import Configuration
from compare.plan.options import script_path
from compare.plan.plan import Plan
from compare.running.launch import utc_now, utc_stamp
from compare.running.search import Trial, is_gain
from recipe.errors import UserError
from recipe.files import replace_file
from recipe.knobs import Knobs, knobs_text, read_all_knobs


@dataclass(frozen=True)
class Found:
    """What a search found for one engine."""

    configuration: Configuration
    knobs: Knobs
    tried: tuple[Trial, ...]
    against_defaults: Estimate | None  # speed of the file's knobs over the defaults; None: no knobs
    environment: dict[str, Any]  # environment.json of one of its runs
    other_load: float | None = None  # cores that others kept busy in the median run

    @property
    def holds(self) -> bool:
        """Tell whether the gain was there again in the runs that had no part in the choice."""
        return self.against_defaults is not None and is_gain(self.against_defaults)


def load_line(found: Found) -> str:
    """Say that others used the machine meanwhile, if they did so more than a little."""
    cores = found.environment.get("cores") or os.cpu_count() or 1
    if found.other_load is None or found.other_load <= most_load(cores):
        return ""
    return (
        f"other processes kept {found.other_load:.1f} of {cores} cores busy in the median run: "
        "while they rest, smaller gains can be shown"
    )


def ratio_words(estimate: Estimate) -> str:
    """Say a ratio with its interval and rounds."""
    interval = ""
    if estimate.low is not None and estimate.high is not None:
        interval = f", 95 % interval {estimate.low:.3f} to {estimate.high:.3f}"
    return f"{estimate.ratio:.3f} times the speed{interval}, {estimate.blocks} rounds"


def trial_lines(trials: Sequence[Trial]) -> list[str]:
    """Return the lines that tell what became of a knob's values."""
    lines = [f"  {trials[0].knob}"] if trials else []
    for trial in trials:
        if trial.failed or trial.estimate is None:
            what = "a run failed: left out"
        else:
            what = f"{ratio_words(trial.estimate)}: {'kept' if trial.kept else 'not kept'}"
        lines.append(f"    {trial.value.shown:<18} {what}")
    return lines


def found_record(found: Found) -> dict[str, Any]:
    """Return all that was tried for one engine, for a reader of tuned.json."""
    check = found.against_defaults
    return {
        "configuration": found.configuration.name,
        "settings": found.knobs.settings,
        "variables": found.knobs.variables,
        "against_defaults": check and check.figures(),
        "holds": found.holds,
        "other_load": found.other_load,
        "tried": [
            {
                "knob": trial.knob,
                "value": trial.value.shown,
                "settings": dict(trial.value.settings),
                "variables": dict(trial.value.variables),
                "estimate": trial.estimate and trial.estimate.figures(),
                "failed": trial.failed,
                "kept": trial.kept,
            }
            for trial in found.tried
        ],
    }


def write_file(path: Path, found: Sequence[Found], plan: Plan, argv: Sequence[str]) -> None:
    """Write the file of knobs. Tables of an engine that was not tuned now are taken over from the
    file that is there, which is kept as FILE.old."""
    kept: dict[str, Knobs] = {}
    if path.exists():
        tuned = {one.configuration.engine for one in found}
        try:
            old = read_all_knobs(path)
        except UserError as error:
            print(f"warning: {error}; nothing is taken over from it")
            old = {}
        kept = {engine: knobs for engine, knobs in old.items() if engine not in tuned}
        aside = path.with_name(f"{path.name}.old")
        if aside.exists():  # which may have been written by hand
            aside = path.with_name(f"{path.name}.old-{utc_stamp()}")
        shutil.copyfile(path, aside)
        print(f"the file that was there is now {aside}")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, file_text(found, kept, plan, argv))
    read_all_knobs(path)


def file_text(
    found: Sequence[Found], kept: Mapping[str, Knobs], plan: Plan, argv: Sequence[str]
) -> str:
    """Return the text of a file of knobs: where they come from, what each gained, the tables."""
    where = next((one.environment for one in found if one.environment), {})
    hosts = where.get("hosts") or [platform.node()]
    versions = {
        "torch": where.get("torch"),
        "Horovod": next((v for one in found if (v := one.environment.get("horovod"))), None),
        "MPI": next((v for one in found if (v := one.environment.get("mpi"))), None),
    }
    told = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    facts = [
        f"Knobs of the two engines, for the trainers' --knobs. Found {utc_now()[:10]} by",
        f"    {shlex.join(['python', script_path(), *argv])}",
        f"with {max(plan.workers)} workers on {len(hosts)} host(s) ({', '.join(hosts)}), "
        f"{where.get('device_name', 'a device that is not known')}; {told}.",
        "Each gain is a ratio of speeds, value / best before it, with its 95 % interval. On "
        "another machine or network, with another model or number of workers, other values are "
        "faster: make the file anew. Flags and variables of the environment win over it.",
    ]
    blocks = ["\n".join(line for fact in facts for line in commented(fact))]
    for one in found:
        engine = one.configuration.engine
        lines = [f"{ENGINES[engine]} ({one.configuration.name})"]
        for trial in one.tried:
            if trial.kept and trial.estimate is not None:
                lines.append(
                    f"    {trial.knob}, {trial.value.shown}: {ratio_words(trial.estimate)}"
                )
        if one.against_defaults is None:
            lines.append("    nothing was shown to be faster than the defaults")
        else:
            lines.append(f"    all against the defaults: {ratio_words(one.against_defaults)}")
        if line := load_line(one):
            lines.append(f"    {line}")
        if one.against_defaults is not None and not one.holds:
            lines.append("    which shows no gain: take the # away to use them all the same")
        tables = knobs_text({engine: one.knobs}).rstrip("\n")
        if not one.holds:
            tables = "\n".join(f"# {line}".rstrip() for line in tables.splitlines())
        head = "\n".join(line for text in lines for line in commented(text))
        blocks.append(head if one.knobs == Knobs() else f"{head}\n{tables}")
    for engine, knobs in kept.items():
        blocks.append(f"# As it was in the file before\n{knobs_text({engine: knobs})}".rstrip("\n"))
    return "\n\n".join(blocks) + "\n"


def commented(text: str) -> list[str]:
    """Return a text as lines of a comment; one that is indented is a command or a row, and stays
    whole."""
    if text.startswith(" "):
        return [f"# {line}" for line in text.splitlines()]  # quoted words may have several
    return textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="# ")
