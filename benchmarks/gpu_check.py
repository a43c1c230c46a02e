"""What five minutes on a machine with one or two GPUs can show: `make gpu-check`, docs/gpu.md.

    python benchmarks/gpu_check.py                    all checks, then one file to send back
    python benchmarks/gpu_check.py --dry              each check on the CPU, small
    python benchmarks/gpu_check.py --only facts speed

Each check is a row of CHECKS. What a check cannot do here it says, with what is missing.
"""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.by_turns import jpegs_folder
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.environment import ROOT, run_environment
from compare.plan.plan import TRAINERS
from compare.running import checks
from compare.running.launch import Launches, last_step, shown_tail, utc_now, utc_stamp
from compare.running.scheduler import Scheduler
from compare.running.sides import Side
from recipe.command import run_tool
from recipe.errors import UserError
from recipe.files import write_json

WORK = "--arch resnet50 --channels-last --epochs 1000"
SYNTHETIC = "--data synthetic --synthetic-images 1000000"
DRY = (
    "--no-cuda --arch shufflenet_v2_x0_5 --train-crop-size 32 --val-crop-size 32 --batch-size 4 "
    "--threads 1 --no-channels-last"
)
TESTS = ROOT / "tests"
LIMIT_SECONDS = 100  # of one training or tool
# Prints a line a synchronising call: torch would else say each only once.
COUNTED = (
    "import runpy, sys, torch; torch.set_warn_always(True); "
    "torch.cuda.is_available() and torch.cuda.set_sync_debug_mode('warn'); "
    "sys.argv = sys.argv[1:]; sys.path.insert(0, ''); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
SYNCHRONISING = "called a synchronizing CUDA operation"
LEAST_STEPS = 10  # at the start, that no figure is of


class NotPossibleError(Exception):
    """What is missing for a check."""


@dataclass(frozen=True)
class Setting:
    """Where and how a check runs."""

    folder: Path
    dry: bool

    def train(
        self,
        flags: str,
        engine: str = "ddp",
        workers: int = 1,
        prefix: Sequence[str] = (),
        data: str = SYNTHETIC,
    ) -> dict[str, Any]:
        """Train through the engine's launcher; return the summary, with what is seen from outside:
        images/s by the wall clock, the output, and the watts that nvidia-smi shows."""
        place = self.folder / f"{engine}-{time.time_ns()}"
        place.mkdir(parents=True)
        name = "horovod-mpi" if engine == "horovod" else "ddp-torchrun"
        launcher = CONFIGURATIONS[name].launch_words(workers, None) if workers > 1 else ["python"]
        words = [*launcher, *prefix, TRAINERS[engine], *f"{WORK} {data} {flags}".split()]
        words += ["--log-interval", "1", "--keep-checkpoints", "0"]
        words += [*(DRY.split() if self.dry else ()), "--log-dir", str(place), "--name", "run"]
        seen, watts = list[tuple[float, int, float]](), list[float]()
        with Launches() as launches:
            process, deadline = launches.launch(words, place), time.monotonic() + LIMIT_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                line = last_step(place / "run/metrics.jsonl") or {"step": 0}
                if line["step"] >= (0 if self.dry else LEAST_STEPS):
                    images = line.get("images_per_second", 0) * line.get("seconds", 0)
                    if not seen or line["step"] > seen[-1][1]:
                        seen.append((time.monotonic(), line["step"], images))
                        watts += [] if self.dry else ask_nvidia_smi("power.draw")[:1]
                time.sleep(0.02)
        summary = place / "run/summary.json"
        if not summary.exists():
            raise UserError(f"no summary within {LIMIT_SECONDS} s\n{shown_tail(place)}")
        (first, start, _), (last, end, images) = seen[0], seen[-1]
        return {
            **json.loads(summary.read_text()),
            "wall_images_per_second": (end - start) * images / ((last - first) or 1e9),
            "output": (place / "output.log").read_text(errors="replace"),
            "nvidia_smi_watts": fmean(watts) if watts else None,
            "folder": place / "run",
        }


def ask_nvidia_smi(field: str) -> list[Any]:
    """What nvidia-smi says of each GPU; figures as numbers."""
    words = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotPossibleError(f"nvidia-smi: {error}") from None
    lines = done.stdout.splitlines()
    return [float(line) if re.fullmatch(r"[\d.]+", line) else line for line in lines]


def expect(is_well: bool, wrong: str, **figures: Any) -> dict[str, Any]:
    """The figures; UserError, which holds them, if they are not as they are to be."""
    if not is_well:
        raise UserError(f"{wrong}: {figures}")
    return figures


def tool(setting: Setting, *words: str) -> str:
    """The output of one of the project's commands; UserError with its end if it fails."""
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=LIMIT_SECONDS,
        env=run_environment() | {"NCCL_DEBUG": "INFO"},
    )  # fmt: skip
    expect(done.returncode == 0, f"{' '.join(words)}\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def facts(setting: Setting) -> dict[str, Any]:
    """What driver, torch and nvidia-smi say must agree."""
    found = versions()
    if setting.dry:
        return found
    names = ask_nvidia_smi("name")
    return expect(set(found["gpus"]) <= set(names), "torch and nvidia-smi see other GPUs",
                  **found, nvidia_smi=names, driver=ask_nvidia_smi("driver_version"))  # fmt: skip


def gpu_tests(setting: Setting) -> dict[str, Any]:
    ask = ["--collect-only"] if setting.dry else []
    files = [str(file) for file in TESTS.glob("test_*.py") if "mark.gpu" in file.read_text()]
    told = tool(setting, "-m", "pytest", *files, "-m", "gpu", "-q", "-p", "no:cacheprovider", *ask)
    return {"pytest": told.splitlines()[-1]}


def synchronising_calls(setting: Setting) -> dict[str, Any]:
    """Of 20 steps: the difference of two runs that differ by so many."""
    prefix = ["-W", "always", "-c", COUNTED]
    few, many = (
        setting.train(f"--batch-size 32 --max-steps {n}", prefix=prefix)["output"]
        for n in ((3, 6) if setting.dry else (10, 30))
    )
    lines = Counter(line for line in many.splitlines() if SYNCHRONISING in line)
    calls = (many.count(SYNCHRONISING) - few.count(SYNCHRONISING)) / (3 if setting.dry else 20)
    return {"calls_per_step": calls, "where": dict(lines.most_common(20))}


def speed(setting: Setting) -> dict[str, Any]:
    """By the wall clock and by summary.json, which may differ by 2 %."""
    found = {}
    for batch in (32, 256):
        for kind in ("--precision bf16", "--precision fp16", "--precision bf16 --compile"):
            if setting.dry and "compile" in kind:
                continue
            done = setting.train(f"--batch-size {batch} --max-steps {7 if setting.dry else 60} "
                                 f"{kind}")  # fmt: skip
            pair = [done["wall_images_per_second"], done["images_per_second"]]
            found[f"{kind} --batch-size {batch}"] = pair
    left_out = {"left_out": "--compile, whose compiler takes minutes"} if setting.dry else {}
    off = [kind for kind, (wall, own) in found.items() if own and abs(wall / own - 1) > 0.02]
    return expect(
        setting.dry or not off, f"wall clock and summary differ for {off}", **found, **left_out
    )


def determinism(setting: Setting) -> dict[str, Any]:
    flags = "--batch-size 32 --max-steps 6 --deterministic"
    digests = [setting.train(flags)["weights_sha256"] for _ in range(2)]
    return expect(len(set(digests)) == 1, "two equal runs end with other weights", of=digests)


def two_workers(setting: Setting) -> dict[str, Any]:
    """Both engines, equal within 1e-5, and each with sync BatchNorm."""
    own = ["--no-cuda"] if setting.dry else ["--deterministic"]
    flags = ["--data", "digits", "--threads", "1", *own]
    words = ["--workers", "2", "--steps", "3", "--relative", "1e-5", "--", *flags]
    told = tool(setting, "compare/parity.py", *words)
    sync = {
        engine: setting.train("--batch-size 32 --batch-norm sync --max-steps 6", engine, 2)
        for engine in ("ddp", "horovod")
    }
    figures = {name: (one["transport"], one["weights_sha256"]) for name, one in sync.items()}
    by_nccl = setting.dry or {transport for transport, _ in figures.values()} == {"NCCL"}
    return expect(by_nccl, "not over NCCL", parity=told.splitlines()[-1], **figures)


def all_reduce(setting: Setting) -> dict[str, Any]:
    out = setting.folder / "collectives.json"
    sizes = ["4K", "1M"] if setting.dry else ["4K", "16M", "256M"]
    words = ["--workers", "2", "--blocks", "1", "--model", "none", "--sizes", *sizes]
    words += ["--wires", "fp32", "--json", str(out), "--out", str(setting.folder / "collectives")]
    backends = ["--backends", "torch.distributed", *(["--no-cuda"] if setting.dry else [])]
    tool(setting, "compare/collectives.py", *words, *backends)
    log = setting.folder / "collectives/block-1/torch.distributed/output.log"
    via = Counter(re.findall(r" via (\S+)", log.read_text(errors="replace")))  # as in P2P/CUMEM
    figures = {"measured": json.loads(out.read_text()), "nccl_via": dict(via)}
    return expect(setting.dry or bool(via), "NCCL names no transport", **figures)


def stopped_neighbour(setting: Setting) -> dict[str, Any]:
    """A side's speed alone and beside one that is stopped, in turns of each kind."""
    flags = f"{WORK} {SYNTHETIC} --batch-size 64 --precision bf16 {DRY if setting.dry else ''}"
    program = (TRAINERS["ddp"], *flags.split(), "--log-dir", "{folder}", "--name", "run")
    one = Side("one", ("python",), program, 4 if setting.dry else 64, 3 if setting.dry else 40)
    with Scheduler(setting.folder / "stopped") as scheduler:
        scheduler.start(one)
        alone = [scheduler.take_turn(one, n).images_per_second for n in range(4)]
        scheduler.start(replace(one, name="other"))
        beside = [scheduler.take_turn(one, n).images_per_second for n in range(4)]
    cost = 1 - max(beside) / max(alone)
    return expect(setting.dry or cost < 0.01, "costs more than 1 %", alone=alone, beside=beside)


def jpegs(setting: Setting) -> dict[str, Any]:
    steps, images = (7, 40) if setting.dry else (40, 640)
    flags = f"--batch-size 256 --precision bf16 --max-steps {steps}"
    done = setting.train(flags, data=f"--data {jpegs_folder(images)}")
    cores = done["cpu_seconds"] / done["train_seconds"]
    return {"cores_used": cores, "input": done["input"], "rate": done["images_per_second"]}


def profile(setting: Setting) -> dict[str, Any]:
    done = setting.train("--batch-size 256 --precision bf16 --profile-steps 5 --max-steps 20")
    events = json.loads((done["folder"] / "profile/rank-0.json").read_text())["traceEvents"]
    names = Counter(event.get("cat", "") for event in events)
    sums = Counter[str]()
    for event in events:
        if event.get("cat") == ("cpu_op" if setting.dry else "kernel"):
            sums[event["name"][:80]] += event["dur"]
    return expect(bool(sums), "no kernels in it", events=dict(names), us=dict(sums.most_common(20)))


def energy(setting: Setting) -> dict[str, Any]:
    """NVML's counter against the power that nvidia-smi shows, within 15 %."""
    done = setting.train(f"--batch-size 256 --max-steps {7 if setting.dry else 100} "
                         "--precision bf16")  # fmt: skip
    figures = {"energy": done["energy"], "nvidia_smi_watts": done["nvidia_smi_watts"]}
    if setting.dry:
        raise NotPossibleError(f"NVML is left out in --dry; {figures}")
    ratio = (done["energy"]["gpu_watts"] or 0) / (done["nvidia_smi_watts"] or 1)
    return expect(0.85 < ratio < 1.15, "they differ", **figures)


@dataclass(frozen=True)
class Check:
    """A row: what it does, what is looked for in it, and on how many GPUs."""

    run: Callable[[Setting], dict[str, Any]]
    looks_for: str
    gpus: int = 1

    @property
    def name(self) -> str:
        return self.run.__name__


CHECKS = (
    Check(facts, "torch and nvidia-smi see the same GPUs"),
    Check(gpu_tests, "pytest -m gpu passes"),
    Check(synchronising_calls, "how many a step, and where: for a person to judge"),
    Check(speed, "wall clock and summary.json within 2 %"),
    Check(determinism, "the same weights twice with --deterministic"),
    Check(two_workers, "engines equal within 1e-5; sync BatchNorm; over NCCL", 2),
    Check(all_reduce, "bandwidth, and NCCL's transport", 2),
    Check(stopped_neighbour, "costs less than 1 %"),
    Check(jpegs, "images/s from JPEG files, and the cores that this takes"),
    Check(profile, "five steps' kernels"),
    Check(energy, "NVML and nvidia-smi within 15 %"),
)


@dataclass
class Result:
    """What a check has come to."""

    name: str
    looks_for: str
    status: str = "ok"  # "failed", "not possible"
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def versions() -> dict[str, Any]:
    """What everything is measured with."""
    gpus = range(torch.cuda.device_count())
    return checks.versions() | {
        "cuDNN": torch.backends.cudnn.version(),
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
        "capabilities": [torch.cuda.get_device_capability(gpu) for gpu in gpus],
        "architectures": torch.cuda.get_arch_list(),
    }


def carry_out(check: Check, setting: Setting) -> Result:
    """Run a check; whatever it ends with is in its result."""
    result, began = Result(check.name, check.looks_for), time.monotonic()
    try:
        if not setting.dry and torch.cuda.device_count() < check.gpus:
            raise NotPossibleError(f"{check.gpus} GPUs are needed; torch sees fewer")
        result.figures = check.run(setting)
    except NotPossibleError as error:
        result.status, result.reason = "not possible", str(error)
    except Exception as error:  # none keeps the others from running
        result.status, result.reason = "failed", f"{type(error).__name__}: {error}"
    result.seconds = round(time.monotonic() - began, 1)
    print(f"{result.status:13} {check.name:20} {result.seconds:6.1f} s  {result.reason[:2000]}")
    return result


def check_gpus(dry: bool = False, only: tuple[str, ...] = (), out: Path | None = None) -> int:
    """Make the checks, and write what they found.

    Args:
        dry: On the CPU, and small: do the checks themselves work?
        only: These checks alone.
        out: The file; by default gpu-check.json in a new folder of runs/.
    """
    if wrong := set(only) - {check.name for check in CHECKS}:
        known = ", ".join(check.name for check in CHECKS)
        raise UserError(f"--only {' '.join(wrong)}: there is no such check; take of {known}")
    setting = Setting(Path("runs").absolute() / f"gpu-check-{utc_stamp()}", dry)
    setting.folder.mkdir(parents=True)
    chosen = [check for check in CHECKS if not only or check.name in only]
    results = [carry_out(check, setting) for check in chosen]
    out = out or setting.folder / "gpu-check.json"
    found = {"created_utc": utc_now(), "dry": dry, "versions": versions()}
    write_json(out, found | {"checks": [asdict(result) for result in results]})
    print(f"send back: {out}")
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(run_tool("benchmarks/gpu_check.py", check_gpus, __doc__, None))
