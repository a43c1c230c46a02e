"""The ways to start an engine: launchers, their flags, and the variables for other hosts."""

import os
import secrets
from dataclasses import dataclass, field
from typing import Any

from compare.plan.environment import (
    is_only_here,
    placement,
    set_variables,
    steering_variables,
    used_hosts,
)
from recipe.errors import UserError
from recipe.world import LAUNCHERS, NO_LAUNCHER

# Variables that mpirun must pass to other hosts, besides those that steer an engine.
NEEDED_ELSEWHERE = {"PATH", "PYTHONPATH", "PYTHONUNBUFFERED"}
# Variables that make Gloo, NCCL and Open MPI use one network interface.
INTERFACE_VARIABLES = (
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include",
    "OMPI_MCA_oob_tcp_if_include",
)  # fmt: skip
# The transport flags that horovodrun gives its mpirun. Every mpirun gets them, so that what it
# starts can be compared with what horovodrun starts.
MPIRUN_OF_HOROVODRUN = ["--mca", "pml", "ob1", "--mca", "btl", "^openib"]


@dataclass(frozen=True)
class Engine:
    """A way of training that configurations start."""

    trainer: str  # path of its script
    title: str  # its name in texts
    is_peer: bool = False  # an engine to compare, not a rung of the ladder
    allreduce: str = ""  # the script that measures its all-reduce alone
    ablates: bool = False  # whether it can leave out the exchange of gradients
    servers: int = 0  # ranks that do not train, besides the workers
    has_one_replica: bool = False  # over all ranks: they do not each train a batch of their own
    is_one_worker: bool = False  # its record says one worker, whatever --workers: one process
    # trains, on all its GPUs or by calls to other ranks


def rung(name: str, **facts: Any) -> Engine:
    """Return a rung of docs/ladder.md, which is a file in baselines/."""
    return Engine(f"baselines/{name}.py", name.replace("_", "-"), **facts)


SCRIPT = "script"  # stands for engine and launcher of a user's own script: its command has both
ENGINES = {
    "ddp": Engine(
        "ddp_train/train.py", "DDP", True, "ddp_train/torch_allreduce.py", ablates=True
    ),
    "horovod": Engine(
        "horovod_train/train.py", "Horovod", True, "horovod_train/horovod_allreduce.py",
        ablates=True,
    ),
    "mpi4py": Engine(
        "baselines/mpi4py_train.py", "mpi4py", False, "baselines/mpi_allreduce.py", ablates=True
    ),
    "single_process": rung("single_process", is_one_worker=True),
    "data_parallel": rung("data_parallel", has_one_replica=True, is_one_worker=True),
    "parameter_averaging": rung("parameter_averaging"),
    "zero_optimizer": rung("zero_optimizer"),
    "fsdp": rung("fsdp"),
    "model_parallel": rung("model_parallel"),
    "pipeline": rung("pipeline", has_one_replica=True),
    "parameter_server": rung("parameter_server", servers=1),
    "rpc_pipeline": rung("rpc_pipeline", has_one_replica=True, is_one_worker=True),
    "ddp_with_rpc": rung("ddp_with_rpc", servers=1),
    SCRIPT: Engine("", SCRIPT),
}  # fmt: skip
# The engines to compare, in the order of tables.
PEERS = {name: one.title for name, one in ENGINES.items() if one.is_peer}


# Ports for torchrun's node 0 on the first of several hosts: kernels assign none of these.
RENDEZVOUS_PORTS = range(20_000, 32_000)


@dataclass(frozen=True)
class Configuration:
    """One way to start one engine, perhaps with its own trainer flags and variables."""

    name: str
    engine: str
    launcher: str
    controller: str = ""  # horovodrun only: its --mpi or --gloo
    transport: str = ""  # the trainer's --transport; "": the trainer chooses
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    interface: str | None = None  # of the network between hosts; None: the launcher finds one
    command: tuple[str, ...] = ()  # of a user's own script; empty: it starts a trainer

    @property
    def trained_by(self) -> Engine:
        """Its engine's entry in ENGINES."""
        return ENGINES[self.engine]

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """All but flags and variables: configurations of one kind start in the same way."""
        return self.engine, self.launcher, self.controller, self.transport

    @property
    def has_daemons(self) -> bool:
        """Whether the launcher's daemons, not ssh, start the ranks, on hosts that they choose."""
        return LAUNCHERS.get(self.launcher, NO_LAUNCHER).reaches == "daemons"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The trainer flags of this configuration."""
        return (*(("--transport", self.transport) if self.transport else ()), *self.flags)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that this configuration adds to the user's."""
        network = dict.fromkeys(INTERFACE_VARIABLES, self.interface) if self.interface else {}
        return network | self.environment

    @property
    def assignments(self) -> list[str]:
        """The `variables` as arguments of env(1)."""
        return [f"{name}={value}" for name, value in self.variables.items()]

    def launch_words(self, workers: int, hosts: str | None) -> list[str]:
        """Return the words before the trainer's path. `hosts` is as in `a:2,b:2`; None: this host.

        No launcher binds a process to a core: horovodrun gives mpirun `--bind-to none` and torchrun
        never binds, so a plain mpirun and srun get the same flag. mpirun must not count its slots
        itself either, since it would refuse more workers than physical cores: like horovodrun, we
        give it `localhost:N`.

        On this host the ranks inherit all variables. To other hosts horovodrun and srun pass all
        variables, mpirun only those that its flags name.
        """
        env = ["env", *self.assignments] if self.variables else []
        return [*env, *self.launcher_words(workers, hosts)]

    def launcher_words(self, workers: int, hosts: str | None) -> list[str]:
        """Return the launcher and its flags."""
        workers += self.trained_by.servers  # a launcher treats both alike
        n = str(workers)
        if self.launcher == "python":
            return ["python"]
        if self.launcher == "torchrun":
            if is_only_here(workers, hosts):
                # Without --local-addr its ranks look for each other by this host's name, which may
                # not resolve here.
                return [
                    "torchrun",
                    "--standalone",
                    "--local-addr",
                    "127.0.0.1",
                    "--nproc-per-node",
                    n,
                ]
            assert hosts is not None
            return self.torchrun_words(placement(workers, hosts))
        if self.launcher == "srun":
            return ["srun", "--ntasks", n, *self.srun_words(workers, hosts), "python"]
        on_hosts = [] if hosts is None else ["-H", used_hosts(workers, hosts)]
        if self.launcher == "horovodrun":
            if self.interface and hosts is not None:
                on_hosts += ["--network-interface", self.interface]
            return ["horovodrun", f"--{self.controller}", "-np", n, *on_hosts, "python"]
        here = ["-H", f"localhost:{n}", "--bind-to", "none"]
        placed = here if hosts is None else [*on_hosts, *self.placing_words()]
        return ["mpirun", "-np", n, *placed, *MPIRUN_OF_HOROVODRUN, "python"]

    def torchrun_words(self, placed: dict[str, int]) -> list[str]:
        """Return the words that start torchrun once on each host.

        mpirun starts them: it reaches the hosts by ssh, and ends with the torchruns. The ranks meet
        at the first host by torchrun's own rendezvous. Its id and port are random, since jobs with
        the same ones would join in one training."""
        first, *_ = placed
        on_each = set(placed.values())
        if len(on_each) > 1:
            ranks = ", ".join(f"{count} on {host}" for host, count in placed.items())
            raise UserError(
                f"{self.name}: torchrun needs the same number of ranks on each host, but there "
                f"would be {ranks}; give other --workers or --hosts, or take ddp-mpirun"
            )
        one_each = ",".join(f"{host}:1" for host in placed)
        return [
            "mpirun",
            "-np",
            str(len(placed)),
            "-H",
            one_each,
            *self.placing_words(),
            "torchrun",
            "--nnodes",
            str(len(placed)),
            "--nproc-per-node",
            str(on_each.pop()),
            "--rdzv-id",
            secrets.token_hex(6),
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{first}:{secrets.choice(RENDEZVOUS_PORTS)}",
        ]

    def srun_words(self, workers: int, hosts: str | None) -> list[str]:
        """Return srun's flags. MPI's processes find each other by PMIx, unless SLURM_MPI_TYPE says
        otherwise. `hosts` of the allocation are filled in the same order as by other launchers."""
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
        """Return mpirun's flags for several hosts. They are filled one by one, as by horovodrun.
        mpirun passes on the variables that -x names, and warns if one is not set."""
        needed = NEEDED_ELSEWHERE & (os.environ.keys() | set_variables().keys())
        names = sorted(needed | steering_variables().keys() | self.variables.keys())
        exported = [word for name in names for word in ("-x", name)]
        return ["--bind-to", "none", "--map-by", "slot", *exported]


CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("ddp-torchrun", "ddp", "torchrun"),
        Configuration("ddp-mpirun", "ddp", "mpirun"),
        Configuration("ddp-gloo", "ddp", "mpirun", transport="gloo"),
        Configuration("ddp-mpi", "ddp", "mpirun", transport="mpi"),
        Configuration("ddp-srun", "ddp", "srun"),
        Configuration("horovod-mpi", "horovod", "horovodrun", "mpi"),
        Configuration("horovod-gloo", "horovod", "horovodrun", "gloo"),
        Configuration("horovod-mpirun", "horovod", "mpirun"),
        Configuration("horovod-mpirun-gloo", "horovod", "mpirun", transport="gloo"),
        Configuration("horovod-mpirun-mpi", "horovod", "mpirun", transport="mpi"),
        Configuration("horovod-srun", "horovod", "srun"),
        Configuration("mpi4py-mpirun", "mpi4py", "mpirun", transport="mpi"),
        # The rungs of docs/ladder.md. One that `python` starts is one process, whatever --workers.
        Configuration("data-parallel", "data_parallel", "python"),
        Configuration("parameter-averaging", "parameter_averaging", "torchrun"),
        Configuration("zero-optimizer", "zero_optimizer", "torchrun"),
        Configuration("fsdp", "fsdp", "torchrun"),
        Configuration("model-parallel", "model_parallel", "torchrun"),
        Configuration("pipeline", "pipeline", "torchrun"),
        Configuration("parameter-server", "parameter_server", "torchrun"),
        Configuration("rpc-pipeline", "rpc_pipeline", "torchrun"),
        Configuration("ddp-with-rpc", "ddp_with_rpc", "torchrun"),
    )
}
DEFAULT_CONFIGURATIONS = ("ddp-torchrun", "horovod-mpi")
