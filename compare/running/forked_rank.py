"""Starts a rank of a trainer as a fork of a process that has loaded torch for it.

    python compare/running/forked_rank.py SCRIPT ...      what `python SCRIPT ...` does

Loading torch and torchvision takes each rank 4 to 16 CPU-seconds. The whole runs beside turns start
so, and with RANK_START=fork in the environment the sides of turns, too: all ranks of a block on a
host are forked from one server (recipe/fork_server.py), which the first of them starts. Each block
has servers of its own: what chance decides when a program is loaded (hash seed, addresses) is
sampled in each block. RANK_START is in a rank's record.

Libraries read variables, cores and limits when they are loaded, so ranks that differ in these have
different servers.
"""

import os
import re
import sys
from hashlib import sha256

from compare.plan.blocks import FORK_SERVERS
from recipe.files import read_proc
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
    """Have the script forked, and end as it does."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(OF_RANKS)}
    try:
        run(server_name(variables), sys.argv[1:], MODULES, variables)
    except RuntimeError as error:
        sys.exit(f"error: {error}; with {RANK_START}=exec in the environment none is needed")


def server_name(variables: dict[str, str]) -> str:
    """Return the name of the server for processes like this one, with these environment variables.
    It begins with the value of FORK_SERVERS, which differs between blocks."""
    # A fork is in its server's control group. Slurm has one for each task.
    group = re.sub(r"/task_\d+", "", read_proc("/proc/self/cgroup"))
    like = (
        sorted(variables.items()),
        sys.executable,
        os.getcwd(),
        sorted(os.sched_getaffinity(0)),
        read_proc("/proc/self/limits"),
        group,
    )
    digest = sha256(repr(like).encode(errors="surrogateescape")).hexdigest()
    return f"{os.environ[FORK_SERVERS]}-{digest[:16]}"


if __name__ == "__main__":
    main()
