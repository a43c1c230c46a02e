"""What can be compared: engines, and configurations, each a way to start one. launchers.py has the
commands."""

from dataclasses import dataclass, field
from typing import Any

from compare.plan.environment import place_of, search_path

# Variables that make Gloo, NCCL and Open MPI use one network interface.
INTERFACE_VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "OMPI_MCA_btl_tcp_if_include",
    "OMPI_MCA_oob_tcp_if_include",
)


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
    "ddp": Engine("ddp_train/train.py", "DDP", True, "ddp_train/torch_allreduce.py", ablates=True),
    "horovod": Engine(
        "horovod_train/train.py",
        "Horovod",
        True,
        "horovod_train/horovod_allreduce.py",
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
}
# The engines to compare, in the order of tables.
PEERS = {name: engine.title for name, engine in ENGINES.items() if engine.is_peer}


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
    # Of a user's own script: OwnScript says what they mean.
    directory: str = ""
    commit: str = ""
    python: str = ""

    @property
    def trained_by(self) -> Engine:
        """Its engine's entry in ENGINES."""
        return ENGINES[self.engine]

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """All but flags and variables: configurations of one kind start in the same way."""
        return self.engine, self.launcher, self.controller, self.transport

    @property
    def arguments(self) -> tuple[str, ...]:
        """The trainer flags of this configuration."""
        return (*(("--transport", self.transport) if self.transport else ()), *self.flags)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that this configuration adds to the user's."""
        variables = dict.fromkeys(INTERFACE_VARIABLES, self.interface) if self.interface else {}
        variables |= self.environment
        if self.python:
            variables["PATH"] = search_path(self.python, self.environment.get("PATH"))
        return variables

    @property
    def place(self) -> str:
        """The folder in which the command of a user's own script runs; "": where run.py does."""
        return place_of(self.directory, self.commit)

    @property
    def assignments(self) -> list[str]:
        """The `variables` as arguments of env(1)."""
        return [f"{name}={value}" for name, value in self.variables.items()]


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
