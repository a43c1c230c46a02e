"""The plan of a comparison: which configuration runs in which block, and by which command."""

import hashlib
import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAINERS = {"ddp": "ddp_train/train.py", "horovod": "horovod_train/train.py"}

# Flags by which run.py itself steers a trainer: whoever gave them too would break the plan.
RESERVED_FLAGS = ("--log-dir", "--name", "--resume", "--evaluate")

# Variables that change what an engine does or how fast. They are left as the user set them, the
# same for both engines, and written into the plan, so that a resumed comparison cannot mix them.
STEERING_PREFIXES = (
    "HOROVOD_", "NCCL_", "GLOO_", "OMPI_", "TORCH_", "CUDA_", "KMP_", "MALLOC_", "LD_PRELOAD",
)  # fmt: skip

# The trainers set their threads by one rule. A value left over from the shell would be
# overwritten by torchrun alone, and then the two engines would not run on equal terms.
REMOVED_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Configuration:
    """One way to start one engine."""

    name: str
    engine: str
    launcher: str
    controller: str = ""  # horovodrun only: what it passes the messages with

    def launch_words(self, workers: int) -> list[str]:
        """Return the words before the trainer's path.

        No launcher binds a process to a core: horovodrun asks mpirun for `--bind-to none` and
        torchrun never binds, so a bare mpirun must be told the same. Nor may mpirun count its
        slots itself (it would refuse more workers than physical cores): horovodrun gives it
        `localhost:N`.
        """
        n = str(workers)
        if self.launcher == "torchrun":
            return ["torchrun", "--standalone", "--nproc-per-node", n]
        if self.launcher == "horovodrun":
            return ["horovodrun", f"--{self.controller}", "-np", n, "python"]
        return ["mpirun", "-np", n, "-H", f"localhost:{n}", "--bind-to", "none", "python"]


CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("ddp-torchrun", "ddp", "torchrun"),
        Configuration("ddp-mpirun", "ddp", "mpirun"),
        Configuration("horovod-mpi", "horovod", "horovodrun", "mpi"),
        Configuration("horovod-gloo", "horovod", "horovodrun", "gloo"),
        Configuration("horovod-mpirun", "horovod", "mpirun"),
    )
}
DEFAULT_CONFIGURATIONS = ("ddp-torchrun", "horovod-mpi")


@dataclass(frozen=True)
class Run:
    """One start of one trainer: the unit of evidence."""

    block: int
    configuration: Configuration
    workers: int
    seed: int | None  # None: the user's own --seed stands among the trainer's arguments

    @property
    def name(self) -> str:
        return f"{self.configuration.name}-{self.workers}"

    @property
    def folder(self) -> str:
        """Where the trainer writes, seen from the comparison's folder."""
        return f"block-{self.block}/{self.name}"

    def command(self, log_dir: Path, trainer_arguments: tuple[str, ...]) -> list[str]:
        """Return the command for the current directory, as a person would type it there."""
        trainer = ROOT / TRAINERS[self.configuration.engine]
        if trainer.is_relative_to(Path.cwd()):
            trainer = trainer.relative_to(Path.cwd())
        words = [*self.configuration.launch_words(self.workers), str(trainer)]
        words += ["--log-dir", str(log_dir), "--name", self.name]
        if self.seed is not None:
            words += ["--seed", str(self.seed)]
        return [*words, *trainer_arguments]


@dataclass(frozen=True)
class Plan:
    """What is compared, and in which order."""

    configurations: tuple[str, ...] = DEFAULT_CONFIGURATIONS
    workers: tuple[int, ...] = (1, 2)
    blocks: int = 3
    seed: int = 42
    trainer_arguments: tuple[str, ...] = ()

    def runs(self) -> list[Run]:
        """Return all runs: each block holds every configuration once, in an order of its own.

        A block's order depends on the seed and the block's number alone, so that a plan with more
        blocks begins with the same runs.

        Within a block every run trains with the same seed, else the engines would not do the same
        training; each block has another one. Blocks with one seed would repeat one training, bit
        by bit, and show a top-1 without any spread, as if it were certain.
        """
        own_seed = any(
            word == "--seed" or word.startswith("--seed=") for word in self.trainer_arguments
        )
        runs = []
        for block in range(1, self.blocks + 1):
            cells = [(name, workers) for name in self.configurations for workers in self.workers]
            random.Random(f"{self.seed}/{block}").shuffle(cells)
            seed = None if own_seed else self.seed + block - 1
            runs += [Run(block, CONFIGURATIONS[name], n, seed) for name, n in cells]
        return runs

    def warm_up_runs(self) -> list[Run]:
        """Return one run for each engine, at its most workers; what it measures is thrown away.

        It pays for cold file caches and for the embedded data's one-time writing, which would
        otherwise fall on whichever engine comes first, and it finds a broken set-up in seconds.
        """
        first_of_engine: dict[str, Configuration] = {}
        for name in self.configurations:
            first_of_engine.setdefault(CONFIGURATIONS[name].engine, CONFIGURATIONS[name])
        block = 0
        seed = next(run.seed for run in self.runs())
        return [Run(block, c, max(self.workers), seed) for c in first_of_engine.values()]


def trainers_sha256() -> str:
    """Return the digest of the trainers' sources: runs of different code are not mixed."""
    digest = hashlib.sha256()
    for folder in ("recipe", "ddp_train", "horovod_train"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def run_environment() -> dict[str, str]:
    """Return the environment that every run of either engine is started with."""
    environment = {k: v for k, v in os.environ.items() if k not in REMOVED_VARIABLES}
    return environment | set_variables()


def set_variables() -> dict[str, str]:
    """Return the variables that are set for every run, whatever the shell had in them."""
    here = str(Path(sys.executable).parent)
    variables = {
        # The launchers start `python`, `mpirun` and `orted` by name.
        "PATH": os.pathsep.join([here, os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
    }
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # containers and CI
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def steering_variables() -> dict[str, str]:
    """Return the variables of the user's shell that may change what the engines do."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(STEERING_PREFIXES) and not name.startswith("OMPI_ALLOW_RUN_AS_ROOT")
    }


def plan_record(plan: Plan, created_utc: str) -> dict[str, Any]:
    """Return what plan.json holds: enough for the report, and to go on after an interruption."""
    return {
        **asdict(plan),
        "created_utc": created_utc,
        "trainers_sha256": trainers_sha256(),
        "environment": {
            "set": {name: value for name, value in set_variables().items() if name != "PATH"},
            "removed": list(REMOVED_VARIABLES),
            "inherited": steering_variables(),
        },
        "runs": [
            {
                "block": run.block,
                "configuration": run.configuration.name,
                "engine": run.configuration.engine,
                "launcher": run.configuration.launcher,
                "workers": run.workers,
                "seed": run.seed,
                "folder": run.folder,
            }
            for run in plan.runs()
        ],
    }


def plan_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return in what a new plan would make other runs than an old one; more blocks are none."""

    def plain(value: Any) -> Any:
        return json.loads(json.dumps(value))  # tuples become lists, as in the file

    differences = [
        f"{name}: {old.get(name)!r} there, {plain(new[name])!r} now"
        for name in ("configurations", "workers", "seed", "trainer_arguments")
        if plain(new[name]) != old.get(name)
    ]
    if new["trainers_sha256"] != old.get("trainers_sha256"):
        differences.append("the sources of the recipe or the trainers were changed since")
    if new["environment"] != old.get("environment"):
        differences.append(
            f"environment: {old.get('environment')!r} there, {new['environment']!r} now"
        )
    return differences
