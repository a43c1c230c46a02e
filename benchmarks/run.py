"""Measure how fast all this is, against its goals: what `make bench` does.

    python benchmarks/run.py                             all plans of benchmarks/plans
    python benchmarks/run.py --gpu                       those of benchmarks/gpu_plans
    python benchmarks/run.py --only trainer-overhead checkpoints
    python benchmarks/run.py --out runs/bench/FIRST      go on where an earlier call stopped

A plan is measured by compare/run.py as any comparison, in a folder of its own; compare/report.py
shows it. At the end all goals are in one table.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

from compare.evidence.records import load_comparison
from compare.page.tables import goals_tables, table_text
from compare.plan.environment import ROOT
from compare.running.launch import utc_stamp
from recipe.command import RESUMES, run_tool
from recipe.errors import UserError, refuse
from recipe.files import replace_file
from tools.make_jpegs import JPEGS, jpegs_folder

PLANS = ROOT / "benchmarks"
QUICK = ["--arch", "shufflenet_v2_x0_5", "--train-crop-size", "32", "--batch-size", "4"]


def bench(
    only: tuple[str, ...] = (),
    gpu: bool = False,
    quick: bool = False,
    minutes: float = 10.0,
    out: Path | None = None,
) -> int:
    """Measure, and print the table.

    Args:
        only: These plans alone, by their files' names.
        gpu: The plans for a GPU.
        quick: One block of a tiny network each: does it run?
        minutes: Of each plan, at most, unless three blocks take longer.
        out: The folder for all.
    """
    plans = {path.stem: path for path in (PLANS / ("gpu_plans" if gpu else "plans")).glob("*.toml")}
    for name in only:
        refuse((name not in plans, f"--only {name}: take of {', '.join(sorted(plans))}"))
    out = out or Path("runs") / "bench" / utc_stamp()
    jpegs_folder(ROOT / JPEGS)
    failed, measured = list[str](), list[str]()
    for name in only or sorted(plans):
        print(f"== {name}", flush=True)
        how = (
            ["--blocks", "1", "--turns", "2"]
            if quick
            else ["--until-interval", "0.5%", "--minutes", str(minutes)]
        )
        words = ["compare/run.py", str(plans[name]), "--out", str(out / name), *how]
        takes_flags = "{flags}" in plans[name].read_text()
        tiny = ["--", *QUICK] if quick and takes_flags else []
        done = subprocess.run([sys.executable, *words, *tiny], cwd=ROOT)
        (failed if done.returncode else measured).append(name)
    for table in goals_tables([load_comparison(out / name) for name in measured]):
        replace_file(out / "table.md", f"{table_text(table, markdown=True)}\n")
        print(f"\n{table_text(table)}\n\nrecords: {out}")
    if failed:
        raise UserError(f"failed: {', '.join(failed)}; see above")
    return 0


main = partial(run_tool, "benchmarks/run.py", bench, __doc__, interrupted=RESUMES)

if __name__ == "__main__":
    sys.exit(main())
