"""Names of configurations, by what their runs really used."""

from compare.evidence.record import Record
from compare.for_scripts.comparison_side import DELAY
from compare.plan.configurations import ENGINES

# Settings that undo this project's own: with them an engine is stock (docs/README.md, Words).
STOCK = {
    "--no-gradient-as-bucket-view",
    "--no-sleeping-poll",
    "OMPI_MCA_mpi_yield_when_idle=0",
}


def labels_of(record: Record) -> dict[str, str]:
    """Name each configuration by its engine, by the transport that really carried its gradients,
    and by its own settings, as in "DDP over Gloo with --static-graph". If two would have the same
    label, it also gets its launcher or its own name; the second one of a null test's pair has the
    first one's. A user's own script keeps its name."""
    names = [*record.configurations]
    if record.plan.side:
        return {name: name for name in names}
    first_of = {twin: name for name, twin in record.plan.pairs()} if record.plan.null else {}
    short = {name: used_and_set(record, name) for name in names if name not in first_of}
    labels = dict[str, str]()
    for name in names:
        if name in first_of:
            is_delayed = DELAY in record.configurations[name].environment
            labels[name] = f"{labels[first_of[name]]}, {'delayed' if is_delayed else 'again'}"
            continue
        label = short[name]
        if [*short.values()].count(label) > 1:
            label = used_and_set(record, name, is_launcher_told=True)
        labels[name] = f"{label} as {name}" if label in labels.values() else label
    return labels


def used_and_set(record: Record, configuration: str, is_launcher_told: bool = False) -> str:
    """Return a label of what a configuration's runs used and what it sets; its name if its runs
    used different engines, transports or launchers."""
    runs = [run for run in record.written if run.configuration == configuration]
    used = {(run.engine, run.environment.transport, run.launcher) for run in runs}
    if len(used) != 1:
        return configuration
    [(engine, transport, launcher)] = used
    label = ENGINES[engine].title
    label += "" if transport == "none" else f" over {transport}"
    label += f" by {launcher}" if is_launcher_told else ""
    planned = record.configurations[configuration]
    settings = [*planned.flags, *(f"{name}={value}" for name, value in planned.environment.items())]
    if settings and STOCK.issuperset(settings):
        return f"stock {label}"
    return f"{label} with {' '.join(settings)}" if settings else label
