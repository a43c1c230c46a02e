"""Make a training script a side of a comparison: one import, and one call per step.

    from comparison_side import Side

    side = Side()
    for images, labels in batches:
        ...                            # a step, with any library
        side.step(images=len(images))  # at its end: the work of this rank

    python compare/run.py --side mine="torchrun --nproc-per-node 2 my_ddp.py" \\
                          --side theirs="horovodrun -np 2 python my_horovod.py"

In a comparison `step` waits while other sides have their turns, and ends the process when the
measurement is over. The script must keep training until then, for example for a million epochs.
Started by hand, the script runs as before: `step` returns at once.

This file needs nothing but Python 3.10, and is alone in its folder, which run.py puts on the
PYTHONPATH of scripts. A copy of it in your own project works as well, as long as its VERSION is
run.py's.

How it works: each rank has an agent on its host, a small process that holds the connection to the
scheduler (compare/running/scheduler.py), pauses and continues the rank with all processes that it
has started (SIGSTOP, SIGCONT), and passes on messages in both directions. Launchers are never
paused: they only wait. The rank forks its agent before it loads anything large. If the scheduler or
its host is gone, the agent ends the rank; if the agent is gone, a rank that is not paused ends
itself.

A message is a `State` with values, as JSON: one message of multiprocessing.connection, never
pickled. The scheduler sends the state that a rank must take:

    RUNNING   make a turn of `steps` steps of `case`; for this project's trainers also `exchange`:
              with exchange of gradients; `digest`: report a digest of the weights at the end
    PAUSED    stop
    ENDED     end

The agent sends the state that the rank is in: STARTING, with its identity; WARMING_UP after the
first step; READY after the warm-up and after each turn, with its measurements; PAUSED; ENDED, with
a `problem` if the script has misused its Side.
"""

import enum
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    Pipe,
    answer_challenge,
    deliver_challenge,
    wait,
)
from typing import Any, NamedTuple

# Of what scheduler and ranks say to each other. Raise it when an older side would misunderstand.
# Whatever changes, each version must be able to tell the other's: so the form of SCHEDULER stays,
# that of VERSIONED begins with the version, and a rank's first message has `side` and `version`.
VERSION = 2
# Environment variable: where the scheduler listens, the name of the side, and the number of warm-up
# steps, as ADDRESS,ADDRESS:PORT KEY SIDE STEPS
SCHEDULER = "COMPARE_SCHEDULER"
# Environment variable: the scheduler's VERSION, and the names of the variables by which launchers
# give ranks their places, as VERSION NAME,NAME. Version 1 had none.
VERSIONED = "COMPARE_PROTOCOL"
DELAY = "COMPARE_DELAY"  # environment variable: the known delay, as a share of a turn
LEAD_IN_STEPS = 1  # of each turn, before its clock starts
UNREACHABLE = "the scheduler of turns cannot be reached"  # the scheduler looks for this text
FORKED = (
    "side.step() was called in a fork of the process that had made the Side: let each rank make "
    "its own Side() after it was forked"
)
CLOSED = (
    "its Side is gone: its training has ended, or the script has let go of it, or has closed all "
    "its files; keep it, and train, until run.py ends this process"
)
UNREADABLE = "it has sent something that is no message"
CONNECT_SECONDS = 5.0  # time-out for each address
RANK_END_SECONDS = 3.0  # given to a rank to end by itself
CLOSED_SECONDS = 30.0  # the same, if its Side is gone: perhaps it evaluates, and then ends
POLL_SECONDS = 0.02  # between two looks whether it has
MOST_BYTES = 1 << 20  # of a message
MOST_SHOWN = 1 << 14  # characters of a command line, in a message
GIT_SECONDS = 10.0  # given to git to tell the commit
# Variables by which git tells a hook its repository. (Settings, GIT_CONFIG_..., are the user's.)
OF_A_REPOSITORY = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_IMPLICIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_INTERNAL_SUPER_PREFIX",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
)
BOOT_ID = "/proc/sys/kernel/random/boot_id"  # hosts that share a kernel share its cores, too
# Positions in /proc/PID/stat behind the name: state, parent, CPU times, and the start since boot
STATE, PARENT, USER, BEGAN = 0, 1, 11, 19
INSTALLED = re.compile("/(site|dist)-packages/")  # in the path of an installed module
# The packages whose versions a script's record holds, if the script has loaded them.
FRAMEWORKS = (
    "torch",
    "torchvision",
    "horovod",
    "mpi4py",
    "tensorflow",
    "jax",
    "deepspeed",
    "lightning",
)
# Buffers of BatchNorm: each rank has its own, from its own batches.
RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
Weights = Callable[[], Mapping[str, Any]]  # returns arrays or tensors by name


class Side:
    """Reports the steps of one rank of the script while a comparison runs.

    Args:
        weights: Returns the trained arrays or tensors by name, as `model.state_dict` does. Called
            once, after the first steps: equal digests show that two scripts do equal work. All
            ranks must have the same values, except for BatchNorm's running statistics.
        ranks: The script's total number of ranks. By default the launcher's variables give it; give
            it here if the script starts its own ranks.
    """

    def __init__(self, weights: Weights | None = None, ranks: int | None = None) -> None:
        self._client = Client(*join(ranks), weights) if SCHEDULER in os.environ else None

    @property
    def case(self) -> str:
        """The case of the next step, by its name in the plan: one launch measures all cases, and
        changes between them. "" in a plan without cases, in the first steps, and by hand."""
        return self._client.case if self._client is not None else ""

    def step(self, **done: float) -> None:
        """Report the end of a step and this rank's work in it, such as `images=64` or
        `tokens=8192`; speeds have the same unit. torch's work on a GPU is waited for; with another
        library, the script must do so before the call."""
        if len(done) != 1:
            raise TypeError("give the work of this step in one unit, as in step(images=64)")
        if self._client is not None:
            ((unit, amount),) = done.items()
            self._client.step_ended(unit, float(amount))


# -- Messages --------------------------------------------------------------------------------------


class State(enum.Enum):
    """What a rank does."""

    STARTING = "starting"  # until the end of its first step
    WARMING_UP = "warming up"
    READY = "ready"  # waits for a turn; some of its threads may poll
    RUNNING = "running"  # makes a turn
    PAUSED = "paused"
    ENDED = "ended"


def send(connection: Connection, state: State, **values: Any) -> None:
    """Send a message. Errors are ignored: if the other end is gone, `receive` returns ENDED."""
    with suppress(OSError):
        connection.send_bytes(json.dumps({"state": state.value, **values}).encode())


def receive(connection: Connection) -> tuple[State, dict[str, Any]]:
    """Wait for the next message; return its state and values, or ENDED if the other end is gone, or
    sends what is no message."""
    try:
        values = json.loads(connection.recv_bytes(MOST_BYTES))
        return State(values.pop("state")), values
    except EOFError:
        return State.ENDED, {}
    except OSError as error:  # without a number if the length of a message is wrong
        return State.ENDED, {} if error.errno else {"problem": UNREADABLE}
    except (ValueError, TypeError, LookupError, AttributeError):
        return State.ENDED, {"problem": UNREADABLE}


# -- The agent of a rank ---------------------------------------------------------------------------


def join(ranks: int | None = None) -> tuple[Connection, int]:
    """Take part in the comparison that `SCHEDULER` names, as one of `ranks` ranks (None: as many as
    the launcher's variables say). Return the connection to this rank's agent, and the number of
    warm-up steps. Processes that this one starts take no part: the variables are removed."""
    addresses, key, side, warm_up = os.environ.pop(SCHEDULER).split()
    version, _, names = os.environ.pop(VERSIONED, "1").partition(" ")
    if version == "1":  # it would fail at the first message; later ones say what is wrong
        sys.exit(
            f"error: {__file__} has version {VERSION} of the protocol of turns, and the run.py "
            f"that measures has {version}: measure with the run.py that came with this file, or "
            "import what came with that run.py"
        )
    agent = start_agent(
        connect(addresses, key),
        side=side,
        version=VERSION,
        file=__file__,
        place={name: os.environ[name] for name in names.split(",") if name in os.environ},
        ranks=ranks,
        host=socket.gethostname(),
        machine=read(BOOT_ID),
        cores=os.cpu_count() or 1,
    )
    return agent, int(warm_up)


def connect(addresses: str, key: str) -> Connection:
    """Return the connection to the scheduler, at the first address of `ADDRESS,ADDRESS:PORT` that
    answers and knows the key. End this process if none does."""
    hosts, _, port = addresses.rpartition(":")
    options = (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        # To notice within about a minute that a host has vanished.
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    )
    problems = []
    for host in hosts.split(","):
        try:
            made = socket.create_connection((host, int(port)), CONNECT_SECONDS)
            made.settimeout(None)
            for option in options:
                made.setsockopt(*option)
            connection = Connection(made.detach())
            answer_challenge(connection, bytes.fromhex(key))
            deliver_challenge(connection, bytes.fromhex(key))
            return connection
        except (OSError, EOFError, AuthenticationError) as error:
            problems.append(f"{host}: {error or type(error).__name__}")
    sys.exit(f"{socket.gethostname()}: {UNREACHABLE} at port {port} ({'; '.join(problems)})")


def start_agent(scheduler: Connection, **who: Any) -> Connection:
    """Fork this process's agent and return the connection to it. The agent sends the scheduler
    `who`: the rank's identity. It is no child of the rank, whose script may wait for all of its
    children."""
    here, there = Pipe()
    rank = Process.of(os.getpid())
    with warnings.catch_warnings():
        # Python warns if a process with threads forks. The agent uses no lock that they may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.setsid()  # leave the process group that launchers send signals to
            if os.fork() == 0:
                keep_open(scheduler.fileno(), there.fileno())
                send(scheduler, State.STARTING, **who)
                serve(scheduler, there, rank)
        finally:
            os._exit(0)
    with suppress(ChildProcessError):  # the rank ignores SIGCHLD
        os.waitpid(child, 0)
    scheduler.close()
    there.close()
    return here


def keep_open(*descriptors: int) -> None:
    """Close all open files of this process but these. They are copies of the rank's, and the rank's
    peers and launcher wait until every copy is closed."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in range(3):
        os.dup2(nowhere, output)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in descriptors:
            with suppress(OSError):
                os.close(int(name))


def serve(scheduler: Connection, client: Connection, rank: "Process") -> None:
    """Be the agent until the rank or the scheduler has ended, then kill the rank."""
    tree, busy, began = [rank], 0.0, 0.0
    try:
        while True:
            for sender in wait([client, scheduler]):
                state, values = receive(sender)  # type: ignore[arg-type]
                if state is State.ENDED:
                    tree = tree_of(rank) or tree
                    send_signal(tree, signal.SIGCONT)
                    send(client, State.ENDED)
                    patience = CLOSED_SECONDS if sender is client else RANK_END_SECONDS
                    deadline = time.monotonic() + patience
                    while rank.is_alive() and time.monotonic() < deadline:
                        time.sleep(POLL_SECONDS)  # let it end by itself
                    if sender is client:
                        problem = CLOSED if rank.is_alive() else ""
                        send(scheduler, state, **({"problem": problem} | values))
                    return
                if sender is client:
                    if state is State.READY:
                        values["busy"] -= busy
                        values["window"] = values.pop("until") - began
                    send(scheduler, state, **values)
                elif state is State.PAUSED:
                    tree = pause(rank)
                    send(scheduler, State.PAUSED)
                else:
                    busy, began = busy_cpu_seconds(), time.monotonic()
                    send_signal(tree, signal.SIGCONT)
                    send(client, state, **values)
    finally:
        send_signal(tree, signal.SIGKILL)


def pause(rank: "Process") -> list["Process"]:
    """Stop a rank and all its descendants, and return them. Repeats until there are no new ones,
    since one of them may just have started another."""
    stopped: list[Process] = []
    while new := [process for process in tree_of(rank) if process not in stopped]:
        send_signal(new, signal.SIGSTOP)
        stopped += new
    return stopped


# -- Processes and CPU time, from /proc ------------------------------------------------------------


class Process(NamedTuple):
    """A process: its number, and when it began, since a later one may have the same number."""

    pid: int
    began: str  # in ticks since the machine's start

    @classmethod
    def of(cls, pid: int) -> "Process":
        return cls(pid, stat_of(pid)[BEGAN])

    @property
    def stat(self) -> list[str]:
        """The fields of its `stat`; [] if it is gone."""
        fields = stat_of(self.pid)
        return fields if fields and fields[BEGAN] == self.began else []

    def is_alive(self) -> bool:
        """Return whether it has not ended, even if nobody has waited for it yet."""
        return self.stat[:1] not in ([], ["Z"], ["X"])


def read(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def stat_of(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name; [] if there is no such process."""
    with suppress(OSError):
        return read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return []


def tree_of(process: Process) -> list[Process]:
    """Return a process and all its descendants without this process; [] if it has ended."""
    if not process.stat:
        return []
    children: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := stat_of(name)):
            own = Process(int(name), fields[BEGAN])
            children.setdefault(int(fields[PARENT]), []).append(own)
    tree = [process]
    for one in tree:  # which grows
        tree += children.get(one.pid, [])
    return [one for one in tree if one.pid != os.getpid()]


def send_signal(processes: Iterable[Process], number: signal.Signals) -> None:
    """Send a signal to processes, skipping those that have ended."""
    for process in processes:
        if process.stat:
            with suppress(OSError):
                os.kill(process.pid, number)


def busy_cpu_seconds() -> float:
    """Return this machine's busy CPU time since it started, in core-seconds.

    Time that a hypervisor gave to other guests ("steal") counts: those cores were not available.
    The time of this machine's own guests counts once: Linux includes it in `user`.
    """
    words = read("/proc/stat").partition("\n")[0].split()
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Return the user and system CPU time, in s, of this process and all its descendants so far."""
    return used()[0]


def used() -> tuple[float, int]:
    """Return `cpu_seconds`, and the bytes of memory that this process and its living descendants
    have resident, without files and memory that are mapped to be shared: how much of a mapped data
    set is resident says nothing about the script. What forks have in common counts for each."""
    import resource  # which Windows lacks, where a script may run by hand

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # children that were waited for
    # process_time() has a resolution of nanoseconds, /proc of hundredths of a second.
    own = time.process_time() + ended.ru_utime + ended.ru_stime
    children = tree_of(Process.of(os.getpid()))
    fields = [child.stat for child in children]
    # Of each: user and system time of its own, and of its children that it has waited for.
    ticks = sum(int(time) for of_child in fields if of_child for time in of_child[USER : USER + 4])
    pages = sum(map(own_pages, [os.getpid(), *(child.pid for child in children)]))
    return own + ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def page_faults() -> int:
    """Return how many pages the system has given this process so far without reading a file, such
    as those of newly allocated memory; without its children."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def own_pages(pid: int) -> int:
    """Return the pages that a process has resident, without shared ones; 0 if it is gone."""
    with suppress(OSError):
        _size, resident, shared, *_ = map(int, read(f"/proc/{pid}/statm").split())
        return resident - shared
    return 0


# -- A rank's turns --------------------------------------------------------------------------------


class Client:
    """One rank's turns: a turn is a lead-in step and then `steps` timed steps.

    The lead-in is there because the first step of a turn differs from the others: all ranks begin
    it at once, and the caches hold another side's data. The warm-up ends as a turn does.

    `weights` returns those of a script. Their digest is reported only once, after the warm-up, when
    all sides have made the same number of steps. `case` is that of the turn, for scripts that
    measure several in one launch; "" during the warm-up.
    """

    gives_facts = True  # after the warm-up: about the environment and the code

    def __init__(self, agent: Connection, warm_up: int, weights: Weights | None = None) -> None:
        self.agent, self.steps, self.case = agent, warm_up - LEAD_IN_STEPS, ""
        self.weights, self.is_warm = weights, False
        self.unit, self.amount, self.done, self.began = "", 0.0, 0, time.monotonic()
        self.before, self.faults_before = cpu_seconds(), page_faults()
        self.delay = float(os.environ.get(DELAY, 0))
        self.pid, self.file = os.getpid(), os.fstat(agent.fileno()).st_ino

    def step_ended(self, unit: str, amount: float) -> None:
        """Count a step, and the work of this rank in it; at the end of a turn report it and wait
        for the next turn."""
        self.done += 1
        self.unit, self.amount = unit, self.amount + amount
        if self.done == LEAD_IN_STEPS + self.steps:
            synchronize()
            # Once per turn: sleeps overrun, and after each single step a GPU would still be busy.
            time.sleep(self.delay * (time.monotonic() - self.began))
            seconds = time.monotonic() - self.began
            times = {"seconds": seconds, "wall_seconds": seconds} | self.spent()
            self.check()
            send(self.agent, State.READY, **times | self.measured())
            self.wait()
            return
        if self.done == 1 and not self.is_warm:
            send(self.agent, State.WARMING_UP)
        if self.done == LEAD_IN_STEPS:
            synchronize()
            self.begin()

    def check(self) -> None:
        """End this process if it is a fork of the rank, or if the script has closed the connection
        to the agent: another file may have its number by now."""
        if os.getpid() != self.pid:
            send(self.agent, State.ENDED, problem=FORKED)
            os._exit(1)
        with suppress(OSError):
            if os.fstat(self.agent.fileno()).st_ino == self.file:
                return
        print(f"error: {CLOSED}", file=sys.stderr, flush=True)
        os._exit(1)

    def begin(self) -> None:
        """Start the turn's clock: the lead-in has ended."""
        self.amount, self.began = 0.0, time.monotonic()

    def spent(self) -> dict[str, float]:
        """Return this rank's CPU time and page faults since the turn began, its memory, the time
        now, and the whole machine's busy CPU time. The last two are read first: the walk through
        all processes would otherwise count as load of other processes."""
        now, busy, faults = time.monotonic(), busy_cpu_seconds(), page_faults()
        cpu, memory = used()
        values = {
            "cpu_seconds": cpu - self.before,
            "page_faults": faults - self.faults_before,
            "memory_bytes": memory,
        }
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            gpus = range(torch.cuda.device_count())
            values["gpu_memory_bytes"] = sum(map(torch.cuda.memory_allocated, gpus))
        return values | {"until": now, "busy": busy}

    def measured(self) -> dict[str, Any]:
        """Return the work of the turn in its unit. After the warm-up come the facts about the
        environment, and the digest of a script's weights."""
        values: dict[str, Any] = {"images": self.amount, "unit": self.unit}
        if not self.is_warm:
            if self.gives_facts:
                values["facts"] = facts()
            if self.weights is not None:
                values["weights"] = digest_of(self.weights())
        self.is_warm = True
        return values

    def wait(self) -> None:
        """Wait for the next turn; end the process if there is none."""
        state, values = receive(self.agent)
        if state is State.ENDED:  # a normal end would evaluate and write a checkpoint
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)
        for name, value in values.items():  # steps, case; exchange and digest of trainers
            setattr(self, name, value)
        self.done, self.before, self.faults_before = 0, cpu_seconds(), page_faults()


def synchronize() -> None:
    """Wait until the GPU, if there is one, has finished its work."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def digest_of(weights: Mapping[str, Any]) -> str:
    """Return the SHA-256 of arrays or tensors, in the order of their names. The prefix "module." of
    a wrapper and BatchNorm's running statistics are left out. ValueError if there are none."""
    if not weights:
        raise ValueError("Side(weights=...) returned no weights: give model.state_dict, as it is")
    digest = sha256()
    for name, value in sorted(weights.items()):
        if name.endswith(RUNNING_STATISTICS):
            continue
        shape, kind = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        digest.update(f"{name.removeprefix('module.')} {shape} {kind}\0".encode())
        if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
            flat = value.detach().cpu().contiguous().flatten()
            value = flat.view(sys.modules["torch"].uint8).numpy()  # numpy has no bfloat16
        digest.update(value.tobytes())
    return digest.hexdigest()


# -- The script's environment, and its code --------------------------------------------------------


def facts() -> dict[str, Any]:
    """Return the environment of this rank and the code that it runs, under the names of
    environment.json. The scheduler adds its place among the ranks, and takes `imports` out."""
    torch, mpi = sys.modules.get("torch"), sys.modules.get("mpi4py.MPI")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in FRAMEWORKS}
    named = re.search("^model name.*?: *(.*)", read("/proc/cpuinfo"), re.MULTILINE)
    cpu = named[1].strip() if named else platform.machine()
    versions = [f"{name} {version}" for name, version in loaded.items() if version]
    return {
        "engine": "script",
        "version": ", ".join(versions),
        "transport": "",
        "device": "cuda" if on_gpu else "cpu",
        "device_name": torch.cuda.get_device_name() if torch and on_gpu else cpu,
        "cpu_model": cpu,
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads() if torch else 0,
        "python": platform.python_version(),
        "torch": loaded["torch"] or "",
        "torchvision": loaded["torchvision"] or "",
        "horovod": horovod_build(loaded["horovod"]),
        "mpi": mpi and re.split("[,\n\0]", mpi.Get_library_version())[0],
        "cuda": torch.version.cuda if torch and on_gpu else None,
        "nccl": nccl_version() if on_gpu else None,
        "kernel": platform.release(),
        "command": shortened(sys.argv),
        "started_utc": "",
        **code_facts(),
    }


def shortened(words: Sequence[str]) -> list[str]:
    """Return a command line, or its beginning and how many words were left out."""
    left, shown = MOST_SHOWN, list[str]()
    for word in words:
        left -= len(word) + 1
        if left < 0:
            return [*shown, f"... and {len(words) - len(shown)} more words"]
        shown.append(word)
    return shown


def horovod_build(version: str | None) -> str | None:
    """Return Horovod's version and what it was built with, as in 0.28.1 (MPI, Gloo); None if it is
    not loaded."""
    hvd = sys.modules.get("horovod.torch")
    if version is None or hvd is None:
        return version
    built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": hvd.nccl_built()}
    return f"{version} ({', '.join(name for name, is_there in built.items() if is_there)})"


def nccl_version() -> str | None:
    """Return the version of the NCCL that torch has loaded; None if it has none."""
    with suppress(AttributeError):  # torch is built without
        return ".".join(map(str, sys.modules["torch"].cuda.nccl.version()))
    return None


class WorkTree(NamedTuple):
    """A folder into which git has checked out a commit."""

    root: str
    repository: str  # the folder that all work trees of a repository have in common


@cache
def work_tree_of(folder: str) -> WorkTree | None:
    """Return the work tree that a folder is in, by files alone; None if it is in none."""
    git = os.path.join(folder, ".git")
    if not os.path.exists(git):
        above = os.path.dirname(folder)
        return work_tree_of(above) if above != folder else None
    with suppress(OSError):
        if os.path.isfile(git):  # of a further work tree, or of a submodule: gitdir: PATH
            git = os.path.join(folder, read(git).partition(":")[2].strip())
            git = os.path.join(git, read(os.path.join(git, "commondir")).strip())
    return WorkTree(folder, os.path.realpath(git))


def code_facts() -> dict[str, Any]:
    """Return which interpreter, script and commit this is, a digest of the modules of the script's
    work tree (without git: of its folder), and where its other modules come from. What cannot be
    read is left out."""
    script = real_path(getattr(sys.modules["__main__"], "__file__", None) or "")
    is_file = os.path.isfile(script)
    home = home_of(script)
    own = work_tree_of(home)
    root = own.root if own else home
    modules = own_modules(root)
    files = {file for file in modules.values() if file.startswith(os.path.join(root, ""))}
    digest = sha256()
    for file in sorted(files):
        name = file[len(os.path.join(root, "")) :]
        digest.update(os.fsencode(f"{name}\0{file_sha256(file)}\n"))
    return {
        "interpreter": sys.executable,
        "script": script if is_file else None,
        "script_sha256": file_sha256(script) if is_file else None,
        "git_commit": git_commit(own.root, files) if own and files else None,
        "code_sha256": digest.hexdigest() if files else None,
        "imports": {
            "root": root,
            "strangers": strangers(modules, own) if own else [],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        },
    }


def home_of(script: str) -> str:
    """Return the folder whose code is meant to run: the script's; but the current one if the script
    is none of the user's own (an installed command, python -c, python -m cProfile), or if it was
    imported (python -m) from another work tree than the one that the user is in."""
    folder, here = os.path.dirname(script), real_path(os.curdir)
    commands, library = (
        os.path.realpath(os.path.dirname(path)) for path in (sys.executable, os.__file__)
    )
    is_installed = INSTALLED.search(script) or script.startswith(os.path.join(library, ""))
    if not os.path.isfile(script) or folder == commands or is_installed:
        return here
    of_script, of_here = work_tree_of(folder), work_tree_of(here)
    is_imported = getattr(sys.modules["__main__"], "__spec__", None) is not None
    if is_imported and of_script and of_here and of_script.repository == of_here.repository:
        return here
    return folder


def own_modules(root: str) -> dict[str, str]:
    """Return the files of all loaded modules by name, without what was installed into Python's
    environment. The environment may be a folder in `root`."""
    prefixes = (sys.prefix, sys.base_prefix)
    folders = [os.path.join(folder, "") for folder in (*prefixes, *map(os.path.realpath, prefixes))]
    installed = tuple(folder for folder in folders if not os.path.join(root, "").startswith(folder))
    found = {}
    for name, module in [*sys.modules.items()]:
        with suppress(Exception):  # some modules are objects that do as they like
            file, spec = vars(module)["__file__"], vars(module)["__spec__"]
            if not file.startswith(installed) and not INSTALLED.search(file):
                found[spec.name if spec else name] = os.path.realpath(file)
    return {name: file for name, file in found.items() if os.path.isfile(file)}


def strangers(modules: Mapping[str, str], own: WorkTree) -> list[dict[str, Any]]:
    """Return the packages that come from another work tree, though the script's own may have them:
    each with that work tree, the folder from which it was imported, and the same folder in the
    script's own work tree."""
    path = {*map(real_path, os.environ.get("PYTHONPATH", "").split(os.pathsep))}
    found: dict[str, dict[str, Any]] = {}
    for name, file in modules.items():
        tree = work_tree_of(folder := os.path.dirname(file))
        if tree and is_twin(file, tree, own) and file != os.path.realpath(__file__):
            for _ in range(name.count(".") + os.path.basename(file).startswith("__init__.")):
                folder = os.path.dirname(folder)
            there = os.path.normpath(os.path.join(own.root, os.path.relpath(folder, tree.root)))
            found[name.partition(".")[0]] = {
                "package": name.partition(".")[0],
                "root": tree.root,
                "folder": folder,
                "own_folder": there,
                "is_on_path": folder in path,
            }
    return [*found.values()]


def is_twin(file: str, tree: WorkTree, own: WorkTree) -> bool:
    """Return whether a file comes from another work tree of the script's repository, or from a
    clone: a work tree outside of the script's, which has such a file, too."""
    if tree.repository == own.repository:
        return tree != own
    is_outside = not tree.root.startswith(os.path.join(own.root, ""))
    return is_outside and os.path.isfile(os.path.join(own.root, os.path.relpath(file, tree.root)))


def real_path(path: str) -> str:
    """Return an absolute path without links; "" if the current folder, which it is relative to, was
    deleted."""
    with suppress(OSError):
        return os.path.realpath(path)
    return ""


def file_sha256(path: str) -> str | None:
    """Return the digest of a file; None if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return sha256(file.read()).hexdigest()
    return None


def git_commit(root: str, files: Iterable[str]) -> str | None:
    """Return a work tree's commit, with a + if files were changed since, or if one of `files` is
    new to git; None if git does not say in time."""
    with suppress(OSError, subprocess.SubprocessError):
        done = run_git(root, "describe", "--always", "--abbrev=12", "--dirty=+", limit=GIT_SECONDS)
        if done.returncode != 0:
            return None
        commit = done.stdout.strip()
        options = ("--others", "--exclude-standard")
        new = run_git(root, "ls-files", *options, "--", *files, limit=GIT_SECONDS).stdout
        return f"{commit}+" if new and not commit.endswith("+") else commit
    return None


def run_git(
    folder: str, *words: str, limit: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run git in a folder, on the repository of that folder, and without the repository's hooks. If
    this process was itself started by a hook, the variables that git has set for that name another
    repository and its index."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_A_REPOSITORY}
    # No locks that may be left out: other ranks ask at the same time. Messages in English.
    return subprocess.run(
        ["git", "-C", folder, "-c", "core.hooksPath=/dev/null", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        errors="replace",
        timeout=limit,
        env={**kept, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
    )
