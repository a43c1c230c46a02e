"""The plan of a comparison: which configuration runs in which block, and by which command."""

import contextlib
import hashlib
import json
import os
import random
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from compare.errors import UserError
from compare.plan.hosts import (
    SLURM,
    interface_variables,
    is_here,
    is_only_here,
    placement,
    used_hosts,
)
from compare.plan.sources import ROOT, trainers_sha256
from compare.plan.ssh import MPIRUN_VARIABLE, ssh_flags

TRAINERS = {"ddp": "ddp_train/train.py", "horovod": "horovod_train/train.py"}

# Flags by which run.py itself steers a trainer, and what the user is told instead.
RESERVED_FLAGS = {
    "--log-dir": "the plan sets where each run is written: use --out DIR before the --",
    "--name": "the plan sets where each run is written: use --out DIR before the --",
    "--resume": "every run starts from nothing",
    "--evaluate": "a comparison trains",
    "--ablation-steps": "it would measure steps without communication; runs of their own do that "
    "after the blocks (--phase-steps)",
}

# Variables that change what an engine does or how fast. They are left as the user set them, the
# same for both engines, and written into the plan, so that a resumed comparison cannot mix them.
STEERING_PREFIXES = (
    "HOROVOD_", "NCCL_", "GLOO_", "OMPI_", "PMIX_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "CUDA_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "LD_PRELOAD",
    "SLURM_MPI_TYPE", "SLURM_PMIX_FENCE", "SLURM_CPU_BIND",
)  # fmt: skip

# The trainers set their threads by one rule. A value left over from the shell would be
# overwritten by torchrun alone, and then the two engines would not run on equal terms.
REMOVED_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# What mpirun must be told to take along to other hosts, beside the variables that steer an engine.
NEEDED_ELSEWHERE = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONUNBUFFERED")

# Where torchrun's node 0 may listen on the first of several hosts: ports that no kernel gives away.
RENDEZVOUS_PORTS = range(20_000, 32_000)

RUN_MARK = "COMPARE_RUN"  # variable that every process of a run inherits

ABLATION_STEPS = 10  # length of a stretch with the exchange of gradients, and of one without


@dataclass(frozen=True)
class Configuration:
    """One way to start one engine, with trainer flags and variables of its own if it has any."""

    name: str
    engine: str
    launcher: str
    controller: str = ""  # horovodrun only: what it passes the messages with
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    interface: str | None = None  # of the network between hosts; None: the launcher finds one

    @property
    def variables(self) -> dict[str, str]:
        """Variables that this configuration's processes get beside the user's."""
        return interface_variables(self.interface) | self.environment

    def launch_words(self, workers: int, hosts: str | None, job: str = "compare") -> list[str]:
        """Return the words before the trainer's path; `hosts` as in `a:2,b:2`, None: this one.
        `job` is what tells torchrun this start from others on the same hosts.

        No launcher binds a process to a core: horovodrun asks mpirun for `--bind-to none` and
        torchrun never binds, so a bare mpirun and srun must be told the same. Nor may mpirun count
        its slots itself (it would refuse more workers than physical cores): horovodrun gives it
        `localhost:N`.

        Variables reach the ranks by themselves on this host. On others, horovodrun passes all of
        them on, and so does srun; mpirun only those that it is told.
        """
        own = [f"{name}={value}" for name, value in self.variables.items()]
        return [*(["env", *own] if own else []), *self.launcher_words(workers, hosts, job)]

    def launcher_words(self, workers: int, hosts: str | None, job: str) -> list[str]:
        """Return the launcher and its flags."""
        n = str(workers)
        if self.launcher == "torchrun":
            if is_only_here(workers, hosts):
                return ["torchrun", "--standalone", "--nproc-per-node", n]
            assert hosts is not None
            return self.torchrun_words(placement(workers, hosts), job)
        if self.launcher == "srun":
            return ["srun", "--ntasks", n, *self.srun_words(workers, hosts), "python"]
        on_hosts = [] if hosts is None else ["-H", used_hosts(workers, hosts)]
        if self.launcher == "horovodrun":
            if self.interface and hosts is not None:
                on_hosts += ["--network-interface", self.interface]
            return ["horovodrun", f"--{self.controller}", "-np", n, *on_hosts, "python"]
        if hosts is None:
            return ["mpirun", "-np", n, "-H", f"localhost:{n}", "--bind-to", "none", "python"]
        return ["mpirun", "-np", n, *on_hosts, *self.placing_words(), "python"]

    def torchrun_words(self, placed: dict[str, int], job: str) -> list[str]:
        """Return what starts torchrun once on each host: by mpirun, which reaches them by ssh and
        ends with them. The ranks meet at the first host, by torchrun's own rendezvous, under an id
        and at a port of this job's own: jobs that share both would form one training."""
        first, *_ = placed
        on_each = set(placed.values())
        if len(on_each) > 1:
            told = ", ".join(f"{count} on {host}" for host, count in placed.items())
            raise UserError(
                f"{self.name}: torchrun takes the same number of workers on each host, which "
                f"{told} are not; give other --workers or --hosts, or take ddp-mpirun"
            )
        one_each = ",".join(f"{host}:1" for host in placed)
        return [
            "mpirun", "-np", str(len(placed)), "-H", one_each, *self.placing_words(),
            "torchrun", "--nnodes", str(len(placed)), "--nproc-per-node", str(on_each.pop()),
            "--rdzv-id", job, "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{first}:{rendezvous_port(first, job)}",
        ]  # fmt: skip

    def srun_words(self, workers: int, hosts: str | None) -> list[str]:
        """Return srun's flags: MPI's processes find each other by PMIx, unless the user's shell
        names another way; `hosts`, of the allocation, are filled as other launchers fill them."""
        words = ["--kill-on-bad-exit=1", "--cpu-bind=none", "--gpu-bind=none"]
        exported = "--export=ALL"
        if self.engine == "horovod" and "SLURM_MPI_TYPE" not in os.environ:
            words.append("--mpi=pmix")
            if "SLURM_PMIX_FENCE" not in os.environ:  # see slurm/horovod_srun.sbatch
                exported += ",SLURM_PMIX_FENCE=ring"
        words.append(exported)
        if hosts is not None:
            placed = placement(workers, hosts)
            words += ["--nodes", str(len(placed)), "--nodelist", ",".join(placed)]
            words += ["--ntasks-per-node", str(max(placed.values())), "--distribution", "block"]
        return words

    def placing_words(self) -> list[str]:
        """Return mpirun's flags for several hosts, filled one by one, as horovodrun fills them."""
        exported = [word for name in self.names_for_other_hosts() for word in ("-x", name)]
        return ["--bind-to", "none", "--map-by", "slot", *exported]

    def names_for_other_hosts(self) -> list[str]:
        """Return the variables that mpirun takes to other hosts: only those that have a value."""
        known = os.environ.keys() | set_variables().keys()
        needed = {name for name in NEEDED_ELSEWHERE if name in known}
        return sorted(needed | steering_variables().keys() | self.variables.keys())


def rendezvous_port(host: str, job: str) -> int:
    """Return the port at which the job's torchruns meet on `host`: by its id, and a free one if
    the host is this one."""
    first = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
    for tried in range(len(RENDEZVOUS_PORTS)):
        port = RENDEZVOUS_PORTS[(first + tried) % len(RENDEZVOUS_PORTS)]
        if not is_here(host) or is_free(port):
            return port
    raise UserError(f"{host}: no port of {RENDEZVOUS_PORTS} is free; see `ss -tln`")


def is_free(port: int) -> bool:
    with socket.socket() as listener, contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        return True
    return False


CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("ddp-torchrun", "ddp", "torchrun"),
        Configuration("ddp-mpirun", "ddp", "mpirun"),
        Configuration("ddp-srun", "ddp", "srun"),
        Configuration("horovod-mpi", "horovod", "horovodrun", "mpi"),
        Configuration("horovod-gloo", "horovod", "horovodrun", "gloo"),
        Configuration("horovod-mpirun", "horovod", "mpirun"),
        Configuration("horovod-srun", "horovod", "srun"),
    )
}
DEFAULT_CONFIGURATIONS = ("ddp-torchrun", "horovod-mpi")


@dataclass(frozen=True)
class Case:
    """A training that configurations are compared on: model, precision, batch, data."""

    name: str = ""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One start of one trainer: the unit of evidence."""

    block: int  # 0: none, the run shows the phases of a step
    configuration: Configuration
    workers: int
    seed: int | None  # None: the user's own --seed stands among the trainer's arguments
    case: str = ""
    arguments: tuple[str, ...] = ()  # the trainer's, all but the run's place and its seed
    hosts: str | None = None

    @property
    def name(self) -> str:
        return f"{self.configuration.name}-{self.workers}"

    @property
    def cell(self) -> str:
        """What is repeated in each block."""
        return f"{self.case}/{self.name}" if self.case else self.name

    @property
    def folder(self) -> str:
        """Where the trainer writes, seen from the comparison's folder."""
        return f"block-{self.block}/{self.cell}" if self.block else f"phases/{self.cell}"

    @property
    def leaves_this_host(self) -> bool:
        return not is_only_here(self.workers, self.hosts)

    def command(self, log_dir: Path) -> list[str]:
        """Return the command for the current directory, as a person would type it there."""
        trainer = ROOT / TRAINERS[self.configuration.engine]
        if trainer.is_relative_to(Path.cwd()):
            trainer = trainer.relative_to(Path.cwd())
        job = hashlib.sha256(str(log_dir.resolve() / self.name).encode()).hexdigest()[:12]
        words = [*self.configuration.launch_words(self.workers, self.hosts, job), str(trainer)]
        words += ["--log-dir", str(log_dir), "--name", self.name]
        if self.seed is not None:
            words += ["--seed", str(self.seed)]
        return [*words, *self.arguments]


@dataclass(frozen=True)
class Plan:
    """What is compared, and in which order. `check_plan` tells whether it can be meant."""

    configurations: tuple[str, ...] = DEFAULT_CONFIGURATIONS
    workers: tuple[int, ...] = (1, 2)
    blocks: int = 3
    seed: int = 42
    trainer_arguments: tuple[str, ...] = ()
    cases: tuple[Case, ...] = (Case(),)
    defined: tuple[Configuration, ...] = ()  # by the plan itself, beside CONFIGURATIONS
    judged_pairs: tuple[tuple[str, str], ...] = ()  # empty: each against the first
    global_batch_size: int | None = None  # of all workers together: strong scaling
    global_learning_rate: float | None = None
    hosts: str | None = None  # "a:2,b:2"; None: this host
    is_allocation: bool = False  # `hosts` are this Slurm job's: the next one's may be others
    network_interface: str | None = None  # between the hosts; None: the launchers find one
    null: bool = False
    until_interval: float | None = None
    max_blocks: int = 20
    phase_steps: int = 120  # 0: no runs that show the phases of a step
    timeout: int = 1800  # seconds
    question: str | None = None
    plan_file: str | None = None
    left_out: tuple[str, ...] = ()  # configurations that cannot run here, since Horovod is missing

    def known(self) -> dict[str, Configuration]:
        """Return all configurations that this plan may name."""
        return CONFIGURATIONS | {
            configuration.name: configuration for configuration in self.defined
        }

    def members(self) -> list[Configuration]:
        """Return the configurations that run; in a null test each runs again, as another one."""
        nic = self.network_interface
        chosen = [replace(self.known()[name], interface=nic) for name in self.configurations]
        if not self.null:
            return chosen
        return [twin for c in chosen for twin in (c, replace(c, name=f"{c.name}-again"))]

    def pairs(self) -> list[tuple[str, str]]:
        """Return which configurations are judged against each other."""
        if self.null:
            return [(name, f"{name}-again") for name in self.configurations]
        first, *others = self.configurations
        return list(self.judged_pairs) or [(first, other) for other in others]

    def runs(self) -> list[Run]:
        """Return all runs: each block holds every configuration once, in an order of its own.

        A block's order depends on the seed and the block's number alone, so that a plan with more
        blocks begins with the same runs.

        Within a block every run trains with the same seed, else the engines would not do the same
        training; each block has another one. Blocks with one seed would repeat one training, bit
        by bit, and show a top-1 without any spread, as if it were certain.
        """
        runs = []
        for block in range(1, self.blocks + 1):
            cells = [
                (case, configuration, workers)
                for case in self.cases
                for configuration in self.members()
                for workers in self.workers
            ]
            random.Random(f"{self.seed}/{block}").shuffle(cells)
            runs += [self.run(block, case, c, workers) for case, c, workers in cells]
        return runs

    def run(self, block: int, case: Case, configuration: Configuration, workers: int) -> Run:
        """Return one run; what stands later among its arguments wins."""
        arguments = (*self.trainer_arguments, *case.flags, *configuration.flags)
        own_seed = last_value(arguments, "--seed") is not None
        seed = None if own_seed else self.seed + max(block, 1) - 1
        if self.global_batch_size is not None:
            arguments = (*arguments, *self.share_of_global_batch(arguments, workers))
        return Run(block, configuration, workers, seed, case.name, arguments, self.hosts)

    def share_of_global_batch(self, arguments: Sequence[str], workers: int) -> list[str]:
        """Return the flags by which `workers` workers share the global batch (strong scaling).

        The trainers multiply --base-lr by the number of workers and by --batches-per-allreduce, so
        the global rate is divided by both: then any number of workers trains with the same rate. A
        gradual warm-up would begin at one worker's rate, which is another one at each number of
        workers; a linear one begins at 1 % of the global rate.
        """
        assert self.global_batch_size is not None and self.global_learning_rate is not None
        passes = workers * int(last_value(arguments, "--batches-per-allreduce") or 1)
        share, rest = divmod(self.global_batch_size, passes)
        if rest:
            raise UserError(
                f"--global-batch-size {self.global_batch_size} cannot be shared equally by "
                f"{workers} workers ({passes} forward passes a step): give a multiple of {passes}, "
                "or other --workers"
            )
        flags = ["--batch-size", str(share), "--base-lr", repr(self.global_learning_rate / passes)]
        if last_value(arguments, "--warmup-epochs") not in ("0", "0.0"):
            flags += ["--warmup-method", "linear"]
        return flags

    @property
    def warm_up_timeout(self) -> int:
        """Return the time limit of a warm-up, in seconds: it reads the data first, and may list
        them for the first time."""
        return max(600, self.timeout)

    def warm_up_runs(self) -> list[Run]:
        """Return one run for each engine and case, at its most workers; its figures are thrown
        away.

        It pays for cold file caches and for the embedded data's one-time writing, which would
        otherwise fall on whichever engine comes first, and it finds a broken set-up in seconds.
        """
        first_of_engine: dict[str, Configuration] = {}
        for configuration in self.members():
            first_of_engine.setdefault(configuration.engine, configuration)
        return [
            self.run(0, case, configuration, max(self.workers))
            for case in self.cases
            for configuration in first_of_engine.values()
        ]

    def phase_runs(self) -> list[Run]:
        """Return one short run of each cell, in which stretches of steps with and without the
        exchange of gradients alternate: what the exchange costs is their difference.

        They end no later than the measured runs do.
        """
        if not self.phase_steps:
            return []
        runs = []
        for case in self.cases:
            for configuration in self.members():
                for workers in self.workers:
                    run = self.run(0, case, configuration, workers)
                    if "--use-adasum" in map(flag_name, run.arguments):
                        continue  # it combines updates, and has no gradients to leave unexchanged
                    steps = self.phase_steps
                    if own := last_value(run.arguments, "--max-steps"):
                        # Below two stretches nothing would be measured.
                        steps = min(steps, max(int(own), 2 * ABLATION_STEPS))
                    arguments = (
                        *without_flag(run.arguments, "--max-steps"),
                        "--ablation-steps", str(ABLATION_STEPS), "--max-steps", str(steps),
                    )  # fmt: skip
                    runs.append(replace(run, arguments=arguments))
        return runs


# Second names of the trainers' flags (recipe/config.py).
FLAG_ALIASES = {
    "-a": "--arch", "--model": "--arch", "-b": "--batch-size", "-j": "--workers",
    "-e": "--evaluate", "--test-only": "--evaluate", "--weight-decay": "--wd",
    "--opt-level": "--precision", "--lr-warmup-epochs": "--warmup-epochs",
    "--lr-warmup-method": "--warmup-method",
}  # fmt: skip


def flag_name(word: str) -> str:
    """Return a word's flag by its first name, without a value; "" if the word is no flag."""
    name = word.split("=")[0].replace("_", "-")
    name = FLAG_ALIASES.get(name, name)
    return name if name.startswith("--") else ""


def last_value(words: Sequence[str], flag: str) -> str | None:
    """Return the value that a trainer would take for a flag: the last one given."""
    value = None
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if flag_name(word) == flag:
            value = word.partition("=")[2] if "=" in word else following
    return value


def without_flag(words: Sequence[str], flag: str) -> list[str]:
    """Return the words without a flag that takes one value."""
    kept, skip = list[str](), False
    for word in words:
        if skip:
            skip = False
        elif flag_name(word) == flag:
            skip = "=" not in word
        else:
            kept.append(word)
    return kept


def varied_fields(configurations: Iterable[Configuration]) -> list[str]:
    """Return the settings that configurations give by flags of their own, by their field's name."""
    flags = [flag_name(word) for c in configurations for word in c.flags]
    names = [flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags]
    return list(dict.fromkeys(name for name in names if name))


def knobs_files(plan: Plan) -> list[str]:
    """Return the files of knobs that the trainers of a plan will read."""
    parts = [plan.trainer_arguments, *(case.flags for case in plan.cases)]
    parts += [configuration.flags for configuration in plan.members()]
    files = [last_value(words, "--knobs") for words in parts]
    return sorted({name for name in files if name})


def knobs_sha256(plan: Plan) -> dict[str, str | None]:
    """Return the digest of each file of knobs: with another content the runs are others."""
    paths = {name: Path(name).expanduser() for name in knobs_files(plan)}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        for name, path in paths.items()
    }


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
        MPIRUN_VARIABLE: ssh_flags(),
    }
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # containers and CI
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def steering_variables() -> dict[str, str]:
    """Return the variables of the user's shell that may change what the engines do."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(STEERING_PREFIXES)
        and not name.startswith("OMPI_ALLOW_RUN_AS_ROOT")
        and name not in REMOVED_VARIABLES
    }


def plan_record(plan: Plan, created_utc: str, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Return what plan.json holds: enough for the report, and to go on after an interruption."""
    members = plan.members()
    inherited, affinity = steering_variables(), sorted(os.sched_getaffinity(0))
    if plan.is_allocation:  # another job may get other cores and GPUs; each run writes down its own
        inherited.pop("CUDA_VISIBLE_DEVICES", None)
        affinity = []
    return {
        "question": plan.question,
        "plan_file": plan.plan_file,
        "left_out": list(plan.left_out),
        "configurations": [configuration.name for configuration in members],
        "configuration_details": {
            configuration.name: {
                "engine": configuration.engine,
                "launcher": configuration.launcher,
                "controller": configuration.controller,
                "flags": list(configuration.flags),
                "environment": configuration.variables,
            }
            for configuration in members
        },
        "pairs": [list(pair) for pair in plan.pairs()],
        "varied": varied_fields(members),
        "cases": [{"name": case.name, "flags": list(case.flags)} for case in plan.cases],
        "workers": list(plan.workers),
        "scaling": "weak" if plan.global_batch_size is None else "strong",
        "global_batch_size": plan.global_batch_size,
        "global_learning_rate": plan.global_learning_rate,
        "hosts": SLURM if plan.is_allocation else plan.hosts,
        "network_interface": plan.network_interface,
        "blocks": plan.blocks,
        "seed": plan.seed,
        "null": plan.null,
        "until_interval": plan.until_interval,
        "max_blocks": plan.max_blocks,
        "phase_steps": plan.phase_steps,
        "timeout": plan.timeout,
        "trainer_arguments": list(plan.trainer_arguments),
        "warnings": list(warnings),
        "created_utc": created_utc,
        "trainers_sha256": trainers_sha256(),
        "knobs": knobs_sha256(plan),
        "environment": {
            "set": {name: value for name, value in set_variables().items() if name != "PATH"},
            "removed": list(REMOVED_VARIABLES),
            "inherited": inherited,
            "affinity": affinity,  # inherited, too: no launcher binds
        },
        "runs": [run_record(run) for run in plan.runs()],
        "phase_runs": [run_record(run) for run in plan.phase_runs()],
    }


def run_record(run: Run) -> dict[str, Any]:
    return {
        "block": run.block,
        "case": run.case,
        "configuration": run.configuration.name,
        "engine": run.configuration.engine,
        "launcher": run.configuration.launcher,
        "workers": run.workers,
        "seed": run.seed,
        "folder": run.folder,
    }


# What makes other runs when it is changed; the rest (more blocks, other pairs) does not.
IDENTITY = (
    "configurations", "configuration_details", "cases", "workers", "global_batch_size",
    "global_learning_rate", "hosts", "network_interface", "seed", "trainer_arguments", "knobs",
)  # fmt: skip


def asked_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return in what two plans differ, wherever they were made."""
    new = json.loads(json.dumps(new))
    old = {"knobs": {}, **old}  # which earlier plans had none of
    differences = [
        f"{name}: {old.get(name)!r} there, {new[name]!r} now"
        for name in IDENTITY
        if new[name] != old.get(name)
    ]
    if new["trainers_sha256"] != old.get("trainers_sha256"):
        differences.append("the sources of the recipe or the trainers were changed since")
    return differences


def plan_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return in what a new plan would make other runs than an old one; more blocks are none."""
    new = json.loads(json.dumps(new))  # as the file would hold it
    differences = asked_differences(old, new)
    if new["environment"] != old.get("environment"):
        differences.append(
            f"environment: {old.get('environment')!r} there, {new['environment']!r} now"
        )
    return differences
