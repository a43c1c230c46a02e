"""Starts a rank of a trainer as a fork of a process that has loaded torch for it.

    python compare/running/forked_rank.py SCRIPT ...      what `python SCRIPT ...` does

Loading torch and torchvision takes each rank of each side 4 to 16 CPU-seconds, longer than its
turns. So all ranks of a block on a host are forked from one server (recipe/fork_server.py), which
the first of them starts. Each block has servers of its own: what chance decides when a program is
loaded (hash seed, addresses) is sampled in each block, and is the same for all sides.

Libraries read variables and the cores when they are loaded, so ranks that differ in these have
different servers. The variable RANK_START says how a rank was started, and is in its record: "fork"
or, if the user or a configuration sets it, "exec".
"""

import os
import sys
from hashlib import sha256
from pathlib import Path

from compare.plan.blocks import FORK_SERVERS
from recipe.fork_server import run
from recipe.settings.variables import RANK_START

# The packages that every trainer loads and that take long; torch's optimizers load torch._dynamo.
MODULES = ("torch._dynamo", "torch.distributed", "torchvision", "torchvision.transforms.v2")
# Variables that no library reads while it is loaded, with these prefixes: those of launchers, which
# give each rank its place, and of this comparison.
OF_RANKS = (
    "OMPI_", "PMIX_", "PMI_", "PALS_", "SLURM_", "HOROVOD_", "TORCHELASTIC_", "COMPARE_", "RANK",
    "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip


def main() -> None:
    """Become the script, or have it forked and end as it does."""
    words, start = sys.argv[1:], os.environ.setdefault(RANK_START, "fork")
    if start not in ("fork", "exec"):
        sys.exit(f"error: {RANK_START}={start}: give fork or exec")
    if start == "exec":
        os.execv(sys.executable, [sys.executable, *words])
    variables = {k: v for k, v in os.environ.items() if not k.startswith(OF_RANKS)}
    run(server_name(variables), words, MODULES, variables)


def server_name(variables: dict[str, str]) -> str:
    """Return the name of the server for processes like this one, with these environment variables.
    It begins with the value of FORK_SERVERS, which differs between blocks."""
    like = (
        sorted(variables.items()),
        sys.executable,
        sys.flags,
        os.getcwd(),
        sorted(os.sched_getaffinity(0)),
        Path("/proc/self/cgroup").read_text(),  # it limits a fork, which is in its server's group
    )
    digest = sha256(repr(like).encode(errors="surrogateescape")).hexdigest()
    return f"{os.environ[FORK_SERVERS]}-{digest[:16]}"


if __name__ == "__main__":
    main()
