"""Does `--wire-format auto` choose the number format that is faster, on links of several rates?

    python benchmarks/slow_links.py              as root
    python benchmarks/slow_links.py --rates 1 --blocks 8

Two hosts, each a network namespace of this machine with its part of the cores, train with one
worker each. At each rate (`tc ... tbf` on both) fp32, fp16 and auto of each engine take turns, as
benchmarks/wire-format.toml says. auto's goal is 0.97 of each of the two.
"""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from compare.evidence.records import load_comparison
from compare.page.tables import goals_tables, table_text
from compare.running.launch import utc_stamp
from recipe.command import RESUMES, run_tool
from recipe.errors import UserError
from tools import namespaces
from tools.namespaces import HostsError, give_cores, limit_rate


def measure(
    rates: tuple[float, ...] = (0.2, 0.5, 1, 2, 5),
    blocks: int = 4,
    out: Path | None = None,
) -> int:
    """Measure at these rates, and print the table.

    Args:
        rates: Gb/s that each host may send.
        blocks: At each rate; an interval needs 3.
        out: The folder for all.
    """
    if missing := namespaces.missing_tools("tc"):
        raise UserError(f"needs {', '.join(missing)}")
    out = out or Path("runs") / f"slow-links-{utc_stamp()}"
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as folder,
        namespaces.hosts(Path(folder) / "hosts") as made,
    ):
        enter = give_cores(made)
        for rate in rates:
            limit_rate(made, rate)
            words = ["compare/run.py", "benchmarks/wire-format.toml", "--hosts", "node0:1,node1:1"]
            words += ["--network-interface", "eth0", "--blocks", str(blocks)]
            words += ["--out", str((out / f"{rate:g}").absolute())]
            done = subprocess.run([*enter, sys.executable, *words])
            if done.returncode:
                raise UserError(f"at {rate:g} Gb/s: compare/run.py failed, see above")
            for table in goals_tables([load_comparison(out / f"{rate:g}")]):
                print(table_text(table), flush=True)
    return 0


main = partial(
    run_tool, "benchmarks/slow_links.py", measure, __doc__, errors=(UserError, HostsError),
    interrupted=RESUMES,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
