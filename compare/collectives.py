"""Measure what the engines build on: the allreduce, over message sizes, side by side.

    python compare/collectives.py                        this host, 2 workers
    python compare/collectives.py --workers 4 --hosts a:2,b:2 --json allreduce.json
    python compare/collectives.py --show runs/collectives-20260131-120000

torch.distributed, the same over MPI (as ddp-mpi trains), Horovod over MPI and over Gloo (with NCCL
where there are GPUs and its build has it) and plain mpi4py sum the same messages, on the fp32 and
on the fp16 wire; every sum is checked. The unit of evidence is a launch: each block starts each
backend once, in random order.
"""

import argparse
import os
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from compare.page.allreduce import as_json, read_measurement, text_report
from compare.plan.blocks import shuffled
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import most_on_a_host, path_from_here, read_hosts
from compare.running.checks import check_cores, check_load, missing_for, warning_text
from compare.running.launch import shown_tail, start_command, utc_now, utc_stamp
from recipe.command import Flags, parser_of, run_main
from recipe.errors import refuse
from recipe.files import write_json
from recipe.settings.flags import WIRE_FORMATS

SCRIPT = "compare/collectives.py"
WIRES = tuple(WIRE_FORMATS)
# Each backend's configuration, which says how its script is started.
BACKENDS = {
    "torch.distributed": "ddp-torchrun",
    "torch-mpi": "ddp-mpi",
    "horovod-mpi": "horovod-mpi",
    "horovod-gloo": "horovod-gloo",
    "mpi4py": "mpi4py-mpirun",
}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Of the flags, what collectives.json keeps.
KEPT = (
    "workers", "hosts", "network_interface", "blocks", "sizes", "wires", "model", "seconds",
    "threads", "cuda",
)  # fmt: skip


def size_bytes(text: str) -> int:
    """Return the bytes of `4096`, `4K` or `256M`."""
    found = re.fullmatch("([0-9]+)([KMG]?)", text.upper())
    size = int(found[1]) * UNITS[found[2]] if found else 0
    if size == 0 or size % 4:
        raise argparse.ArgumentTypeError(
            f"{text} is no size: write 4096, 4K or 256M, a multiple of 4 bytes"
        )
    return size


FLAGS: Flags = {
    "--workers": {"type": int, "default": 2, "metavar": "N", "help": "worker processes (default: "
                  "2)"},
    "--hosts": {"metavar": "A:2,B:2", "help": "hosts and their slots; the first must see the "
                "results folder (default: this host)"},
    "--network-interface": {"metavar": "NAME", "help": "that connects the hosts, such as eth0"},
    "--backends": {"nargs": "+", "choices": BACKENDS, "metavar": "NAME", "help": "of "
                   f"{', '.join(BACKENDS)} (default: all); the first is what others are compared "
                   "with"},
    "--sizes": {"nargs": "+", "type": size_bytes, "default": [4096 << 2 * i for i in range(9)],
                "metavar": "SIZE", "help": "such as 4K or 256M: bytes of fp32, K = 1024 (default: "
                "4K to 256M by factors of 4)"},
    "--wires": {"nargs": "+", "choices": WIRES, "default": list(WIRES), "help": "number formats on "
                f"the wire (default: {' '.join(WIRES)})"},
    "--model": {"default": "resnet50", "metavar": "NAME", "help": "the torchvision model whose "
                "gradients are summed, too, as one message and tensor by tensor; none: leave it "
                "out (default: resnet50)"},
    "--blocks": {"type": int, "default": 3, "metavar": "N", "help": "launches of each backend "
                 "(default: 3, the least for an interval)"},
    "--seconds": {"type": float, "default": 0.1, "metavar": "S", "help": "for the repetitions of "
                  "one message in one launch, at least 3 of them (default: 0.1)"},
    "--threads": {"type": int, "default": 1, "metavar": "N", "help": "CPU threads of each rank for "
                  "casts and copies (default: 1)"},
    "--no-cuda": {"dest": "cuda", "action": "store_false", "help": "stay on the CPU"},
    "--timeout": {"type": int, "default": 300, "metavar": "SECONDS", "help": "a launch that takes "
                  "longer is ended and counts as failed (default: 300)"},
    "--out": {"type": Path, "metavar": "DIR", "help": "folder for raw figures (default: "
              "runs/collectives-<UTC time>)"},
    "--json": {"type": Path, "metavar": "FILE", "help": "write the figures as JSON"},
    "--show": {"type": Path, "metavar": "DIR", "help": "measure nothing: show an earlier folder"},
}  # fmt: skip


def measure_or_show(argv: list[str]) -> int:
    """Measure or show what the command line asks for and return the exit code."""
    options = parser_of(SCRIPT, __doc__, FLAGS).parse_args(argv)
    folder = options.show or options.out or Path("runs") / f"collectives-{utc_stamp()}"
    if options.show is None:
        measure_backends(options, folder)
    measurement = read_measurement(folder)
    print(f"\n{text_report(measurement)}")
    if options.json is not None:
        write_json(options.json, as_json(measurement))
    return 1 if measurement.failed else 0


def measure_backends(options: argparse.Namespace, folder: Path) -> None:
    """Start each backend that is there once a block, one after the other, and keep what each wrote
    in `folder`; UserError about what does not go together, or one that was named and is missing."""
    slots = options.workers if options.hosts is None else sum(read_hosts(options.hosts).values())
    asked = options.backends or [*BACKENDS]
    reasons = {name: missing_for(CONFIGURATIONS[BACKENDS[name]]) for name in asked}
    missing = [f"{name}: not available. {why}" for name, why in reasons.items() if why]
    refuse(
        (
            options.workers < 2,
            f"--workers {options.workers}: nothing is exchanged; give 2 or more",
        ),
        (options.seconds <= 0, f"--seconds {options.seconds:g}: give a positive number"),
        (
            min(options.blocks, options.threads, options.timeout) < 1,
            "--blocks, --threads and --timeout: give positive whole numbers",
        ),
        (slots < options.workers, f"--hosts {options.hosts}: has fewer slots than --workers"),
        (
            folder.exists() and any(folder.iterdir()),
            f"--out {folder}: is not empty; name a new folder",
        ),
        (
            options.json and not options.json.parent.is_dir(),
            f"{options.json}: make its folder first",
        ),
        (options.backends and missing, "\n".join(missing)),
    )
    findings = [
        check_load(),
        check_cores(most_on_a_host(options.workers, options.hosts), options.threads),
    ]
    warnings = [*missing, *(warning_text(one) for one in findings if one.status != "ok")]
    print(f"raw figures and commands: {folder}", *warnings, sep="\nwarning: ", flush=True)
    backends = [name for name in asked if not reasons[name]]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "collectives.json", {
        "created_utc": utc_now(), "backends": backends, "cores": os.cpu_count() or 1,
        "warnings": warnings, **{name: getattr(options, name) for name in KEPT},
    })  # fmt: skip
    failed: set[str] = set()
    for block in range(1, options.blocks + 1):
        for name in (one for one in shuffled(backends, block) if one not in failed):
            place = folder / f"block-{block}" / name
            place.mkdir(parents=True)
            words, out = command(name, options, place), place / "measurements.jsonl"
            outcome = start_command(words, place, options.timeout, out)
            told = f"block {block}  {name:17}  {outcome.seconds:5.1f} s  {outcome.status}"
            print(told, flush=True)
            if outcome.status != "completed":
                failed.add(name)
                print(shown_tail(place), flush=True)


def command(name: str, options: argparse.Namespace, place: Path) -> list[str]:
    """Return what starts a backend, as a person would type it in the current directory."""
    configuration = CONFIGURATIONS[BACKENDS[name]]
    if configuration.launcher == "torchrun" and options.hosts is not None:
        configuration = CONFIGURATIONS["ddp-mpirun"]  # whose hosts may take unequal numbers
    configuration = replace(configuration, interface=options.network_interface)
    # An MPI may know no GPU's memory.
    cuda = [] if options.cuda and configuration.transport != "mpi" else ["--no-cuda"]
    return [
        *configuration.launch_words(options.workers, options.hosts),
        path_from_here(configuration.trained_by.allreduce),
        "--sizes", *map(str, sorted({*options.sizes})), "--wires", *options.wires,
        "--seconds", f"{options.seconds:g}", "--threads", str(options.threads),
        "--model", options.model, *configuration.arguments, *cuda,
        "--out", str(place / "measurements.jsonl"),
    ]  # fmt: skip


main = partial(
    run_main, SCRIPT, measure_or_show, interrupted="interrupted: all processes were ended"
)

if __name__ == "__main__":
    sys.exit(main())
