"""Say what this machine, or the hosts that you name, can run, and what to do about the rest.

    python compare/doctor.py                              this machine
    python compare/doctor.py --hosts node0:4,node1:4 --data /data/imagenet
    python compare/doctor.py --hostfile hostfiles/two-hosts-of-four.txt --json doctor.json

Ends with exit code 1 if something fails, and 0 if all that was found are warnings.
"""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from ipaddress import ip_interface
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec

from compare.plan.environment import (
    ALLOCATIONS,
    ROOT,
    is_here,
    read_hosts,
    ssh_remedy,
    ssh_words,
)
from compare.plan.plan_file import take_hostfile
from compare.running.checks import OWN_NAME, Finding, HostReport, make_finding, report_host
from recipe.command import run_other_tool, run_tool
from recipe.files import write_json

SCRIPT = "compare/doctor.py"
WIDTH = 100
ANSWER_SECONDS = 300  # for all that a host answers: torch's import over a network is slow
CONNECT_SECONDS = 5.0
ALLREDUCE_SECONDS = 90  # for each backend
MOST_CLOCK_SKEW = 2.0  # seconds
MOST_CLOCK_SKEW_HOROVOD = 30.0  # seconds: horovodrun refuses messages that are older

Networks = dict[str, dict[str, tuple[str, int]]]  # at which address and port each host listens
Hosts = dict[str, subprocess.Popen[str]]  # that answer


def examine(
    hosts: str | None = None,
    hostfile: str | None = None,
    data: Path | None = None,
    network_interface: str | None = None,
    no_allreduce: bool = False,
    json: Path | None = None,
) -> int:
    """Look at all hosts, or at this one, then at what is between them; print what is found as soon
    as it is known, and return the exit code.

    Args:
        hosts: The hosts and their workers, as in node0:4,node1:4; `slurm`: the allocation's.
        hostfile: The same in lines 'name slots=N'.
        data: The folder with train/ and val/.
        network_interface: The one that connects the hosts, such as eth0.
        no_allreduce: Do not measure the all-reduce.
        json: Write the findings as JSON.
    """
    table: dict[str, Any] = {"hosts": hosts, "hostfile": hostfile}
    take_hostfile(table)
    hosts = table["hosts"]
    if hosts in ALLOCATIONS:
        hosts = ALLOCATIONS[hosts]()
    names = [socket.gethostname()] if hosts is None else list(read_hosts(hosts))
    findings, reports = list[Finding](), dict[str, HostReport]()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=len(names)))
        asked = {name: stack.enter_context(start_remote(name, data)) for name in names}
        stack.push(partial(end_after_error, asked))
        for name, report in zip(names, pool.map(read_report, names, asked.values()), strict=True):
            findings += show(name, report.findings)
            if report.versions:
                reports[name] = report
        if len(reports) > 1:
            networks = common_networks(reports, network_interface)
            problems = connection_problems(networks, {name: asked[name] for name in reports})
            between = network_findings(reports, problems, network_interface)
            findings += show("between the hosts", [agreement(reports), *between])
    if not no_allreduce and not any(finding.status == "failed" for finding in findings):
        findings += show("workers", [measure_allreduce(hosts, network_interface)])
    counts = Counter(finding.status for finding in findings)
    print(f"\n{counts['failed']} failed, {counts['warning']} warnings")
    if json is not None:
        write_json(json, {"findings": [asdict(finding) for finding in findings]})
    return 1 if counts["failed"] else 0


def show(title: str, findings: list[Finding]) -> list[Finding]:
    """Print findings, each with its remedy below it, in lines of at most WIDTH characters; return
    them."""
    print(f"\n{title}")
    for finding in findings:
        mark = finding.status if finding.status == "ok" else finding.status.upper()
        head = f"  {mark:7}  {finding.subject:13}  "
        for first, text in (head, finding.found), (" " * len(head) + "-> ", finding.remedy):
            lines = textwrap.wrap(
                text,
                WIDTH,
                initial_indent=first,
                subsequent_indent=" " * len(first),
                break_on_hyphens=False,
                break_long_words=False,  # of commands and paths
            )
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)
    return findings


# ------------------------------------------------------------------------------------- each host


def start_remote(host: str, data: Path | None) -> subprocess.Popen[str]:
    """Have a host `listen`, for ANSWER_SECONDS at most."""
    words = [sys.executable, str(ROOT / SCRIPT), "--answer-as", host]
    if data is not None:
        words += ["--data", str(data.absolute())]  # not resolved, which a dead mount never answers
    words = words if is_here(host) else ssh_words(host, shlex.join(words))
    return subprocess.Popen(
        ["timeout", str(ANSWER_SECONDS), *words],
        errors="replace",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def end_after_error(hosts: Hosts, kind: type[BaseException] | None, *_: object) -> None:
    """End what is asked of hosts, after an error or Ctrl-C: they may not answer for minutes."""
    for host in hosts.values() if kind else ():
        host.terminate()  # timeout(1), which passes it on


def listen(answer_as: str, data: Path | None = None) -> int:
    """Answer on the host of this name: print its report, then connect to the places that a line of
    the input names, network by network, and print what went wrong. Ends with the input."""
    with socket.create_server(("", 0), backlog=1024) as listener, ThreadPoolExecutor(64) as pool:
        report = report_host(answer_as, data, listener.getsockname()[1])
        print(json.dumps(msgspec.to_builtins(report)), flush=True)
        for line in sys.stdin:
            problems = {}
            for network, places in json.loads(line).items():
                tried = pool.map(connection_problem, repeat(answer_as), places, places.values())
                problems[network] = [*filter(None, tried)]
            print(json.dumps(problems), flush=True)
    return 0


def connection_problem(name: str, target: str, place: tuple[str, int]) -> str:
    """Return why this host, `name`, cannot connect to the host `target`; "" if it can."""
    address, port = place
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except OSError as error:
        return f"{name} -> {target} ({address}): {error.strerror or error}"
    return ""


def read_answer(host: subprocess.Popen[str]) -> tuple[Any, str]:
    """Return the next JSON object that a host prints; if it ends first, None and its last line.
    Skips what a login shell prints."""
    last_line = ""
    for line in host.stdout or ():
        if line.startswith("{"):
            return json.loads(line), ""
        last_line = line.strip() or last_line
    return None, last_line


def read_report(name: str, host: subprocess.Popen[str]) -> HostReport:
    """Return a host's report; if there is none, one that only says why."""
    answered, last_line = read_answer(host)
    if answered is not None:
        report = msgspec.convert(answered, HostReport)
        skew = report.time - time.time()
        refused = abs(skew) > MOST_CLOCK_SKEW_HOROVOD and report.versions["Horovod"]
        clock = make_finding(
            "clock",
            abs(skew) <= MOST_CLOCK_SKEW,
            f"{skew:+.1f} s from this host's",
            "run an NTP client there: else times do not fit, and horovodrun refuses messages",
            "failed" if refused else "warning",
        )
        return replace(report, findings=[*report.findings, replace(clock, host=name)])
    code = host.wait()
    if code == 255 and not is_here(name):  # ssh's own
        problem = last_line.removeprefix("ssh: ").rstrip(".")
        return HostReport([Finding("ssh", "failed", problem, ssh_remedy(name, problem), name)])
    # 124 is timeout(1)'s own.
    problem = f"no answer within {ANSWER_SECONDS} s" if code == 124 else last_line
    remedy = (
        "the project and its environment must lie at the same paths on all hosts, and no file "
        "system may hang, such as a dead mount under --data"
    )
    return HostReport([Finding("environment", "failed", problem, remedy, name)])


# ----------------------------------------------------------------------------- between the hosts


def agreement(reports: dict[str, HostReport]) -> Finding:
    """Return in what the hosts differ that must be equal."""
    differing = []
    for name in next(iter(reports.values())).versions:
        values = {host: str(report.versions[name])[:24] for host, report in reports.items()}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{value} on {host}" for host, value in values.items())
            differing.append(f"{name} is {told}")
    return make_finding(
        "versions",
        not differing,
        "; ".join(differing) or f"equal on {len(reports)} hosts",
        "use one environment that all hosts share, or set each up from the same lock",
        "failed",
    )


def common_networks(reports: dict[str, HostReport], interface: str | None) -> Networks:
    """Return the IPv4 networks in which every host has an address of its own, and under OWN_NAME
    those of the hosts' names. If an interface is named: its addresses alone, also where routers
    connect them."""
    networks: Networks = {}
    for host, report in reports.items():
        for name, text in report.addresses.items():
            own = ip_interface(text)
            network = name if name in (OWN_NAME, interface) else str(own.network)
            if interface is None or network == name:
                networks.setdefault(network, {})[host] = (str(own.ip), report.port)
    # Docker's bridge has one address on all hosts, and leads from none to another.
    return {
        network: places
        for network, places in networks.items()
        if network == OWN_NAME or len({address for address, _ in places.values()}) == len(reports)
    }


def connection_problems(networks: Networks, hosts: Hosts) -> dict[str, list[str]]:
    """Let every host connect to every other one; return which connections fail, by network."""
    problems: dict[str, list[str]] = {network: [] for network in networks}
    for host in hosts.values():
        assert host.stdin is not None
        with contextlib.suppress(OSError):
            # Not by print, which would keep for the file's end what a host that is gone cannot get.
            os.write(host.stdin.fileno(), f"{json.dumps(networks)}\n".encode())
    for name, host in hosts.items():
        answered, _ = read_answer(host)
        for network in networks:
            problems[network] += (
                [f"{name} answers no longer"] if answered is None else answered[network]
            )
    return problems


def network_findings(
    reports: dict[str, HostReport], problems: dict[str, list[str]], interface: str | None
) -> list[Finding]:
    """Return which of the networks that the hosts share carry connections from each to each."""
    told = "; ".join(f"{host}: {report.addresses}" for host, report in reports.items())
    remedy = "connect all by one network, or name an interface that all have (--network-interface)"
    found, status = f"addresses: {told}", "failed" if interface else "warning"
    findings = [
        make_finding("networks", any(n != OWN_NAME for n in problems), found, remedy, status)
    ]
    for network, lines in problems.items():
        status = "failed"
        remedy = "open all its ports, or keep launchers off it: --network-interface names another's"
        if network == OWN_NAME:
            status = "warning"  # the allreduce shows whom it keeps from meeting
            remedy = "what a host calls itself must lead there from the others, too: /etc/hosts"
        found = "; ".join(lines[:3]) or "every host connects to every other one"
        findings.append(make_finding("network", not lines, f"{network}: {found}", remedy, status))
    return findings


def measure_allreduce(hosts: str | None, interface: str | None) -> Finding:
    """Measure a short allreduce by each backend that is there, which prints its figures."""
    workers = 2 if hosts is None else sum(read_hosts(hosts).values())
    if workers < 2:
        return Finding("allreduce", "ok", "not measured: there is one worker")
    given = {"--hosts": hosts, "--network-interface": interface}
    words = [
        "python",
        str(ROOT / "compare/collectives.py"),
        "--workers",
        str(workers),
        "--sizes",
        "4K",
        "16M",
        "--wires",
        "fp32",
        "--model",
        "none",
        "--blocks",
        "1",
        "--timeout",
        str(ALLREDUCE_SECONDS),
        *(word for flag, value in given.items() if value is not None for word in (flag, value)),
    ]
    code = run_other_tool([sys.executable, *words[1:]])
    return make_finding(
        "allreduce",
        code == 0,
        f"exit code {code} of `{shlex.join(words)}`",
        "docs/launching.md lists the usual reasons, such as a firewall or the wrong network",
        "failed",
    )


tool = listen if "--answer-as" in sys.argv else examine  # on each host; where a person starts it
# OSError: --json in a folder that is not there.
main = partial(run_tool, SCRIPT, tool, __doc__)

if __name__ == "__main__":
    sys.exit(main())
