"""Take turns, in a process that trains, with what it is compared with.

    python compare/running/take_turns.py TRAINER ...

runs a trainer of this project so, unmodified, under its own launcher, once for each rank: its
`main` is called with `Hooks`, and what a step entails, be it a line of the record or a checkpoint,
is inside a turn. Other scripts say themselves that a step has ended (compare/side.py). The variable
`SCHEDULER` says which of those that are compared this is, and where the scheduler listens.

Scripts of a user's own load this file, in whichever environment they run: it needs psutil alone.

Beside each rank, on whichever host that is, is a small process, its agent. It holds the connection
to the scheduler (scheduler.py), pauses its rank with all that the rank has started (SIGSTOP), lets
it go on, and passes messages on to it and from it. Launchers are never paused: they only wait. The
rank forks it before it loads anything large. If the scheduler is gone, or its host, the agent ends
the rank; if the agent is gone, a rank that is not paused ends itself.

A message is a `State` with values, as JSON, one a message of multiprocessing.connection, never
pickled. The scheduler sends which state a rank is to take:

    RUNNING   do a turn of `steps` steps; does it `exchange` gradients, and is a `digest` of the
              weights asked for at its end?
    PAUSED    be stopped
    ENDED     end

and it is sent which one the rank has: STARTING, with who it is; READY after its warm-up and after a
turn, with its measurements; PAUSED; ENDED.
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

# While a side is paused, clocks go on. Longer than that ever takes must those have patience who
# watch by them: Horovod's background threads on Gloo, which wait for each other all the time, and
# torch's monitor of the thread that watches over NCCL (480 s by default, then it aborts).
NEVER_S = "1000000"
PATIENT = {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": NEVER_S,
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": NEVER_S,
}
ENDLESS_IMAGES = 1 << 22  # of an epoch, so that none ends in a turn
# The variable that says where the scheduler listens, who this is, and how many steps make its
# warm-up: ADDRESS,ADDRESS:PORT KEY SIDE STEPS
SCHEDULER = "COMPARE_SCHEDULER"
UNREACHABLE = "the scheduler of turns cannot be reached"  # by which it knows this error
CONNECT_SECONDS = 5.0  # for each address
SOCKET_OPTIONS = (  # for a host that has vanished to be missed within a minute or so
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
RANK_END_SECONDS = 3.0  # that a rank may take to end
MOST_BYTES = 1 << 16  # of a message
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # hosts that share a kernel share its cores, too
OPEN_FILES, CPU_INFO = Path("/proc/self/fd"), Path("/proc/cpuinfo")
# Whose versions a script's record tells, of those that it has loaded.
FRAMEWORKS = (
    "torch", "torchvision", "horovod", "mpi4py", "tensorflow", "jax", "deepspeed", "lightning",
)  # fmt: skip
# Of BatchNorm, which each rank has of its own batches.
RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
Weights = Callable[[], Mapping[str, Any]]  # which returns arrays or tensors by name


class State(enum.Enum):
    """What a rank does."""

    STARTING = "starting"  # up to the end of its warm-up
    READY = "ready"  # waits for a turn; threads of it may poll
    RUNNING = "running"  # does a turn
    PAUSED = "paused"
    ENDED = "ended"


def send(connection: Connection, state: State, **values: Any) -> None:
    """Send a message; if nobody is left to read it, `receive` will find that out."""
    with suppress(OSError):
        connection.send_bytes(json.dumps({"state": state.value, **values}).encode())


def receive(connection: Connection) -> tuple[State, dict[str, Any]]:
    """Wait for the next message: a state and its values; ENDED if nobody is left to send one."""
    try:
        values = json.loads(connection.recv_bytes(MOST_BYTES))
    except (EOFError, OSError):
        return State.ENDED, {}
    return State(values.pop("state")), values


def join(ranks: int | None = None, weights: Weights | None = None) -> "Client":
    """Take part in the comparison that `SCHEDULER` names, as one of `ranks` (None: as many as this
    process's launcher says). What this process starts takes no part: it has no such variable."""
    addresses, key, side, warm_up = os.environ.pop(SCHEDULER).split()
    world = read_world()
    agent = start_agent(
        connect(addresses, key),
        side=side, number=world.rank, size=ranks or world.size,
        host=socket.gethostname(), machine=BOOT_ID.read_text(), cores=os.cpu_count() or 1,
    )  # fmt: skip
    return Client(agent, int(warm_up), weights)


def start_agent(scheduler: Connection, **who: Any) -> Connection:
    """Fork this process's agent, which tells the scheduler `who` this is, and return the connection
    to the agent."""
    here, there = Pipe()
    rank = psutil.Process()
    with warnings.catch_warnings():
        # Python warns of a fork beside threads; the agent touches nothing that they may have held.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.setsid()  # no part of what launchers signal
            keep_open(scheduler.fileno(), there.fileno())
            send(scheduler, State.STARTING, **who)
            serve(scheduler, there, rank)
        finally:
            os._exit(0)
    scheduler.close()
    there.close()
    return here


def keep_open(*descriptors: int) -> None:
    """Close all that this process has open but these: peers and launchers of the rank that it was
    forked from wait for the end of what that holds."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in range(3):
        os.dup2(nowhere, output)
    for name in os.listdir(OPEN_FILES):
        if int(name) > 2 and int(name) not in descriptors:
            with suppress(OSError):
                os.close(int(name))


def connect(addresses: str, key: str) -> Connection:
    """Return the connection to the scheduler, at the first address of `ADDRESS,ADDRESS:PORT` that
    answers and has the key; ends this process if none does."""
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
    """Serve until the rank or the scheduler has ended; then leave nothing of the rank."""
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
                        rank.wait(RANK_END_SECONDS)  # it may end by itself
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
    """Send processes a signal; those that have ended are left out."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def busy_cpu_seconds() -> float:
    """Return for how long, in seconds times cores, this machine has been busy since it started.

    Time that a hypervisor gave to other guests ("steal") counts: those cores were not ours. So does
    that of guests of this machine, once: Linux has it in `user`.
    """
    times = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(float(getattr(times, name, 0.0)) for name in names)


def tree_of(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all that it has started, but for this one; none if it has ended."""
    with suppress(psutil.Error):
        found = [process, *process.children(recursive=True)]
        return [one for one in found if one.pid != os.getpid()]
    return []


def pause(rank: psutil.Process) -> list[psutil.Process]:
    """Stop a rank and all that it has started; return them. Looks again, in case one of them was
    just starting another."""
    stopped: list[psutil.Process] = []
    while new := [one for one in tree_of(rank) if one not in stopped]:
        send_signal(new, signal.SIGSTOP)
        stopped += new
    return stopped


class Client:
    """One rank's turns: a turn is a lead-in step and then `steps` optimizer steps on the clock.

    The lead-in is there because a turn's first step is not like the others: all ranks begin it at
    once, and the caches hold what another side left. The warm-up ends as a turn does.

    `weights` are those of a script of a user's own. Their digest is told after the warm-up alone:
    then all sides have made equally many steps.
    """

    def __init__(self, agent: Connection, warm_up: int, weights: Weights | None = None) -> None:
        self.agent, self.steps = agent, warm_up - LEAD_IN_STEPS
        self.exchange, self.digest = True, False
        self.done, self.began, self.samples, self.laps = 0, 0.0, 0, list[Any]()
        self.before, self.delay = cpu_seconds(), float(os.environ.get(DELAY, 0))
        self.weights, self.unit, self.amount, self.is_warm = weights, "images", 0.0, False

    def step_ended(
        self, session: Any = None, model: Any = None, unit: str = "", amount: float = 0.0
    ) -> None:
        """Count a step; at a turn's end report it and wait for the next one. A trainer gives its
        session, and the model if each rank holds all of it; another script, what this rank's step
        has done, of which unit."""
        self.done += 1
        if session is not None:
            seen = session.progress.samples_seen
            amount, self.samples = (seen - self.samples) / read_world().size, seen
            self.laps += session.meter.clock.ended
        self.unit, self.amount = unit or self.unit, self.amount + amount
        left = LEAD_IN_STEPS + self.steps - self.done
        if left == 0:
            synchronize()
            # Once a turn: sleeps overrun, and after each step GPUs would have work left.
            time.sleep(self.delay * (time.monotonic() - self.began))
            told = {"seconds": time.monotonic() - self.began, **self.spent()}
            send(self.agent, State.READY, **told, **self.trained(session, model))
            self.wait()
        elif self.done == LEAD_IN_STEPS:
            synchronize()
            self.amount, self.laps, self.began = 0.0, [], time.monotonic()

    def spent(self) -> dict[str, float]:
        """Return the CPU time since the turn began, and until when; and by then the CPU time of the
        whole machine, read before this process looks at all others, which would count as theirs."""
        now, busy = time.monotonic(), busy_cpu_seconds()
        return {"cpu_seconds": cpu_seconds() - self.before, "until": now, "busy": busy}

    def trained(self, session: Any, model: Any) -> dict[str, Any]:
        """Return what was done in the turn: images, or what a script counts; a trainer's phases of
        the mean step, and the digest of the weights if it was asked for; after the warm-up what it
        runs on, and a script's digest."""
        told: dict[str, Any] = {"images": self.amount, "unit": self.unit}
        if not self.is_warm:
            told["facts"] = facts(read_world())
            if self.weights is not None:
                told["weights"] = digest_of(self.weights())
        self.is_warm = True
        if session is not None:
            phases = session.meter.clock.seconds(self.laps)
            told["phases"] = {name: seconds / self.steps for name, seconds in phases.items()}
        if self.digest and model is not None:
            from recipe.record.fingerprint import weights_sha256  # loads torch

            told["weights"] = weights_sha256(model, buffers=False)
        return told

    def wait(self) -> None:
        """Wait for the next turn; ends the process when there is none."""
        state, values = receive(self.agent)
        if state is State.ENDED:  # tidy ways out would evaluate, and write a checkpoint
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)
        for name, value in values.items():  # steps, exchange, digest
            setattr(self, name, value)
        self.done, self.before = 0, cpu_seconds()


def synchronize() -> None:
    """Wait until the GPU has done what it was given, if there is one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def cpu_seconds() -> float:
    """Return the CPU time of this process and all that it has started so far, user and system."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # those that it has waited for
    # The process' own in nanoseconds; psutil counts in hundredths of a second.
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return total


def digest_of(weights: Mapping[str, Any]) -> str:
    """Return the SHA-256 of arrays or tensors, by name: with the same name in a wrapper and out of
    it, and without BatchNorm's running statistics. ValueError for none."""
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


def facts(world: World) -> dict[str, Any]:
    """Return what a script of a user's own ran on, by the names of environment.json."""
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
        "transport": "",
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
    """Say that an optimizer step has ended; does nothing when nobody measures."""
    if CLIENT is not None:
        CLIENT.step_ended(session, model)


def exchanges() -> bool:
    """Whether this turn's steps exchange gradients."""
    return CLIENT is None or CLIENT.exchange


def join_if_measured() -> None:
    """Take part in a comparison, if there is one."""
    global CLIENT
    if SCHEDULER in os.environ:
        CLIENT = join()


def main() -> None:
    """Join the comparison, before anything large is loaded, then be the trainer."""
    join_if_measured()
    os.environ.update(PATIENT)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parents[1])
    train(sys.argv[0])


def train(path: str) -> None:
    """Be the trainer at this path, whose steps are counted, all of batches as large as --batch-size
    says: it goes on past --max-steps, and no epoch ends in a turn. It keeps the waiting out of its
    clocks.

    Nor does torch give up: the thread that watches over NCCL looks every tenth of a second, and
    then at an exchange's age before it asks whether that has ended, perhaps just before a pause.
    """
    from recipe.start import Hooks, run_script  # which scripts of a user's own do without

    hooks = Hooks(step_ended, exchanges, ENDLESS_IMAGES)
    run_script(path, None, hooks, max_steps=None, batch_size_warmup_epochs=0, stall_timeout=0)


if __name__ == "__main__":
    from compare.running import take_turns  # the module that scripts import, not this copy of it

    take_turns.main()
