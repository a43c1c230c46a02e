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
import shlex
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
from dataclasses import asdict
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

from compare.errors import run_main
from compare.plan.hosts import (
    SLURM,
    is_here,
    is_only_here,
    read_allocation,
    read_hostfile,
    read_hosts,
)
from compare.plan.sources import ROOT
from compare.plan.ssh import last_line, ssh_remedy, ssh_words
from compare.running.host_findings import ALL, Finding, agreement, host_findings, interface_text
from compare.running.launch import start_command
from compare.running.probe import PROBE_SECONDS, probe, reach
from recipe.errors import UserError
from recipe.files import write_json

WIDTH = 100
LOCAL_SECONDS = 600  # PROBE_SECONDS of this host, which may be slow, but is there
# For all hosts to have tried all connections: a host that answers in PROBE_SECONDS is in time.
NETWORK_SECONDS = 60.0 + PROBE_SECONDS
ABSENT = "does not take part in the test"
ALLREDUCE_SECONDS = 180
MARKS = {"ok": "ok     ", "warning": "WARNING", "failed": "FAILED "}
SUBJECT_WIDTH = 13  # of the longest subject


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
        outcome = start_command(words, out, ALLREDUCE_SECONDS)
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
