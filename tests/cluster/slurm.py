"""A real Slurm on hosts in network namespaces: munge and slurmctld on the first, slurmd on each."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hosts import Host
from launching import GUARD_S, Finished, wait_until
from needs import skip_if_missing

CORES = 2  # that Slurm believes each host to have, and as many GPUs
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
SLURM_CONF = """
ClusterName=test
SlurmctldHost={first.name}({first.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu,shard
ReturnToService=2
JobRequeue=1
KillWait=5
MessageTimeout=60
SchedulerParameters=sched_interval=1,batch_sched_delay=0,defer
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=all Nodes={names} Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes={names} PriorityTier=2 MaxTime=INFINITE State=UP
"""
NODE = f"CPUs={CORES} RealMemory=4000 Gres=gpu:{CORES},shard:{2 * CORES}"


@dataclass
class Slurm:
    """A Slurm that is up."""

    hosts: list[Host]
    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, command: list[str], timeout: float = GUARD_S, **environ: str) -> Finished:
        """Run a command on the first host."""
        return self.hosts[0].run(command, timeout, **self.variables, **environ)

    def ask(self, *command: str) -> str:
        return self.run(list(command)).checked().output.strip()

    def state(self, job: str) -> str:
        """Return a job's state, such as RUNNING."""
        text = self.ask("scontrol", "show", "job", job)
        return text.split("JobState=")[1].split()[0]

    def start(self, host: Host, *command: str) -> None:
        """Start a daemon on a host."""
        inside = ["nsenter", f"--target={host.sshd.pid}", "--net", "--uts", "--mount"]
        log = self.folder / f"{Path(command[0]).name}-{host.name}.out"
        with log.open("wb") as out:
            daemon = subprocess.Popen(
                [*inside, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | self.variables,
                start_new_session=True,
            )
        self.daemons.append(daemon)

    def end(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
            daemon.wait()


@contextlib.contextmanager
def slurm(hosts: list[Host], folder: Path) -> Iterator[Slurm]:
    """Start Slurm on the hosts, and end it."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    has_pmix = any(Path("/usr/lib").glob("*/libpmix.so"))  # Slurm's plugin looks for it
    skip_if_missing(missing if has_pmix else [*missing, "libpmix.so"], "Slurm")
    for inner in ("state", *(f"spool-{host.name}" for host in hosts)):
        (folder / inner).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    nodes = [f"NodeName={host.name} NodeAddr={host.address} {NODE}" for host in hosts]
    names = ",".join(host.name for host in hosts)
    text = SLURM_CONF.format(first=hosts[0], folder=folder, nodes="\n".join(nodes), names=names)
    (folder / "slurm.conf").write_text(text)
    # Slurm counts device files, whatever they are.
    devices = ("/dev/null", "/dev/zero")[:CORES]
    gpus = [f"NodeName={host.name} Name=gpu File={file}" for host in hosts for file in devices]
    shards = [f"NodeName={host.name} Name=shard Count={2 * CORES}" for host in hosts]
    # A folder that each host has for itself, as hosts that are not on one machine do.
    (folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/run\n")
    (folder / "gres.conf").write_text("\n".join([*gpus, *shards]) + "\n")
    cluster = Slurm(hosts, folder)
    configuration = str(folder / "slurm.conf")
    try:
        cluster.start(
            hosts[0],
            "munged",
            "--foreground",
            "--force",
            f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        )
        wait_for(lambda: (folder / "munge.socket").exists(), cluster)
        cluster.start(hosts[0], "slurmctld", "-D", "-f", configuration)
        for host in hosts:
            cluster.start(host, "slurmd", "-D", "-N", host.name, "-f", configuration)
        wait_for(lambda: idle_nodes(cluster) >= {host.name for host in hosts}, cluster)
        yield cluster
    finally:
        cluster.end()


def idle_nodes(cluster: Slurm) -> set[str]:
    finished = cluster.run(["sinfo", "--noheader", "--Node", "--format=%N %T"])
    lines = [line.split() for line in finished.output.splitlines()]
    return {words[0] for words in lines if len(words) == 2 and words[1] == "idle"}


def wait_for(is_so, cluster: Slurm) -> None:
    """Wait until something is so; fail with the daemons' logs if it never is."""
    try:
        wait_until(is_so, pause=0.3)
    except AssertionError as error:
        logs = sorted([*cluster.folder.glob("*.log"), *cluster.folder.glob("*.out")])
        tails = [f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs]
        raise AssertionError("Slurm did not get there:\n" + "\n".join(tails)) from error
