"""The learning curves of trainings that no comparison has started: a table, and a page with plots.
There is no verdict, since nothing says that they were made alike."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from compare.evidence.equality import conditions_of
from compare.evidence.runs import RunRecord, read_training
from compare.evidence.words import count, short
from compare.page.chart import template
from compare.page.learning import Trainings, learning_plots
from compare.page.report import NOT_SETTINGS
from compare.page.tables import Column, Table, TableCell, spread_cell, table_text
from compare.plan.configurations import ENGINES
from recipe.errors import UserError
from recipe.settings.flags import FLAGS

TOLD = {"engine", "transport", "world_size"}  # in words of their own


def column(name: str, figure: Callable[[RunRecord], float], pattern: str, note: str = "") -> Column:
    """Return the column of a figure of trainings: its median over the seeds, with the range."""

    def cell(of_one: Trainings) -> TableCell:
        values = [figure(run) for run in of_one.runs]
        return spread_cell((median(values), min(values), max(values)), pattern)

    return Column(name, cell, note=note)


COLUMNS = (
    Column("training", lambda row: TableCell(row.label, series=row.index), is_number=False),
    Column("seeds", lambda row: len(row.runs), "{}"),
    column("epochs", lambda run: run.summary.epochs, "{:.3g}"),
    column("final top-1, %", lambda run: run.evaluations[-1].top1, "{:.2f}"),
    column("final top-5, %", lambda run: run.evaluations[-1].top5, "{:.2f}"),
    column("final loss", lambda run: run.evaluations[-1].loss, "{:.4g}"),
    column(
        "seconds",
        lambda run: run.summary.total_seconds,
        "{:,.1f}",
        "Of the last evaluation: medians over seeds, with the lowest and the highest. Seconds: on "
        "the training clock, evaluations included.",
    ),
)


def read_trainings(folders: Sequence[Path]) -> list[Trainings]:
    """Read complete run folders. Those that differ in nothing but the seed are one line. UserError
    if a folder, or such a training with one seed, is given twice: it would count as two seeds."""
    for folder, number in Counter(folder.resolve() for folder in folders).items():
        if number > 1:
            raise UserError(f"{folder}: is given {number} times; give each run folder once")
    runs = [read_training(folder) for folder in folders]
    for run in runs:
        if not run.has_accuracy:
            raise UserError(
                f"{run.folder}: has no accuracies of real images, so no learning curves"
            )
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(json.dumps(identity(run), sort_keys=True), []).append(run)
    for of_one in groups.values():
        by_seed: dict[int | None, RunRecord] = {}
        for run in of_one:
            if run.config.seed in by_seed:
                raise UserError(
                    f"{run.folder}: is the same training as {by_seed[run.config.seed].folder}, "
                    f"also with seed {run.config.seed}, so it is no further seed; leave one of "
                    "them out"
                )
            by_seed[run.config.seed] = run
    labels = labels_of_groups([identity(of_one[0]) for of_one in groups.values()])
    return [
        Trainings(label, index, of_one)
        for index, (label, of_one) in enumerate(zip(labels, groups.values(), strict=True))
    ]


def identity(run: RunRecord) -> dict[str, str]:
    """Return all that tells a training from others but its seed, by name: its settings, and what
    it ran on."""
    environment = run.environment
    over = "" if environment.transport == "none" else f" over {environment.transport}"
    settings = {name: value for name, value in run.config.flags.items() if name not in NOT_SETTINGS}
    return {
        **{name: short(value) for name, value in (conditions_of(run) | settings).items()},
        "engine": f"{ENGINES[environment.engine].title}{over}",
        "world_size": count(environment.world_size, "worker"),
    }


def labels_of_groups(identities: Sequence[dict[str, str]]) -> list[str]:
    """Name each of several trainings by its engine, and by what else differs between them; its
    software and its start only where those of one engine differ."""
    names = dict.fromkeys(name for one in identities for name in one)
    labels = []
    for one in identities:
        peers = [other for other in identities if other["engine"] == one["engine"]]
        differ = [
            name
            for name in names
            for among in [identities if name in FLAGS or name in TOLD else peers]
            if len({other.get(name) for other in among}) > 1
        ]
        own = [one["world_size"]] if "world_size" in differ else []
        own += [f"{name} {one.get(name, 'none')}" for name in differ if name not in TOLD]
        labels.append(", ".join([one["engine"], *own]))
    return labels


def trainings_text(trainings: Sequence[Trainings]) -> str:
    """Return the table of trainings for a terminal."""
    return table_text(table_of(trainings))


def trainings_page(trainings: Sequence[Trainings]) -> str:
    """Return the page of learning curves."""
    page = template("trainings.html.jinja")
    return str(page.render(table=table_of(trainings), plots=learning_plots(trainings)))


def table_of(trainings: Sequence[Trainings]) -> Table:
    """Return the table of trainings, a row for those that differ in the seed alone."""
    notes = " ".join(filter(None, (column.note for column in COLUMNS)))
    return Table("Trainings", notes, COLUMNS, trainings)
