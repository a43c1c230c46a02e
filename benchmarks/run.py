"""Measure the speed of this project against its goals (`make bench`).

    python benchmarks/run.py                             all plans of benchmarks/plans
    python benchmarks/run.py --gpu                       those of benchmarks/gpu_plans
    python benchmarks/run.py --only trainer-overhead checkpoints
    python benchmarks/run.py --links 1 2                 as root: wire-format.toml over slow links
    python benchmarks/run.py --out runs/bench/FIRST      go on where an earlier call stopped

compare/run.py measures each plan like any comparison, in a folder of its own, and compare/report.py
shows it. At the end one table shows all goals.

--links: does `--wire-format auto` choose the faster format? Two hosts train with one worker each;
each is a network namespace of this machine, with a part of its cores. At each rate (`tc ... tbf` on
both) fp32, fp16 and auto of each engine take turns.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

from compare.evidence.record import FILE, read_comparison
from compare.page.report import Report
from compare.page.tables import goals_tables, table_text
from compare.plan.environment import ROOT
from compare.running.launch import utc_stamp
from recipe.command import RESUMES, run_other_tool, run_tool
from recipe.errors import UserError, refuse
from recipe.files import replace_file
from tools import namespaces
from tools.make_jpegs import JPEGS, jpegs_folder

PLANS = ROOT / "benchmarks"
QUICK = ["--arch", "shufflenet_v2_x0_5", "--train-crop-size", "32", "--batch-size", "4"]


def bench(
    only: tuple[str, ...] = (),
    gpu: bool = False,
    quick: bool = False,
    minutes: float = 10.0,
    links: tuple[float, ...] = (),
    out: Path | None = None,
) -> int:
    """Measure, and print the table of goals.

    Args:
        only: Measure only these plans, by their files' names.
        gpu: Measure the plans for a GPU.
        quick: Only check that the plans run: one block of a tiny network each.
        minutes: Minutes of measuring per plan, at most; three blocks may take longer.
        links: Instead of plans, measure wire formats at these rates, in Gb/s, between two hosts.
        out: The folder for all measurements.
    """
    plans = {path.stem: path for path in (PLANS / ("gpu_plans" if gpu else "plans")).glob("*.toml")}
    for name in only:
        if name not in plans:
            raise UserError(f"--only {name}: choose from {', '.join(sorted(plans))}")
    refuse(
        (
            links and (only or gpu),
            "--links: is measured instead of plans; leave --only and --gpu out",
        ),
        (any(rate <= 0 for rate in links), "--links: give rates above 0 Gb/s"),
    )
    out = out or Path("runs") / "bench" / utc_stamp()
    how = ["--until-interval", "0.5%", "--minutes", str(minutes)]
    if quick:
        how = ["--blocks", "1", "--turns", "2"]
    failed = measure_links(links, out, how) if links else []
    for name in () if links else only or sorted(plans):
        jpegs_folder(ROOT / JPEGS)
        tiny = ["--", *QUICK] if quick and "{flags}" in plans[name].read_text() else []
        failed += run_plan(plans[name], out / name, [*how, *tiny])
    measured = [path.parent for path in sorted(out.glob(f"*/{FILE}"))]
    measured = [folder for folder in measured if folder.name not in failed]
    for table in goals_tables([Report(read_comparison(folder)) for folder in measured]):
        replace_file(out / "table.md", f"{table_text(table, markdown=True)}\n")
        print(f"\n{table_text(table)}\n\nrecords: {out}")
    if failed:
        raise UserError(f"failed: {', '.join(failed)}; see above")
    return 0


def run_plan(plan: Path, out: Path, words: list[str], enter: list[str] | None = None) -> list[str]:
    """Measure a plan into a folder; return [] or, if it fails, the folder's name. `enter`: words
    before the command, which enter a host."""
    print(f"== {out.name}", flush=True)
    run = [sys.executable, "compare/run.py", str(plan), "--out", str(out.absolute()), *words]
    return [out.name] if run_other_tool([*(enter or []), *run], ROOT) else []


def measure_links(rates: tuple[float, ...], out: Path, words: list[str]) -> list[str]:
    """Measure wire formats between two hosts at each of these rates; return those that failed."""
    if missing := namespaces.missing_tools("tc"):
        raise UserError(f"--links: needs {', '.join(missing)}")
    words = ["--hosts", "node0:1,node1:1", "--network-interface", "eth0", *words]
    failed = list[str]()
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as folder,
        namespaces.hosts(Path(folder) / "hosts") as made,
    ):
        enter = namespaces.give_cores(made)
        for rate in rates:
            namespaces.limit_rate(made, rate)
            place = out / f"{rate:g}-gbit"
            failed += run_plan(PLANS / "wire-format.toml", place, words, enter)
    return failed


main = partial(
    run_tool,
    "benchmarks/run.py",
    bench,
    __doc__,
    errors=(UserError, namespaces.HostsError),
    interrupted=RESUMES,
)

if __name__ == "__main__":
    sys.exit(main())
