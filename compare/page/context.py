"""What stands around the figures of a report: what was trained on what, what it does not show, and
how to reproduce it."""

import datetime
import shlex
from collections.abc import Callable
from typing import Any

from compare.evidence.paired import REACH_OF_80_PERCENT
from compare.evidence.records import Comparison, RunRecord
from compare.evidence.verdicts import Verdict
from compare.evidence.words import count, percent_text
from compare.plan.plan_file import plan_words

TITLES = {"ddp": "PyTorch DDP", "horovod": "Horovod"}


def page_title(comparison: Comparison) -> str:
    engines = {run.engine for run in comparison.written}
    if comparison.plan["null"]:
        return "A null test: each configuration against itself"
    if engines == TITLES.keys():
        return "PyTorch DDP and Horovod, the same training side by side"
    if len(comparison.plan["configurations"]) == 1:
        (engine,) = engines
        return f"The training under {TITLES.get(engine, engine)} alone"
    return "One training, started in several ways"


def subtitle(comparison: Comparison) -> str:
    """Say what was trained on what: the figures mean nothing without it."""
    run = comparison.written[0]
    environment = run.environment
    data = all_values(comparison, lambda run: run.config.data or run.config.train_dir)
    models = all_values(comparison, lambda run: run.config.arch)
    batches = all_values(comparison, lambda run: run.config.batch_size)
    precisions = all_values(comparison, lambda run: run.config.precision)
    device = environment.device_name or environment.cpu_model
    hosts = len(environment.hosts)
    parts = [
        f"{models or 'A model'} on {data or 'the given images'}",
        f"batch {batches} a worker" if batches else "",
        precisions,
        f"{device}, {count(environment.cores, 'core')}" + (f", {hosts} hosts" * (hosts > 1)),
    ]
    return " · ".join(part for part in parts if part)


def all_values(comparison: Comparison, value_of: Callable[[RunRecord], Any]) -> str:
    """Name the values that a setting has in the comparison."""
    values = dict.fromkeys(value_of(run) for run in comparison.written)
    return " and ".join(str(value) for value in values if value is not None)


def created_text(comparison: Comparison) -> str:
    created = datetime.datetime.fromisoformat(comparison.plan["created_utc"])
    return f"{created.day} {created:%B %Y, %H:%M} UTC"


def reproduce_lines(comparison: Comparison) -> list[str]:
    """Return the commands that make this comparison again."""
    plan = comparison.plan
    assert comparison.record is not None
    commit = comparison.written[0].environment.git_commit
    inherited = plan["environment"].get("inherited", {})
    lines = [f"git checkout {commit}"] if commit else []
    lines += ["make setup", ". .venv/bin/activate"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in inherited.items()]
    if plan["plan_file"]:
        lines.append(f"# in flags, what {plan['plan_file']} asked for:")
    words = ["python", "compare/run.py", *plan_words(comparison.record)]
    return [*lines, shlex.join(words), "python compare/report.py"]


def limits(comparison: Comparison, verdicts: list[Verdict]) -> list[str]:
    """Say what the comparison does not show."""
    run = comparison.written[0]
    measured = comparison.workers
    numbers = " and ".join(filter(None, [", ".join(map(str, measured[:-1])), str(measured[-1])]))
    lines = []
    if run.environment.device == "cpu":
        lines.append(
            "GPUs. This was measured on a CPU: on a GPU a step computes many times faster and the "
            "gradients travel through NCCL, so neither the ratio nor its direction carries over."
        )
    else:
        lines.append(f"Other devices than {run.environment.device_name}.")
    lines.append(
        f"Other numbers of workers. {numbers} {'was' if len(measured) == 1 else 'were'} measured; "
        "nothing is known beyond them."
    )
    if len(run.environment.hosts) == 1:
        lines.append(
            "Networks. All workers ran on one host, where messages pass through its memory or its "
            "loopback. Between hosts, latency and bandwidth decide, and the engines may differ in "
            "other ways."
        )
    threads = {run.workers: run.environment.threads for run in comparison.written}
    if run.environment.device == "cpu" and len(set(threads.values())) > 1:
        told = ", ".join(f"{n} x {count(threads[n], 'thread')}" for n in sorted(threads))
        lines.append(
            f"Scaling to more machines. All workers share {count(run.environment.cores, 'core')}"
            f" ({told}): the column “scaling” shows how well those cores were used, not "
            "what a second machine would bring."
        )
    lines.append(
        f"Other models and batches. {run.config.arch or 'The model'} at this batch has its "
        "own ratio of computing to communicating; a model with more weights, or a smaller batch, "
        "waits longer for its gradients."
    )
    reaches = [v.corrected_reach for v in verdicts if v.speed and v.speed.low is not None]
    if reaches:
        least, most = (
            percent_text(REACH_OF_80_PERCENT * end) for end in (min(reaches), max(reaches))
        )
        size = least if least == most else f"{least} to {most} (it depends on the verdict)"
        lines.append(
            f"Small differences. Such a comparison shows a difference of {size} in four cases of "
            "five, and one of two thirds of that in half."
        )
    return lines
