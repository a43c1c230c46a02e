"""What is left of a training after a fault: python tests/faults/campaign.py --help

A trial starts a training by a real launcher, does something bad to it at a moment drawn from the
seed, and looks at how it ends: by itself, with one message, with no process and no shared memory
left, and with each checkpoint whole. Then it gives the same command again, which has to end with
the weights of a training that nobody disturbed. Nothing here asserts a time: how long the training
took to end, and to make its next step, is in the table.
"""

import argparse
import functools
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tabulate import tabulate

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "cluster"))
from elastic import steps_in, steps_without_figures
from hosts import Host, hosts
from launching import (
    GUARD_S,
    LAUNCHERS,
    RANKS,
    ROOT,
    SLOW_DISK,
    SMALL,
    TRAINERS,
    Finished,
    before_the_launchers_words,
    change_on_rank,
    launch,
    marked,
    read_json,
    resumed_at,
    run,
    wait_until,
)

from recipe.record.checkpoint import step_path
from tools import namespaces

# Of SMALL's 70 steps one ends an epoch, with the first evaluation: step 60.
LONG = SMALL.replace("--epochs 2", "--epochs 24").replace("--max-steps 70", "--max-steps 1400")
PLACE = "--log-interval 1 --name run --resume auto"
Start = tuple[str, str]  # a launcher and an engine
DDP, DDP_MPI = ("torchrun", "ddp"), ("mpirun --transport mpi", "ddp")
GLOO, HOROVODRUN = ("horovodrun --gloo", "horovod"), ("horovodrun --mpi", "horovod")
MPIRUN = ("mpirun", "horovod")
PASSES_ON = ("torchrun --signals-to-handle", "ddp")  # SIGUSR1, as mpirun does
# They start all ranks anew when one is lost.
RESTARTS = [("torchrun --max-restarts", "ddp"), ("horovodrun --host-discovery-script", "horovod")]
BETWEEN_HOSTS = [DDP, ("mpirun", "ddp"), GLOO, MPIRUN]
# One rank on each of two hosts.
ON_HOSTS = {
    "torchrun": (
        "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-id faults --rdzv-backend c10d "
        "--rdzv-endpoint node0:29500 {trainer}"
    ),
    "mpirun": "mpirun -np 2 -H node0:1,node1:1 {python} {trainer}",
    "horovodrun --gloo": "horovodrun --gloo -np 2 -H node0:1,node1:1 {python} {trainer}",
}
# Two of them meet on one host, each as if on one of its own.
PAIR = ("torchrun --nnodes 1:2", "ddp")
ONE_OF_A_PAIR = (
    "torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-id faults --rdzv-backend "
    "c10d --rdzv-endpoint 127.0.0.1:{port} --local-addr 127.0.0.1 --rdzv-conf "
    "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=5 {trainer}"
)
# Has a folder in the place of /dev/shm, where other jobs leave files, too; for root on one host.
OWN_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"']
FROZEN = "--checkpoint-steps 20 --stall-timeout 10"
# mpirun's own words, torchrun's, and horovodrun's of a process that was killed.
KILLED = r"exited on signal 9|Signal 9 \(SIGKILL\)|exit(ed)? with (status )?code"
# A message of ours, after what launchers put before a rank's lines.
ERROR = r"^(?:\[[\d,]+\]<stderr>:)?(?:\[rank .*?\] )?error: .*"
# Runs on one rank when it has imported recipe.training.metrics: the evaluation ends the process.
DIES = "import os; module.evaluate = lambda *_, **__: os.kill(os.getpid(), 9)"
# Runs on one rank when it has imported recipe.training.model: a bit of a weight flips in one step.
FLIPS = """
import torch
real = module.update_ema
def update_ema(ema, model, config, step):
    if step == {step}:
        next(model.parameters()).detach().view(-1).view(torch.int32)[0] ^= 1 << 20
    real(ema, model, config, step)
module.update_ema = update_ema
"""
# The same, until there is a file "hurry": steps take so long that some are left when the ranks have
# learned of a signal.
SLOW = """
import os, time
real = module.update_ema
def update_ema(*words):
    real(*words)
    os.path.exists("{folder}/hurry") or time.sleep(0.2)
module.update_ema = update_ema
"""
# Runs on each rank when it has imported recipe.session: an exchange before training fails.
CANNOT_EXCHANGE = """
def share_host(*_):
    raise RuntimeError("ncclSystemError: No space left on device")
module.share_host = share_host
"""
# The same, on one rank: it dies, once, after its last exchange.
DIES_AT_END = """
import os
real = module.Session.end
def end(*words):
    code = real(*words)
    if not os.path.exists("{folder}/died"):
        open("{folder}/died", "w").close()
        os.kill(os.getpid(), 9)
    return code
module.Session.end = end
"""
# Runs on each rank when it has imported recipe.training.metrics: until there is a file "hurry", a
# forward pass takes longer than the notice that a watcher gives at least.
LONG_FORWARD = """
import os, time
real = module.batch_sums
def batch_sums(*words):
    os.path.exists("{folder}/hurry") or time.sleep(9)
    return real(*words)
module.batch_sums = batch_sums
"""
# Runs in each process at its start: of each hundred images one cannot be read, so many times.
READ_ERRORS = """
import builtins, collections, os
real_open, failed = builtins.open, collections.Counter()
def patched(file, mode="r", *args, **kwargs):
    if mode == "rb" and str(file).endswith("77.jpg") and failed[file] < {times}:
        failed[file] += 1
        raise OSError({error}, os.strerror({error}), file)
    return real_open(file, mode, *args, **kwargs)
builtins.open = patched
"""


@dataclass(frozen=True)
class Scenario:
    """A fault, and what has to be so after it, beside what has to be so after any."""

    fault: Callable[["Trial"], None] = lambda trial: None
    said: str = ""  # a regular expression, for what comes on the console
    starts: Sequence[Start] = (DDP, DDP_MPI, GLOO, HOROVODRUN, MPIRUN)
    trials: int = 10  # of each start
    flags: str = "--checkpoint-steps 20"
    shim: Callable[["Trial"], dict[str, str]] = lambda trial: {}  # the first start's environment
    saves: bool = False  # a checkpoint of the step at which it stops
    code: int = 75  # mpirun's, after a checkpoint was saved; other launchers make a 1 of it
    heals: bool | None = False  # goes on by itself, to its end; None: as the launcher decides
    loses_ranks: bool = False  # others go on, so the weights are not those of an undisturbed one
    training: str = SMALL
    limit_s: int = GUARD_S  # for a start
    disk_mb: int = 0  # the run is on a disk of its own that has so much room
    on_hosts: bool = False  # one rank on each of two hosts


@dataclass
class Result:
    """How a trial went; seconds are None where there are none."""

    scenario: str
    engine: str
    launcher: str
    number: int
    problem: str = ""  # empty: the training survived
    folder: str = ""  # of a trial that failed
    seconds_to_end: float | None = None  # from the fault to the launcher's end
    seconds_to_recover: float | None = None  # to the first step, from the second start or the fault
    recoveries: list[float] = field(default_factory=list)  # the same, of each fault, if it heals
    steps_lost: int | None = (
        None  # steps that had ended and were made again: the most after a fault
    )
    effective_share: float | None = None  # steps that count, of the time with faults

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.scenario, self.engine, self.launcher, self.number


@dataclass
class Trial:
    """One fault in one training: what was drawn for it, and what is known of it."""

    scenario: Scenario
    result: Result
    folder: Path
    random: random.Random
    hosts: list[Host] = field(default_factory=list)
    process: Any = None  # the launcher
    began = struck = 0.0  # the last start and the fault, by the monotonic clock
    recorded = ""  # before the fault, or the second start
    problem: AssertionError | None = None  # that came while the training went on

    def __post_init__(self) -> None:
        self.rank = self.random.randrange(2)
        self.step = self.random.randint(5, 20 if self.scenario.saves else 55)
        self.runs = self.folder / "runs"
        self.run_folder = self.runs / "run"
        self.memory = self.folder / "shm"
        self.port = 20000 + os.getpid() % 12000

    def metrics(self) -> str:
        """What the run has recorded so far."""
        file = self.run_folder / "metrics.jsonl"
        return file.read_text() if file.exists() else ""

    def makes_steps(self) -> bool:
        """Whether a start that was not recorded before has made a step."""
        text = self.metrics()
        start, _, later = text[text.rfind('{"kind": "event"') :].partition("\n")
        return start not in self.recorded and '"kind": "step"' in later

    def wait_for(self, is_so: Callable[[], object]) -> None:
        """Wait until it is so while the training goes on, and for a moment more."""
        wait_until(lambda: is_so() or self.process.poll() is not None, pause=0.01)
        assert self.process.poll() is None, "the training ended before the fault"
        time.sleep(self.random.uniform(0, 0.05))

    def wait_for_step(self) -> None:
        self.wait_for(lambda: self.metrics().count('"kind": "step"') >= self.step)

    def wait_for_write(self) -> None:
        self.wait_for(lambda: any((self.run_folder / "checkpoints").glob(".*.partial")))

    def wait_for_last_write(self) -> None:
        last = self.checkpoint_of_last_step
        self.wait_for(lambda: any(last.parent.glob(f".{last.name}.*.partial")))

    @property
    def checkpoint_of_last_step(self) -> Path:
        last = int(self.scenario.training.split()[-1])
        return step_path(self.run_folder / "checkpoints", last)

    def strikes(self) -> None:
        """The fault comes now."""
        self.struck, self.recorded = time.monotonic(), self.metrics()

    def processes(self) -> list[psutil.Process]:
        """The ranks, by their numbers: the first of the processes of their words; where one watches
        over it, the second. Those that a rank has forked for its loader workers are younger."""
        mark = psutil.Process(self.process.pid).environ()["LAUNCH_MARK"]
        found = defaultdict[int, list[psutil.Process]](list)
        for process in [
            *marked(mark),
            *(process for host in self.hosts for process in host.processes()),
        ]:
            with suppress(psutil.Error):
                environ, words = process.environ(), process.cmdline()
                number = next((environ[name] for name in RANKS if name in environ), None)
                if number and any(word == TRAINERS[self.result.engine] for word in words[1:3]):
                    found[int(number)].append(process)
        age = psutil.Process.create_time
        return [sorted(found[number], key=age)[:2][-1] for number in sorted(found)]

    def command(self) -> list[str]:
        lines = {**LAUNCHERS, PAIR[0]: ONE_OF_A_PAIR, **(ON_HOSTS if self.hosts else {})}
        line = lines[self.result.launcher].format(
            python=sys.executable, trainer=TRAINERS[self.result.engine], ranks=2, port=self.port
        )
        scenario = self.scenario
        flags = f"{scenario.flags} --workers {self.result.number % 2}"  # every other one with them
        words = f"{line} {scenario.training} {flags} {PLACE} --log-dir {self.runs}".split()
        if self.result.launcher == PAIR[0]:
            both = f"{shlex.join(words)} & first=$!; {shlex.join(words)} & wait $!; last=$?"
            words = ["sh", "-c", f"{both}; wait $first && exit; exit $last"]
        if not self.hosts:
            return [*OWN_MEMORY, str(self.memory), *words] if self.memory.exists() else words
        here, away = (host.inside(*words) for host in self.hosts)
        if self.result.launcher != "torchrun":
            return here
        both = f"{shlex.join(away)} & {shlex.join(here)}; code=$?; wait; exit $code"
        return ["sh", "-c", both]

    def start(self, meanwhile: Callable[["Trial"], None], **environ: str) -> Finished:
        """Give the command, and wait for its end."""

        def call(process: subprocess.Popen) -> None:
            self.process, self.began = process, time.monotonic()
            try:
                meanwhile(self)
            except AssertionError as error:
                self.problem = error

        finished = run(self.command(), self.scenario.limit_s, call, **environ)
        with (self.folder / "output.log").open("a") as log:
            log.write(f"$ {shlex.join(self.command())}\n{finished.output}\n")
        if self.problem:
            raise self.problem
        return finished

    def carry_out(self, expected: str) -> None:
        """Do all of it; AssertionError if the training does not end with the weights of which this
        is the digest, or does not keep another promise."""
        scenario, others = self.scenario, set(os.listdir("/dev/shm"))
        with ExitStack() as stack:
            self.runs.mkdir()
            if scenario.on_hosts:
                self.hosts = stack.enter_context(hosts(self.folder / "hosts"))
            elif namespaces.is_root():
                self.memory.mkdir()
                stack.enter_context(small_disk(self.memory, mb=1024))
                others = set()
            if scenario.disk_mb:
                stack.enter_context(small_disk(self.runs, scenario.disk_mb))
            finished = self.start(scenario.fault, **scenario.shim(self))
            self.check_end(finished, others)
            if not scenario.heals:
                if self.struck:
                    self.result.seconds_to_end = self.began + finished.seconds - self.struck
                (self.runs / "filler").unlink(missing_ok=True)
                self.cut("up")
                self.recorded = self.metrics()
                self.start(recover).checked()
            self.check_training(expected)

    def check_end(self, finished: Finished, others: set[str]) -> None:
        """What has to be so after a fault."""
        scenario, said = self.scenario, finished.output
        own_words = before_the_launchers_words(said)
        if scenario.heals is not None:
            assert (finished.returncode == 0) == scenario.heals, f"exit code {finished.returncode}"
        assert re.search(scenario.said, said), f"nobody said {scenario.said}"
        assert "Traceback" not in own_words or "Traceback" in scenario.said, "a traceback"
        errors = re.findall(ERROR, said, re.MULTILINE)
        assert len(errors) <= max(1, len(self.hosts)), f"{len(errors)} messages: {errors}"
        if scenario.saves:
            assert said.count("stopped after step") == 1, "not stopped with a checkpoint"
            (stopped,) = re.findall(r"stopped after step (\d+)", said)
            file = step_path(self.run_folder / "checkpoints", int(stopped))
            assert file.exists(), f"no checkpoint of step {stopped}, at which it stopped"
            if self.result.launcher.startswith("mpirun"):
                assert finished.returncode == scenario.code, f"exit code {finished.returncode}"
        for checkpoint in (self.run_folder / "checkpoints").glob("*.pt"):
            assert zipfile.ZipFile(checkpoint).testzip() is None, f"{checkpoint} is damaged"
        with suppress(AssertionError):  # what the launcher leaves may take its time to end
            wait_until(lambda: not self.left(others), 60, 0.1)
        left = self.left(others)
        assert not left, f"left: {left}"

    def left(self, others: set[str]) -> list[str]:
        """Processes on the hosts, and files in /dev/shm that are not `others'` and nobody's."""
        words = [" ".join(process.cmdline()) for host in self.hosts for process in host.processes()]
        # sshd waits for a peer that is cut off for as long as its own settings say.
        words = [line for line in words if not line.startswith("sshd: ")]
        if self.memory.exists():
            return [*words, *os.listdir(self.memory)]
        there = set(os.listdir("/dev/shm")) - others
        return [*words, *sorted(there - shared())] if there else words

    def check_training(self, expected: str) -> None:
        """What has to be so in the end."""
        steps = [step["step"] for step in steps_in(self.run_folder)]
        last = int(self.scenario.training.split()[-1])
        steps += steps_without_figures(self.run_folder)
        assert sorted(steps) == list(range(1, last + 1)), f"steps {steps}"
        summary = read_json(self.run_folder / "summary.json")
        is_same = summary["weights_sha256"] == expected
        assert is_same != self.scenario.loses_ranks, "other weights"
        assert self.checkpoint_of_last_step.exists(), "no checkpoint of the last step"
        assert not [*self.run_folder.rglob(".*.partial")], "partial files are left"

    def cut(self, state: str) -> None:
        """Bring the link of the last host up, or down."""
        for host in self.hosts[-1:]:
            namespaces.ip("-n", host.namespace, "link", "set", "eth0", state)


def shared() -> set[str]:
    """The files in /dev/shm that a live process has in its memory: the training's are gone."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            found |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return found


# ---- Faults ----


def recover(trial: Trial) -> None:
    """Note when the training makes its first step since, and how many it makes again."""
    made = max([0, *(step["step"] for step in steps_in(trial.run_folder))])
    result = trial.result
    wait_until(lambda: trial.makes_steps() or trial.process.poll() is not None, pause=0.01)
    since = trial.struck if trial.scenario.heals else trial.began
    result.seconds_to_recover = time.monotonic() - since
    if trial.scenario.heals:
        result.recoveries.append(result.seconds_to_recover)
        lost = made - sum(resumed_at(trial.run_folder)[-1:])
        result.steps_lost = max(lost, result.steps_lost or 0)


def send(
    *numbers: signal.Signals,
    to: str = "a rank",
    when: Callable[[Trial], None] = Trial.wait_for_step,
    times: int = 1,
) -> Callable[[Trial], None]:
    """A fault: one of these signals to a rank, to rank 0, or to the launcher."""

    def fault(trial: Trial) -> None:
        trial.wait_for(lambda: '"kind": "step"' in trial.metrics())
        number, target = trial.random.choice(numbers), trial.process
        if to != "the launcher":
            target = trial.processes()[
                0 if to == "rank 0" else trial.rank
            ]  # takes a while, in which there are many steps
        when(trial)
        trial.strikes()
        for _ in range(times):
            target.send_signal(number)
            time.sleep(0.3)
        if trial.scenario.heals:
            recover(trial)

    return fault


def kill_in_long_forward(trial: Trial) -> None:
    """A rank, while the other is in its forward pass: no step is lost."""
    trial.wait_for(lambda: trial.metrics().count('"kind": "step"') >= 2)
    trial.strikes()
    trial.processes()[trial.rank].kill()
    (trial.folder / "hurry").touch()
    recover(trial)
    assert trial.result.steps_lost == 0, f"{trial.result.steps_lost} steps lost"


def lose_torchrun(trial: Trial) -> None:
    """The one of two that does not hold their store, with all below it."""
    trial.wait_for_step()
    below = psutil.Process(trial.process.pid).children(recursive=True)
    agents = [
        process
        for process in below
        if any(word.endswith("/torchrun") for word in process.cmdline()[:2])
    ]
    ports = [{link.laddr[1] for link in process.net_connections()} for process in agents]
    (lost,) = (
        process for process, used in zip(agents, ports, strict=True) if trial.port not in used
    )
    trial.strikes()
    for process in [lost, *lost.children(recursive=True)]:
        process.kill()
    recover(trial)


def kill_often(trial: Trial) -> None:
    """A rank every 20 s, for 5 minutes."""
    trial.wait_for_step()
    began, there = time.monotonic(), len(steps_in(trial.run_folder))
    for number in range(15):
        trial.strikes()
        trial.random.choice(trial.processes()).kill()
        recover(trial)
        with suppress(subprocess.TimeoutExpired):
            trial.process.wait(max(0.0, 20 - (time.monotonic() - trial.struck)))
        assert trial.process.poll() is None, f"the training ended after fault {number + 1}"
    seconds = sum(step["seconds"] for step in steps_in(trial.run_folder)[there:])
    trial.result.effective_share = seconds / (time.monotonic() - began)
    (trial.folder / "hurry").touch()


def fill_disk(trial: Trial) -> None:
    trial.wait_for_step()
    trial.strikes()
    with suppress(OSError), (trial.runs / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(2**16))


def cut_link(trial: Trial) -> None:
    trial.wait_for_step()
    trial.strikes()
    trial.cut("down")


def slow_link(trial: Trial) -> None:
    """For some seconds, in which no step ends."""
    trial.wait_for_step()
    namespaces.limit_rate(trial.hosts, 0.001)
    time.sleep(1)  # of steps that are on their way
    before = trial.metrics().count('"kind": "step"')
    time.sleep(5)
    after = trial.metrics().count('"kind": "step"')
    namespaces.limit_rate(trial.hosts, None)
    assert after <= before + 1, f"the link is not slow: {after - before} steps in five seconds"


@contextmanager
def small_disk(folder: Path, mb: int) -> Iterator[None]:
    """A file system of so many MB in the place of `folder`."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mb}m", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def everywhere(code: str, **values: int) -> Callable[[Trial], dict[str, str]]:
    """A shim: `code` runs in each process at its start."""

    def shim(trial: Trial) -> dict[str, str]:
        (trial.folder / "sitecustomize.py").write_text(code.format(**values) if values else code)
        return {"PYTHONPATH": f"{trial.folder}:{ROOT}"}

    return shim


def on_rank(module: str, code: str, every: bool = False) -> Callable[[Trial], dict[str, str]]:
    """A shim: `code` runs on one rank, or `every` one, when it has imported `module`."""

    def shim(trial: Trial) -> dict[str, str]:
        words = code.format(step=trial.step, folder=trial.folder)
        return change_on_rank(None if every else trial.rank, module, words, trial.folder)

    return shim


SLOWLY = on_rank("recipe.training.model", SLOW)
TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
# mpirun waits so many seconds before it passes a signal on, and again before it kills.
PATIENT = {"OMPI_MCA_odls_base_sigkill_timeout": "5"}
# mpirun, which else notices after eight minutes that a host is cut off.
ATTENTIVE = {
    f"OMPI_MCA_oob_tcp_keepalive_{name}": value
    for name, value in {"time": "5", "intvl": "1", "probes": "3"}.items()
}
SCENARIOS = {
    "kill-rank": Scenario(send(signal.SIGKILL), KILLED),
    # Nothing has to be said: most launchers pass on what their ranks say.
    "kill-launcher": Scenario(send(signal.SIGKILL, to="the launcher"), trials=4),
    "kill-in-evaluation": Scenario(
        said=KILLED, trials=2, shim=on_rank("recipe.training.metrics", DIES)
    ),
    "kill-in-write": Scenario(
        send(signal.SIGKILL, when=Trial.wait_for_write),
        KILLED,
        trials=2,
        shim=everywhere(SLOW_DISK),
    ),
    "restart": Scenario(send(signal.SIGKILL), starts=RESTARTS, trials=50, heals=True),
    # Steps of 0.2 s; what survivors keep in memory counts, not a checkpoint each 10 s.
    "kill-often": Scenario(
        kill_often,
        starts=RESTARTS,
        trials=1,
        flags="--checkpoint-steps 50",
        heals=True,
        shim=on_rank("recipe.training.model", SLOW, every=True),
        training=LONG,
        limit_s=900,
    ),
    "own-error": Scenario(
        said="(?s)Traceback .*: ncclSystemError: No space left on device",
        starts=[("torchrun --max-restarts 1", "ddp"), RESTARTS[1]],
        trials=2,
        shim=on_rank("recipe.session", CANNOT_EXCHANGE, every=True),
    ),
    "crash-at-end": Scenario(
        starts=RESTARTS, trials=2, shim=on_rank("recipe.session", DIES_AT_END), heals=None
    ),
    "kill-in-last-write": Scenario(
        send(signal.SIGKILL, to="rank 0", when=Trial.wait_for_last_write),
        starts=RESTARTS,
        trials=2,
        shim=everywhere(SLOW_DISK),
        heals=True,
    ),
    "kill-in-long-forward": Scenario(
        kill_in_long_forward,
        starts=RESTARTS,
        trials=2,
        heals=True,
        shim=on_rank("recipe.training.metrics", LONG_FORWARD, every=True),
    ),
    "lose-torchrun": Scenario(
        lose_torchrun,
        said="Traceback",
        starts=[PAIR],
        trials=2,
        heals=True,
        loses_ranks=True,
        shim=lambda trial: {"GLOO_SOCKET_IFNAME": "lo"},
    ),
    "signal-rank": Scenario(send(TERM, INT, HUP, USR1), saves=True, shim=SLOWLY),
    "signal-launcher": Scenario(
        send(TERM, INT, to="the launcher"), starts=[DDP, GLOO], saves=True, shim=SLOWLY
    ),
    "signal-mpirun": Scenario(
        send(USR1, to="the launcher"), starts=[DDP_MPI, MPIRUN, PASSES_ON], saves=True, shim=SLOWLY
    ),
    "end-mpirun": Scenario(
        send(TERM, INT, to="the launcher"),
        starts=[DDP_MPI, MPIRUN],
        saves=True,
        code=1,
        shim=lambda trial: SLOWLY(trial) | PATIENT,
    ),
    # Nothing has to be said: at the second one mpirun kills ranks that have not heard of the first.
    "signal-twice": Scenario(
        send(TERM, to="the launcher", when=Trial.wait_for_write, times=2),
        trials=2,
        shim=everywhere(SLOW_DISK),
    ),
    "stop-rank": Scenario(
        send(signal.SIGSTOP), r"no batch for 10 s .*rank \d on .*stopped", trials=4, flags=FROZEN
    ),
    "disk-full": Scenario(fill_disk, "No space left on device", trials=2, disk_mb=32),
    "read-errors": Scenario(trials=2, heals=True, shim=everywhere(READ_ERRORS, times=2, error=116)),
    "unreadable": Scenario(
        said="77.jpg: cannot be read", trials=1, shim=everywhere(READ_ERRORS, times=99, error=5)
    ),
    "flipped-bit": Scenario(
        said=r"the ranks hold different weights in \S+: .* on rank [01]",
        trials=2,
        flags="--checkpoint-steps 20 --weight-check-steps 10",
        shim=on_rank("recipe.training.model", FLIPS),
    ),
    "slow-link": Scenario(slow_link, starts=BETWEEN_HOSTS, trials=2, heals=True, on_hosts=True),
    "cut-link": Scenario(
        cut_link,
        "no batch for 10 s|lost communication with a remote daemon",
        BETWEEN_HOSTS,
        trials=5,
        flags=FROZEN,
        shim=lambda trial: ATTENTIVE,
        on_hosts=True,
    ),
}


# ---- The campaign ----


def lacking(name: str) -> list[str]:
    """What a scenario needs and this machine or user lacks."""
    if SCENARIOS[name].on_hosts:
        return namespaces.missing_tools("tc")
    return ["root"] if SCENARIOS[name].disk_mb and not namespaces.is_root() else []


@functools.cache
def undisturbed(training: str) -> str:
    """The digest of the weights of a training that nobody disturbs: by either engine, on CPUs, with
    two workers, over any transport."""
    with tempfile.TemporaryDirectory() as folder:
        launch(*DDP, f"{training} --name run --log-dir {folder}", timeout=900).checked()
        return str(read_json(Path(folder, "run", "summary.json"))["weights_sha256"])


def attempt(name: str, start: Start, number: int, seed: int, parent: Path) -> Result:
    """Carry out a trial; its folder, in `parent`, is kept if it fails."""
    expected = undisturbed(SCENARIOS[name].training)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    result = Result(name, start[1], start[0], number)
    drawn = random.Random(f"{seed} {name} {start} {number}")
    try:
        Trial(SCENARIOS[name], result, folder, drawn).carry_out(expected)
        shutil.rmtree(folder)
    except Exception as error:  # whatever it is, the trial has failed
        (folder / "problem.txt").write_text(str(error))
        result.problem = (str(error) or type(error).__name__).splitlines()[0]
        result.folder = str(folder)
    return result


def table(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row for each scenario with an engine and a launcher."""
    groups = defaultdict[tuple[str, str, str], list[Result]](list)
    for result in results:
        groups[result.key[:3]].append(result)

    def of(
        values: Iterable[float | None],
        figure: Callable[[list[float]], float] = statistics.median,
        digits: int = 1,
    ) -> float | None:
        known = [value for value in values if value is not None]
        return round(figure(known), digits) if known else None

    def recoveries(group: Sequence[Result]) -> Iterator[float | None]:
        for result in group:
            yield from result.recoveries or [result.seconds_to_recover]

    return [
        {
            "scenario": scenario,
            "engine": engine,
            "launcher": launcher,
            "trials": len(group),
            "survived": sum(not result.problem for result in group),
            "median seconds to end": of(result.seconds_to_end for result in group),
            "median seconds to recover": of(recoveries(group)),
            "worst": of(recoveries(group), max),
            "most steps lost": of((result.steps_lost for result in group), max, 0),
            "effective share": of((result.effective_share for result in group), digits=2),
        }
        for (scenario, engine, launcher), group in groups.items()
    ]


def markdown(results: Sequence[Result]) -> str:
    """The table that lies beside the record."""
    return tabulate(table(results), headers="keys", tablefmt="github")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--launcher", help="only by this one", choices=[*LAUNCHERS])
    parser.add_argument("--trials", type=int, help="of each start, in place of the scenario's own")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument(
        "--out", type=Path, help="write trials and table there, as JSON; trials that it has stay"
    )
    options = parser.parse_args()
    results: list[Result] = []
    if options.out and options.out.exists():
        kept = json.loads(options.out.read_text())
        options.seed, results = kept["seed"], [Result(**trial) for trial in kept["trials"]]
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    print(f"--seed {options.seed}; what fails is kept in {folder}", flush=True)
    there = {result.key for result in results}
    for name in options.scenario:
        if lacks := lacking(name):
            print(f"{name}: skipped, for it needs {', '.join(lacks)}", flush=True)
            continue
        starts = [start for start in SCENARIOS[name].starts if options.launcher in (None, start[0])]
        numbers = range(1, (options.trials or SCENARIOS[name].trials) + 1)
        for start, number in itertools.product(starts, numbers):
            if (name, start[1], start[0], number) in there:
                continue
            result = attempt(name, start, number, options.seed, folder)
            results.append(result)
            told = f"FAILED: {result.problem} ({result.folder})" if result.problem else "survived"
            print(f"{name}, {start[1]} by {start[0]}, trial {number}: {told}", flush=True)
            if options.out:
                trials = [asdict(result) for result in results]
                found = {"seed": options.seed, "table": table(results), "trials": trials}
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(markdown(results))
    failed = sum(bool(result.problem) for result in results)
    if not failed:
        shutil.rmtree(folder)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
