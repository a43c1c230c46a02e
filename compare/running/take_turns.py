"""The rank's part of taking turns: runs inside and beside each process that trains.

    python compare/running/take_turns.py TRAINER ...

runs a trainer of this project, unmodified, under its own launcher, once for each rank. It calls the
trainer's `main` with `Hooks`; everything that a step entails, such as a line of the record or a
checkpoint, is inside a turn. Other scripts report the end of a step themselves (compare/side.py).
The variable `SCHEDULER` says which side this process belongs to, and where the scheduler listens.

A user's own scripts load this file in any environment, so it needs no package but psutil.

Each rank has an agent on its host: a small process that holds the connection to the scheduler
(scheduler.py), pauses and continues the rank with all processes that it has started (SIGSTOP,
SIGCONT), and passes on messages in both directions. Launchers are never paused: they only wait. The
rank forks its agent before it loads anything large. If the scheduler or its host is gone, the agent
ends the rank; if the agent is gone, a rank that is not paused ends itself.

A message is a `State` with values, as JSON: one message of multiprocessing.connection, never
pickled. The scheduler sends the state that a rank must take:

    RUNNING   make a turn of `steps` steps of `case`; `exchange`: with exchange of gradients;
              `digest`: report a digest of the weights at the end
    PAUSED    stop
    ENDED     end

The agent sends the state that the rank is in: STARTING, with its identity; READY after the warm-up
and after each turn, with its measurements; PAUSED; ENDED.
"""

import enum
import json
import os
import platform
import re
import resource
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    Pipe,
    answer_challenge,
    deliver_challenge,
    wait,
)
from pathlib import Path
from typing import Any

import psutil

from compare.plan.blocks import DELAY, LEAD_IN_STEPS
from recipe.world import World, read_world

# Time-outs that keep running while a side is paused: they must never expire. Horovod's background
# threads on Gloo wait for each other all the time; torch's monitor of its NCCL watchdog thread
# aborts after 480 s by default.
NEVER_S = "1000000"
WITHOUT_TIMEOUTS = {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": NEVER_S,
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": NEVER_S,
}
ENDLESS_IMAGES = 1 << 22  # length of an epoch, so that no epoch ends in a turn
# Environment variable: where the scheduler listens, the name of the side, and the number of warm-up
# steps, as ADDRESS,ADDRESS:PORT KEY SIDE STEPS
SCHEDULER = "COMPARE_SCHEDULER"
UNREACHABLE = "the scheduler of turns cannot be reached"  # the scheduler looks for this text
CONNECT_SECONDS = 5.0  # time-out for each address
SOCKET_OPTIONS = (  # to notice within about a minute that a host has vanished
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
RANK_END_SECONDS = 3.0  # given to a rank to end by itself
MOST_BYTES = 1 << 16  # of a message
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # hosts that share a kernel share its cores, too
OPEN_FILES, CPU_INFO = Path("/proc/self/fd"), Path("/proc/cpuinfo")
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


class State(enum.Enum):
    """What a rank does."""

    STARTING = "starting"  # until the end of its warm-up
    READY = "ready"  # waits for a turn; some of its threads may poll
    RUNNING = "running"  # makes a turn
    PAUSED = "paused"
    ENDED = "ended"


def send(connection: Connection, state: State, **values: Any) -> None:
    """Send a message. Errors are ignored: if the other end is gone, `receive` returns ENDED."""
    with suppress(OSError):
        connection.send_bytes(json.dumps({"state": state.value, **values}).encode())


def receive(connection: Connection) -> tuple[State, dict[str, Any]]:
    """Wait for the next message; return its state and values, or ENDED if the other end is gone."""
    try:
        values = json.loads(connection.recv_bytes(MOST_BYTES))
    except (EOFError, OSError):
        return State.ENDED, {}
    return State(values.pop("state")), values


def join(ranks: int | None = None, weights: Weights | None = None) -> "Client":
    """Take part in the comparison that `SCHEDULER` names, as one of `ranks` ranks (None: as many as
    the launcher's variables say). Processes that this one starts take no part: the variable is
    removed."""
    addresses, key, side, warm_up = os.environ.pop(SCHEDULER).split()
    world = read_world()
    agent = start_agent(
        connect(addresses, key),
        side=side,
        number=world.rank,
        size=ranks or world.size,
        host=socket.gethostname(),
        machine=BOOT_ID.read_text(),
        cores=os.cpu_count() or 1,
    )
    return Client(agent, int(warm_up), weights)


def start_agent(scheduler: Connection, **who: Any) -> Connection:
    """Fork this process's agent and return the connection to it. The agent sends the scheduler
    `who`: the rank's identity, in the fields of scheduler.Rank."""
    here, there = Pipe()
    rank = psutil.Process()
    with warnings.catch_warnings():
        # Python warns if a process with threads forks. The agent uses no lock that they may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.setsid()  # leave the process group that launchers send signals to
            keep_open(scheduler.fileno(), there.fileno())
            send(scheduler, State.STARTING, **who)
            serve(scheduler, there, rank)
        finally:
            os._exit(0)
    scheduler.close()
    there.close()
    return here


def keep_open(*descriptors: int) -> None:
    """Close all open files of this process but these. They are copies of the rank's, and the rank's
    peers and launcher wait until every copy is closed."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in range(3):
        os.dup2(nowhere, output)
    for name in os.listdir(OPEN_FILES):
        if int(name) > 2 and int(name) not in descriptors:
            with suppress(OSError):
                os.close(int(name))


def connect(addresses: str, key: str) -> Connection:
    """Return the connection to the scheduler, at the first address of `ADDRESS,ADDRESS:PORT` that
    answers and knows the key. End this process if none does."""
    hosts, _, port = addresses.rpartition(":")
    problems = []
    for host in hosts.split(","):
        try:
            made = socket.create_connection((host, int(port)), CONNECT_SECONDS)
            made.settimeout(None)
            for option in SOCKET_OPTIONS:
                made.setsockopt(*option)
            connection = Connection(made.detach())
            answer_challenge(connection, bytes.fromhex(key))
            deliver_challenge(connection, bytes.fromhex(key))
            return connection
        except (OSError, EOFError, AuthenticationError) as error:
            problems.append(f"{host}: {error or type(error).__name__}")
    sys.exit(f"{socket.gethostname()}: {UNREACHABLE} at port {port} ({'; '.join(problems)})")


def serve(scheduler: Connection, client: Connection, rank: psutil.Process) -> None:
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
                    with suppress(psutil.TimeoutExpired):
                        rank.wait(RANK_END_SECONDS)  # let it end by itself
                    return
                if sender is client:
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


def send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to processes, skipping those that have ended."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def busy_cpu_seconds() -> float:
    """Return this machine's busy CPU time since it started, in core-seconds.

    Time that a hypervisor gave to other guests ("steal") counts: those cores were not available.
    The time of this machine's own guests counts once: Linux includes it in `user`.
    """
    times = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(float(getattr(times, name, 0.0)) for name in names)


def tree_of(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants without this process; [] if it has ended."""
    with suppress(psutil.Error):
        tree = [process, *process.children(recursive=True)]
        return [process for process in tree if process.pid != os.getpid()]
    return []


def pause(rank: psutil.Process) -> list[psutil.Process]:
    """Stop a rank and all its descendants, and return them. Repeats until there are no new ones,
    since one of them may just have started another."""
    stopped: list[psutil.Process] = []
    while new := [process for process in tree_of(rank) if process not in stopped]:
        send_signal(new, signal.SIGSTOP)
        stopped += new
    return stopped


class Client:
    """One rank's turns: a turn is a lead-in step and then `steps` timed optimizer steps.

    The lead-in is there because the first step of a turn differs from the others: all ranks begin
    it at once, and the caches hold another side's data. The warm-up ends as a turn does.

    `weights` returns those of a user's own script. Their digest is reported only once, after the
    warm-up, when all sides have made the same number of steps. `case` is that of the turn, for
    scripts that measure several in one launch; "" during the warm-up. `transport` is for the record
    of an all-reduce.
    """

    def __init__(self, agent: Connection, warm_up: int, weights: Weights | None = None) -> None:
        self.agent, self.steps = agent, warm_up - LEAD_IN_STEPS
        self.exchange, self.digest = True, False
        self.done, self.began, self.samples, self.laps = 0, 0.0, 0, list[Any]()
        self.before, self.delay = cpu_seconds(), float(os.environ.get(DELAY, 0))
        self.weights, self.unit, self.amount, self.is_warm = weights, "images", 0.0, False
        self.case, self.transport, self.timed = "", "", 0.0

    def step_ended(
        self,
        session: Any = None,
        model: Any = None,
        unit: str = "",
        amount: float = 0.0,
        seconds: float = 0.0,
    ) -> None:
        """Count a step; at the end of a turn report it and wait for the next turn. A trainer gives
        its session, and the model if each rank holds all of it. Another script gives the amount of
        work of this rank's step, and its unit. An all-reduce also gives the step's `seconds`: what
        it does between two sums is no part of them."""
        self.done += 1
        if session is not None:
            seen = session.progress.samples_seen
            amount, self.samples = (seen - self.samples) / read_world().size, seen
            self.laps += session.meter.clock.ended
        self.unit, self.amount = unit or self.unit, self.amount + amount
        self.timed += seconds
        left = LEAD_IN_STEPS + self.steps - self.done
        if left == 0:
            synchronize()
            # Once per turn: sleeps overrun, and after each single step a GPU would still be busy.
            time.sleep(self.delay * (time.monotonic() - self.began))
            wall_seconds = time.monotonic() - self.began
            times = {"seconds": self.timed or wall_seconds, "wall_seconds": wall_seconds}
            times |= self.spent()
            send(self.agent, State.READY, **times, **self.trained(session, model))
            self.wait()
        elif self.done == LEAD_IN_STEPS:
            synchronize()
            self.amount, self.timed, self.laps, self.began = 0.0, 0.0, [], time.monotonic()

    def spent(self) -> dict[str, float]:
        """Return this rank's CPU time since the turn began, the time now, and the whole machine's
        busy CPU time. The last two are read first: the walk through all processes would otherwise
        count as load of other processes."""
        now, busy = time.monotonic(), busy_cpu_seconds()
        return {"cpu_seconds": cpu_seconds() - self.before, "until": now, "busy": busy}

    def trained(self, session: Any, model: Any) -> dict[str, Any]:
        """Return the work of the turn: the images, or whatever unit a script counts. A trainer adds
        the phases of the mean step, and the digest of the weights if `digest` is set. After the
        warm-up come the facts about the environment, and the digest of a script's weights."""
        measured: dict[str, Any] = {"images": self.amount, "unit": self.unit}
        if not self.is_warm:
            measured["facts"] = facts(read_world(), self.transport)
            if self.weights is not None:
                measured["weights"] = digest_of(self.weights())
        self.is_warm = True
        if session is not None and self.steps > 0:  # 0: in a warm-up of one step
            phases = session.meter.clock.seconds(self.laps)
            measured["phases"] = {name: seconds / self.steps for name, seconds in phases.items()}
        if self.digest and model is not None:
            from recipe.record.fingerprint import weights_sha256  # loads torch

            measured["weights"] = weights_sha256(model, buffers=False)
        return measured

    def wait(self) -> None:
        """Wait for the next turn; end the process if there is none."""
        state, values = receive(self.agent)
        if state is State.ENDED:  # a normal end would evaluate and write a checkpoint
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)
        for name, value in values.items():  # steps, case, exchange, digest
            setattr(self, name, value)
        self.done, self.before = 0, cpu_seconds()


def synchronize() -> None:
    """Wait until the GPU, if there is one, has finished its work."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def cpu_seconds() -> float:
    """Return the user and system CPU time, in s, of this process and all its descendants so far."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # children that were waited for
    # process_time() has a resolution of nanoseconds, psutil of hundredths of a second.
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return total


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


def facts(world: World, transport: str) -> dict[str, Any]:
    """Return the environment of a user's own script, under the names of environment.json."""
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in FRAMEWORKS}
    named = re.search("^model name.*?: *(.*)", CPU_INFO.read_text(), re.MULTILINE)
    cpu = named[1].strip() if named else platform.machine()
    versions = [f"{name} {version}" for name, version in loaded.items() if version]
    return {
        "engine": "script",
        "version": ", ".join(versions),
        "launcher": world.launcher,
        "transport": transport,
        "world_size": world.size,
        "local_size": world.local_size,
        "hosts": [world.host],
        "device": "cuda" if on_gpu else "cpu",
        "device_name": torch.cuda.get_device_name() if torch and on_gpu else cpu,
        "cpu_model": cpu,
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads() if torch else 0,
        "python": platform.python_version(),
        "torch": loaded["torch"] or "",
        "torchvision": loaded["torchvision"] or "",
        "horovod": loaded["horovod"],
        "mpi": None,
        "cuda": torch.version.cuda if torch and on_gpu else None,
        "kernel": platform.release(),
        "command": sys.argv,
        "started_utc": "",
        "git_commit": None,
    }


CLIENT: Client | None = None


def step_ended(session: Any = None, model: Any = None) -> None:
    """Report that an optimizer step has ended; do nothing outside a comparison."""
    if CLIENT is not None:
        CLIENT.step_ended(session, model)


def exchanges() -> bool:
    """Return whether this turn's steps exchange gradients."""
    return CLIENT is None or CLIENT.exchange


def join_if_measured() -> None:
    """Take part in a comparison, if there is one."""
    global CLIENT
    if SCHEDULER in os.environ:
        CLIENT = join()


def main() -> None:
    """Join the comparison before anything large is loaded, then run the trainer."""
    join_if_measured()
    os.environ.update(WITHOUT_TIMEOUTS)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parents[1])
    train(sys.argv[0])


def train(path: str) -> None:
    """Run the trainer at this path, and count its steps.

    All steps have a batch of --batch-size. The trainer goes on past --max-steps, no epoch ends in a
    turn, and none is slowed by a profile or a trace. Its clocks do not count the time in which it
    waits.

    stall_timeout=0 also keeps torch from aborting. Its NCCL watchdog looks every 0.1 s, and checks
    the age of an exchange before it checks whether the exchange has ended, which may have been just
    before a pause.
    """
    from recipe.start import Hooks, run_script  # not needed by a user's own scripts

    hooks = Hooks(step_ended, exchanges, ENDLESS_IMAGES)
    run_script(
        path,
        hooks=hooks,
        max_steps=None,
        batch_size_warmup_epochs=0,
        stall_timeout=0,
        profile_steps=None,
        tensor_steps=None,
    )


if __name__ == "__main__":
    from compare.running import take_turns  # the module that scripts import, not __main__

    take_turns.main()
