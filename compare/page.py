"""The report as one self-contained HTML page."""

import datetime
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from compare import plots
from compare.findings import (
    Fact,
    Row,
    Verdict,
    all_workers,
    compare_facts,
    count,
    difference_text,
    loss_text,
    short,
    three_digits,
    troubles,
)
from compare.records import Comparison

# What environment.json says of the machine and the software, in the order of the page.
MACHINE = ("hosts", "device", "device_name", "cpu_model", "cores")
SOFTWARE = ("python", "torch", "torchvision", "horovod", "mpi", "cuda", "git_commit")


def render_page(comparison: Comparison, rows: list[Row], verdicts: list[Verdict]) -> str:
    """Return the page: no request goes out of it, so that it can be sent, archived and printed."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "count": count,
        "loss_text": loss_text,
        "three_digits": three_digits,
        "breakable": breakable,
        "unbroken": unbroken,
    }
    facts = {
        workers: compare_facts(run for run in comparison.complete if run.workers == workers)
        for workers in all_workers(comparison)
    }
    return environment.get_template("report.html.jinja").render(
        title=page_title(comparison),
        subtitle=subtitle(comparison),
        created=created_text(comparison),
        folder=comparison.folder.name,
        verdicts=verdicts,
        difference_text=difference_text,
        verdict_plot=plots.plot_verdicts(verdicts),
        troubles=troubles(comparison),
        workers=all_workers(comparison),
        facts=fact_lines({n: [f for f in told if not f.is_flag] for n, told in facts.items()}),
        flags=fact_lines({n: [f for f in told if f.is_flag] for n, told in facts.items()}),
        rows=rows,
        plots=plots.draw_plots(comparison),
        series=list(enumerate(comparison.plan["configurations"])),
        commands=commands(comparison),
        machine=environment_lines(comparison, MACHINE),
        software=environment_lines(comparison, SOFTWARE),
        transports=transports(comparison),
        variables=comparison.plan["environment"],
        reproduce=reproduce_lines(comparison),
        limits=limits(comparison, verdicts),
    )


def breakable(name: str) -> Markup:
    """Let a long name break after its underscores: a phone's column is narrow."""
    return Markup(escape(name).replace("_", Markup("_<wbr>")))


def unbroken(command: str) -> Markup:
    """Keep each word of a command whole where a line ends: `--seed` has no break after a dash."""
    return Markup(" ").join(Markup("<span>{}</span>").format(word) for word in command.split(" "))


def page_title(comparison: Comparison) -> str:
    engines = {run.engine for run in comparison.complete}
    if engines == {"ddp", "horovod"}:
        return "PyTorch DDP and Horovod, the same training side by side"
    return "One training, started in several ways"


def subtitle(comparison: Comparison) -> str:
    """Say what was trained on what: the figures mean nothing without it."""
    run = comparison.complete[0]
    config, environment = run.config, run.environment
    data = config.get("data") or config.get("train_dir") or "the given images"
    device = environment["device_name"] or environment["cpu_model"]
    parts = [
        f"{config.get('arch', 'A model')} on {data}",
        f"batch {config['batch_size']} a worker" if "batch_size" in config else "",
        str(config.get("precision", "")),
        f"{device}, {count(environment['cores'], 'core')}",
    ]
    return " · ".join(part for part in parts if part)


def created_text(comparison: Comparison) -> str:
    created = datetime.datetime.fromisoformat(comparison.plan["created_utc"])
    return f"{created.day} {created:%B %Y, %H:%M} UTC"


def fact_lines(facts: dict[int, list[Fact]]) -> list[dict[str, Any]]:
    """Arrange facts for the page: a line each, a cell for each number of workers."""
    fields = list(dict.fromkeys(fact.field for told in facts.values() for fact in told))
    lines = []
    for field in fields:
        cells = []
        for told in facts.values():
            fact = next((fact for fact in told if fact.field == field), None)
            if fact is None:
                cells.append({"text": "", "equal": True})
            elif fact.is_equal:
                text = short(fact.values[0][1])
                if fact.varies_over_blocks:
                    text += ", another in each block"
                cells.append({"text": text, "equal": True})
            else:
                cells.append({"text": difference_text(fact).split(": ", 1)[1], "equal": False})
        one = len({cell["text"] for cell in cells}) == 1 and all(c["equal"] for c in cells)
        lines.append(
            {
                "field": field,
                "cells": cells[:1] if one else cells,
                "one": one,
                "equal": all(cell["equal"] for cell in cells),
            }
        )
    return sorted(lines, key=lambda line: line["equal"])  # unequal ones first, else as told


def commands(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the commands in the order in which they ran."""
    return [
        {
            "name": run.name,
            "block": run.block,
            "text": run.command or shlex.join(run.environment.get("command", [])),
            "status": run.status,
        }
        for run in comparison.runs
    ]


def environment_lines(comparison: Comparison, fields: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each field's value; all values where the runs do not agree."""
    lines = []
    for field in fields:
        by_value: dict[str, list[str]] = {}
        for run in comparison.complete:
            names = by_value.setdefault(short(run.environment[field]), [])
            if run.configuration not in names:
                names.append(run.configuration)
        text = "; ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())
        lines.append((field, text if len(by_value) > 1 else next(iter(by_value))))
    return lines


def transports(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Return by which way each configuration's gradients really travelled."""
    found = {
        (
            run.configuration,
            run.launcher,
            run.summary["transport"],
            short(run.environment["threads"]),
            run.workers,
        )
        for run in comparison.complete
    }
    return [
        (f"{name}, {count(n, 'worker')}", launcher, transport, threads)
        for name, launcher, transport, threads, n in sorted(found)
    ]


def reproduce_lines(comparison: Comparison) -> list[str]:
    """Return the commands that make this comparison again."""
    plan = comparison.plan
    commit = comparison.complete[0].environment["git_commit"]
    words = ["python", "compare/run.py", "--configurations", *plan["configurations"]]
    words += ["--workers", *map(str, plan["workers"])]
    words += ["--blocks", str(plan["blocks"]), "--seed", str(plan["seed"])]
    if plan["trainer_arguments"]:
        words += ["--", *plan["trainer_arguments"]]
    inherited = plan["environment"].get("inherited", {})
    lines = [f"git checkout {commit}"] if commit else []
    lines += ["make setup", ". .venv/bin/activate"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in inherited.items()]
    return [*lines, shlex.join(words), "python compare/report.py"]


def limits(comparison: Comparison, verdicts: list[Verdict]) -> list[str]:
    """Say what the comparison does not show."""
    run = comparison.complete[0]
    measured = all_workers(comparison)
    numbers = " and ".join(map(str, measured))
    lines = []
    if run.environment["device"] == "cpu":
        lines.append(
            "GPUs. This was measured on a CPU: on a GPU a step computes many times faster and the "
            "gradients travel through NCCL, so that neither the ratio nor its direction carries "
            "over."
        )
    else:
        lines.append(f"Other devices than {run.environment['device_name']}.")
    lines.append(
        f"Other numbers of workers. {numbers} {'was' if len(measured) == 1 else 'were'} measured; "
        "the lines in the plots end there because the knowledge does."
    )
    if len(run.environment["hosts"]) == 1:
        lines.append(
            "Networks. All workers ran on one host, where messages pass through its memory or its "
            "loopback. Between hosts, latency and bandwidth decide, and the engines may differ in "
            "other ways."
        )
    threads = {run.workers: run.environment["threads"] for run in comparison.complete}
    if run.environment["device"] == "cpu" and len(set(threads.values())) > 1:
        told = ", ".join(f"{n} x {count(threads[n], 'thread')}" for n in sorted(threads))
        lines.append(
            f"Scaling to more machines. All workers share {count(run.environment['cores'], 'core')}"
            f" ({told}): the column “scaling” tells how well those cores were used, not "
            "what a second machine would bring."
        )
    lines.append(
        f"Other models and batches. {run.config.get('arch', 'The model')} at this batch has its "
        "own ratio of computing to communicating; a model with more weights, or a smaller batch, "
        "waits longer for its gradients."
    )
    for verdict in verdicts:
        if verdict.speed and verdict.speed.low and verdict.speed.high:
            half = 100 * ((verdict.speed.high / verdict.speed.low) ** 0.5 - 1)
            percent = f"{half:.2g}" if half < 10 else f"{half:.0f}"
            lines.append(
                f"Small differences. With {count(verdict.speed.blocks, 'block')} at "
                f"{plots.workers_text(verdict.workers)}, {verdict.first} and {verdict.second} "
                f"would have to differ by more than about {percent} % to be told apart."
            )
    return lines
