"""What ten minutes on a machine with one or two GPUs can show: `make gpu-check`, docs/gpu.md.

    python benchmarks/gpu_check.py                    all checks, then one file to send back
    python benchmarks/gpu_check.py --dry              each check on the CPU, small
    python benchmarks/gpu_check.py --only facts speed

Each check is a row of CHECKS. What a check cannot do here it says, with what is missing.
"""

import contextlib
import json
import math
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.programs.trainer import RANDOM_IMAGES
from compare.plan.environment import ROOT
from compare.plan.plan import TRAINERS
from compare.running import checks
from compare.running.launch import run_to_end, utc_now, utc_stamp
from compare.running.scheduler import Scheduler
from compare.running.sides import Side
from recipe.command import run_tool
from recipe.errors import UserError
from recipe.files import write_json
from tools.make_jpegs import JPEGS, jpegs_folder

WORK = "--arch resnet50 --channels-last --epochs 1000"
DRY = (
    "--no-cuda --arch shufflenet_v2_x0_5 --train-crop-size 32 --val-crop-size 32 --batch-size 4 "
    "--threads 1 --no-channels-last"
)
DRY_STEPS = "--max-steps 12"
# Of one training or tool; three times as long on a CPU, which others may use, and with a compiler.
LIMIT_SECONDS = 100
# Prints a line a synchronising call: torch would else say each only once.
COUNTED = (
    "import runpy, sys, torch; torch.set_warn_always(True); "
    "torch.cuda.is_available() and torch.cuda.set_sync_debug_mode('warn'); "
    "sys.argv = sys.argv[1:]; sys.path.insert(0, ''); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
SYNCHRONISING = "called a synchronizing CUDA operation"


class NotPossibleError(Exception):
    """What is missing for a check."""


@dataclass(frozen=True)
class Setting:
    """Where and how a check runs."""

    folder: Path
    dry: bool

    def start(self, *words: str, look: Callable[[Path], None] = lambda folder: None) -> Path:
        """Run a program of the project to its end, and return its folder, whose path stands for
        {folder} in the words, and which has the output; UserError if it fails."""
        folder = self.folder / str(time.time_ns())
        command = ["env", "NCCL_DEBUG=INFO", sys.executable]
        command += [word.replace("{folder}", str(folder)) for word in words]
        limit_seconds = LIMIT_SECONDS * (3 if self.dry or "--compile" in command else 1)
        run_to_end(command, folder, limit_seconds, folder / "output.log", lambda: look(folder))
        return folder

    def train(
        self, flags: str, *prefix: str, data: str = RANDOM_IMAGES, engine: str = "ddp", **look: Any
    ) -> dict[str, Any]:
        """Train; return the summary, with the run's folder."""
        words = f"{TRAINERS[engine]} {WORK} {data} {flags} --keep-checkpoints 0 --log-dir".split()
        dry = f"{DRY} {DRY_STEPS}".split() if self.dry else ()
        folder = self.start(*prefix, *words, "{folder}", "--name", "run", *dry, **look)
        return json.loads((folder / "run/summary.json").read_text()) | {"folder": folder}


def ask_nvidia_smi(field: str, *flags: str) -> list[str]:
    """What nvidia-smi says of each GPU."""
    words = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", *flags]
    try:
        done = subprocess.run(words, capture_output=True, errors="replace", check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotPossibleError(f"nvidia-smi: {error}") from None
    return done.stdout.splitlines()


def expect(is_well: bool, wrong: str, **figures: Any) -> dict[str, Any]:
    """The figures; UserError, which holds them, if they are not as they are to be."""
    if not is_well:
        raise UserError(f"{wrong}: {figures}")
    return figures


def versions() -> dict[str, Any]:
    """What everything is measured with."""
    gpus = range(torch.cuda.device_count())
    return checks.versions() | {
        "cuDNN": torch.backends.cudnn.version(),
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
        "capabilities": [torch.cuda.get_device_capability(gpu) for gpu in gpus],
        "architectures": torch.cuda.get_arch_list(),
    }


# ------------------------------------------------------------------------------------- the checks


def facts(setting: Setting) -> dict[str, Any]:
    """What the doctor says of torch, its GPUs and Horovod; nvidia-smi must see these GPUs."""
    asked = ("torch", "GPUs", "Horovod")
    findings = [asdict(one) for one in checks.check_host() if one.subject in asked]
    found: dict[str, Any] = {"findings": findings}
    is_well = all(one["status"] != "failed" for one in findings)
    if not setting.dry:
        gpus, names = versions()["gpus"], ask_nvidia_smi("name")
        is_well &= bool(gpus) and {*gpus} <= {*names}
        found |= {"torch": gpus, "nvidia_smi": names, "driver": ask_nvidia_smi("driver_version")}
    return expect(is_well, "torch and nvidia-smi see other GPUs, or the doctor failed", **found)


def gpu_tests(setting: Setting) -> dict[str, Any]:
    """What these tests skip is not possible here."""
    tests = (ROOT / "tests").glob("test_*.py")
    words = ["-m", "pytest", *(str(one) for one in tests if "mark.gpu" in one.read_text())]
    words += ["-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider"]
    folder = setting.start(*words, *(["--collect-only"] if setting.dry else []))
    lines = (folder / "output.log").read_text().splitlines()
    if skipped := [line for line in lines if line.startswith("SKIPPED")]:
        raise NotPossibleError("\n".join([lines[-1], *skipped]))
    return {"pytest": lines[-1]}


def synchronising_calls(setting: Setting) -> dict[str, Any]:
    """Of 20 steps: the difference of two runs that differ by so many."""
    found = []
    for steps in (10, 30):
        run = setting.train(f"--batch-size 32 --max-steps {steps}", "-W", "always", "-c", COUNTED)
        lines = (run["folder"] / "output.log").read_text(errors="replace").splitlines()
        found.append(Counter(line for line in lines if SYNCHRONISING in line))
    few, many = (sum(lines.values()) for lines in found)
    figures = {"calls_per_step": (many - few) / 20, "where": found[1].most_common(20)}
    # The record alone waits for the GPU now and then.
    return expect(setting.dry or many > 0, "torch names no call: did it look?", **figures)


def compare_clocks(setting: Setting, *kinds: str) -> dict[str, Any]:
    """Images/s by the wall clock and by the steps' own times, which in large batches may differ by
    2 %: in small ones what lies between the steps counts for more."""
    found, off = {}, []
    for kind, (batch, steps) in product(kinds, [(32, 300), (256, 60)][: 1 if setting.dry else 2]):
        name = f"{kind} --batch-size {batch}"
        done = setting.train(f"{name} --max-steps {steps}")
        found[name] = wall, own = done["wall_images_per_second"], done["images_per_second"]
        if not wall or not own or (batch > 32 and abs(wall / own - 1) > 0.02):
            off.append(name)
    return expect(setting.dry or not off, f"wall clock and steps differ for {off}", **found)


def speed(setting: Setting) -> dict[str, Any]:
    return compare_clocks(setting, "--precision bf16", "--precision fp16")


def compiled(setting: Setting) -> dict[str, Any]:
    if setting.dry:
        raise NotPossibleError("on a CPU the compiler takes minutes")
    return compare_clocks(setting, "--precision bf16 --compile")


def determinism(setting: Setting) -> dict[str, Any]:
    """One worker of each engine, and DDP's again: all end with the same bits."""
    digests = dict[str, list[tuple[str, str]]]()
    for precision in ("fp32", "bf16"):
        flags = f"--batch-size 32 --max-steps 6 --deterministic --precision {precision}"
        engines = ["ddp", "ddp", *["horovod"] * checks.has_horovod()]
        runs = [(one, setting.train(flags, engine=one)) for one in engines]
        digests[precision] = [(one, run["weights_sha256"]) for one, run in runs]
    is_well = all(len({digest for _, digest in found}) == 1 for found in digests.values())
    return expect(is_well, "equal runs end with other weights", of=digests)


def two_workers(setting: Setting) -> dict[str, Any]:
    """Both engines, equal within 1e-5, with each worker's own BatchNorm and with sync BatchNorm."""
    if not checks.has_horovod():
        raise NotPossibleError(checks.NO_HOROVOD)
    found, transports = dict[str, Any](), set[str]()
    for norm in ("sync",) if setting.dry else ("local", "sync"):
        words = ["--workers", "2", "--steps", "3", "--relative", "1e-5", "--out", "{folder}/runs"]
        words += ["--", "--data", "digits", "--threads", "1", "--batch-norm", norm]
        words += ["--no-cuda"] if setting.dry else ["--deterministic"]
        folder = setting.start("compare/parity.py", *words)
        found[norm] = (folder / "output.log").read_text().splitlines()[-1]
        for summary in folder.glob("runs/**/summary.json"):
            transports.add(json.loads(summary.read_text())["transport"])
    found["transports"] = sorted(transports)
    return expect(bool(transports) and (setting.dry or transports == {"NCCL"}), "not NCCL", **found)


def all_reduce(setting: Setting) -> dict[str, Any]:
    words = ["--workers", "2", "--blocks", "1", "--model", "none", "--wires", "fp32", "--sizes"]
    words += ["4K", "1M", "--no-cuda"] if setting.dry else ["4K", "16M", "256M"]
    words += ["--backends", "torch.distributed", "--json", "{folder}/collectives.json", "--out"]
    folder = setting.start("compare/collectives.py", *words, "{folder}/runs")
    log = folder / "runs/block-1/torch.distributed/output.log"
    via = Counter(re.findall(r" via (\S+)", log.read_text(errors="replace")))  # as in P2P/CUMEM
    measured = json.loads((folder / "collectives.json").read_text())
    figures = {"measured": measured, "nccl_via": via}
    return expect(setting.dry or bool(via), "NCCL names no transport", **figures)


def stopped_neighbour(setting: Setting) -> dict[str, Any]:
    """A side's speed alone and beside one that is stopped, in turns of each kind."""
    flags = f"{WORK} {RANDOM_IMAGES} --batch-size 64 --precision bf16 {DRY if setting.dry else ''}"
    program = (TRAINERS["ddp"], *flags.split(), "--log-dir", "{folder}", "--name", "run")
    one = Side("one", ("python",), program, 4 if setting.dry else 64, 3 if setting.dry else 40)
    with Scheduler(setting.folder / "stopped") as scheduler:
        scheduler.start(one)
        turns = range(4 if setting.dry else 12)
        alone = [scheduler.take_turn(one, n).images_per_second for n in turns]
        scheduler.start(replace(one, name="other"))
        beside = [scheduler.take_turn(one, n).images_per_second for n in turns]
    ratio = fmean(beside) / fmean(alone)
    error = math.hypot(*(stdev(own) / fmean(own) / len(turns) ** 0.5 for own in (alone, beside)))
    return expect(
        setting.dry or ratio + 2 * error > 0.99, "costs more than 1 %", ratio=ratio, error=error
    )


def jpegs(setting: Setting) -> dict[str, Any]:
    data = f"--data {jpegs_folder(ROOT / JPEGS)}"
    done = setting.train("--batch-size 256 --precision bf16 --max-steps 40", data=data)
    cores = done["cpu_seconds"] / done["train_seconds"]
    return {"cores_used": cores, "input": done["input"], "rate": done["images_per_second"]}


def profile(setting: Setting) -> dict[str, Any]:
    done = setting.train("--batch-size 256 --precision bf16 --profile-steps 5 --max-steps 20")
    events = json.loads((done["folder"] / "run/profile/rank-0.json").read_text())["traceEvents"]
    names = Counter(event.get("cat", "") for event in events)
    sums = Counter[str]()
    for event in events:
        if event.get("cat") == ("cpu_op" if setting.dry else "kernel"):
            sums[event["name"][:80]] += event["dur"]
    return expect(bool(sums), "no kernels in it", events=names, us=sums.most_common(20))


def energy(setting: Setting) -> dict[str, Any]:
    """NVML's counter against the power that nvidia-smi shows, within 15 %."""
    watts = list[float]()

    def look(folder: Path) -> None:
        is_training = (folder / "run/metrics.jsonl").exists()
        if not setting.dry and is_training and not (folder / "run/summary.json").exists():
            gpu = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # its own order is another
            with contextlib.suppress(ValueError):  # "[N/A]" where the power is not shown
                watts.append(float(ask_nvidia_smi("power.draw", "--id", gpu)[0]))

    done = setting.train("--batch-size 256 --precision bf16 --max-steps 300", look=look)["energy"]
    if setting.dry or done["gpu_watts"] is None or not watts:
        raise NotPossibleError(
            "no counter of NVML, or nvidia-smi shows no power (in --dry both are left out); "
            f"{done}, {watts}"
        )
    ratio = done["gpu_watts"] / fmean(watts)
    return expect(0.85 < ratio < 1.15, "they differ", energy=done, nvidia_smi_watts=watts)


# And on how many GPUs.
CHECKS: dict[Callable[[Setting], dict[str, Any]], int] = {
    facts: 0, gpu_tests: 1, synchronising_calls: 1, speed: 1, determinism: 1, two_workers: 2,
    all_reduce: 2, stopped_neighbour: 1, jpegs: 1, profile: 1, energy: 1, compiled: 1,
}  # fmt: skip


def carry_out(
    check: Callable[[Setting], dict[str, Any]], gpus: int, setting: Setting
) -> dict[str, Any]:
    """Run a check; whatever it ends with is in what is returned: its status is "ok", "failed" or
    "not possible"."""
    found: dict[str, Any] = {"name": check.__name__, "status": "ok", "reason": "", "figures": {}}
    began = time.monotonic()
    try:
        if not setting.dry and torch.cuda.device_count() < gpus:
            raise NotPossibleError(f"{gpus} GPUs are needed; torch sees fewer")
        found["figures"] = check(setting)
    except NotPossibleError as error:
        found |= {"status": "not possible", "reason": str(error)}
    except Exception as error:  # none keeps the others from running
        found |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    found["seconds"] = round(time.monotonic() - began, 1)
    print("{status:13} {name:20} {seconds:6.1f} s  {reason:.2000}".format_map(found), flush=True)
    return found


def check_gpus(dry: bool = False, only: tuple[str, ...] = (), out: Path | None = None) -> int:
    """Make the checks, and write what they found.

    Args:
        dry: On the CPU, and small: do the checks themselves work?
        only: These checks alone.
        out: The file; by default gpu-check.json in a new folder of runs/.
    """
    known = {check.__name__: check for check in CHECKS}
    if wrong := set(only) - known.keys():
        raise UserError(
            f"--only {' '.join(wrong)}: there is no such check; take of {', '.join(known)}"
        )
    setting = Setting(Path("runs").absolute() / f"gpu-check-{utc_stamp()}", dry)
    results = [
        carry_out(check, CHECKS[check], setting)
        for name, check in known.items()
        if not only or name in only
    ]
    out = out or setting.folder / "gpu-check.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    told = {"created_utc": utc_now(), "dry": dry, "versions": versions(), "checks": results}
    write_json(out, told)
    print(f"send back: {out}")
    return int(any(result["status"] == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(run_tool("benchmarks/gpu_check.py", check_gpus, __doc__, None))
