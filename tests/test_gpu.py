"""What fifteen minutes on a machine with one or two GPUs can show: `make gpu-check`, docs/gpu.md.

With --dry each test runs on the CPU, small. A skipped test names what it lacks. The report
(--junitxml) has figures and versions.
"""

import math
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import elastic
import needs
import pytest
import torch
from launching import (
    ROOT,
    TRAINERS,
    losses,
    read_json,
    resumed_at,
    run,
    wait_until,
    words_of,
)
from test_elastic import kill_ranks_of_torchrun, ranks_below

from benchmarks.programs.trainer import RANDOM_IMAGES
from compare.evidence.record import read_comparison
from compare.page.formats import turn_lines
from compare.page.report import Report
from compare.plan.configurations import CONFIGURATIONS
from compare.plan.plan import Plan, Run
from compare.running import checks
from compare.running.scheduler import Scheduler
from recipe.gpu_sharing import nccl_versions
from tools.make_jpegs import JPEGS, jpegs_folder

pytestmark = [pytest.mark.gpu, pytest.mark.launch, pytest.mark.full]
needs_horovod = pytest.mark.skipif(not checks.has_horovod(), reason=needs.HOROVOD)
Note = Callable[..., None]
WORK = "--arch resnet50 --channels-last --epochs 1000"
SMALL = (
    "--no-cuda --arch shufflenet_v2_x0_5 --train-crop-size 32 --val-crop-size 32 --batch-size 4 "
    "--threads 1 --no-channels-last"
)
# Prints a line a synchronising call: torch would else say each only once.
COUNTED = (
    "import runpy, sys, torch; torch.set_warn_always(True); "
    "torch.cuda.is_available() and torch.cuda.set_sync_debug_mode('warn'); "
    "sys.argv = sys.argv[1:]; sys.path.insert(0, ''); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
SYNCHRONISING = "called a synchronizing CUDA operation"


@pytest.fixture(scope="session")
def dry(request: pytest.FixtureRequest, record_testsuite_property: Any) -> bool:
    """Whether the CPU stands in for GPUs; where none does they are needed."""
    is_dry: bool = request.config.getoption("--dry")
    if not is_dry and not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch sees, or --dry")
    gpus = range(torch.cuda.device_count())
    versions = checks.versions() | {
        "dry": is_dry,
        "cuDNN": torch.backends.cudnn.version(),
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
        "capabilities": [torch.cuda.get_device_capability(gpu) for gpu in gpus],
        "architectures": torch.cuda.get_arch_list(),
    }
    for name, version in versions.items():
        record_testsuite_property(name, version)
    return is_dry


@pytest.fixture
def note(record_property: Any) -> Note:
    """note(name=figure): the report holds these figures."""

    def noted(**figures: Any) -> None:
        for name, figure in figures.items():
            record_property(name, figure)

    return noted


@pytest.fixture
def device_of(dry: bool) -> Callable[..., str]:
    """device_of(ranks): the flag with which so many ranks train here, sharing GPUs if they must."""

    def flag(ranks: int = 2) -> str:
        shared = "--share-gpu" if torch.cuda.device_count() < ranks else ""
        return "--no-cuda" if dry else shared

    return flag


class Trained(NamedTuple):
    """A training that has ended well."""

    folder: Path
    summary: dict[str, Any]
    output: str


@pytest.fixture
def train(dry: bool, tmp_path: Path) -> Callable[..., Trained]:
    """train(name, flags, *words before the trainer, engine=, data=, meanwhile=): train."""

    def trained(
        name: str,
        flags: str,
        *prefix: str,
        engine: str = "ddp",
        data: str = RANDOM_IMAGES,
        meanwhile: Callable[[Any], None] = lambda process: None,
    ) -> Trained:
        words = f"{WORK} {data} {flags} --keep-checkpoints 0 --log-dir {tmp_path} --name {name}"
        small = f"{SMALL} --max-steps 12" if dry else ""
        command = [sys.executable, *prefix, TRAINERS[engine], *words.split(), *small.split()]
        done = run(command, meanwhile=meanwhile).checked()
        return Trained(tmp_path / name, read_json(tmp_path / name / "summary.json"), done.output)

    return trained


def ask_nvidia_smi(field: str, *flags: str) -> list[str]:
    """What nvidia-smi says of each GPU."""
    words = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", *flags]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs nvidia-smi: {error}")


def test_facts(dry: bool, note: Note) -> None:
    """The doctor refuses neither torch, a GPU nor Horovod, and nvidia-smi sees these GPUs."""
    asked = ("torch", "GPUs", "Horovod")
    findings = [asdict(finding) for finding in checks.check_host() if finding.subject in asked]
    note(findings=findings)
    assert all(finding["status"] != "failed" for finding in findings)
    if not dry:
        note(driver=ask_nvidia_smi("driver_version"))
        names = {torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())}
        assert names <= {*ask_nvidia_smi("name")}


def test_synchronising_calls(train: Callable[..., Trained], dry: bool, note: Note) -> None:
    """Those of 20 steps: the difference of two runs that differ by so many. The list is for a
    person to judge; but the record alone waits for the GPU now and then."""
    few, many = (
        Counter(line for line in done.output.splitlines() if SYNCHRONISING in line)
        for steps in (10, 30)
        for done in [train(f"{steps}", f"--batch-size 32 --max-steps {steps}", *WARNING)]
    )
    note(calls_per_step=(many.total() - few.total()) / 20, where=many.most_common(20))
    assert dry or many, "torch names no call: did it look?"


WARNING = ("-W", "always", "-c", COUNTED)


@pytest.mark.parametrize(
    "flags", ["--precision bf16", "--precision fp16", "--precision bf16 --compile"]
)
@pytest.mark.parametrize(("batch", "steps"), [(32, 300), (256, 60)])
def test_speed(
    flags: str,
    batch: int,
    steps: int,
    train: Callable[..., Trained],
    dry: bool,
    note: Note,
) -> None:
    """Images/s by the wall clock and by the steps' own times, which in large batches may differ by
    2 %: in small ones what lies between the steps counts for more."""
    if dry and ("--compile" in flags or batch > 32):
        pytest.skip(
            "needs a GPU: in a dry run all batches are the same, and compiling takes minutes"
        )
    summary = train("run", f"{flags} --batch-size {batch} --max-steps {steps}").summary
    wall, own = summary["wall_images_per_second"], summary["images_per_second"]
    note(wall_images_per_second=wall, images_per_second=own)
    assert wall and own
    assert dry or batch == 32 or wall / own == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_determinism(precision: str, train: Callable[..., Trained]) -> None:
    """One worker of each engine, and DDP's again: all end with the same bits."""
    flags = f"--batch-size 32 --max-steps 6 --deterministic --precision {precision}"
    engines = ["ddp", "ddp", *["horovod"] * checks.has_horovod()]
    runs = [train(f"{number}", flags, engine=engine) for number, engine in enumerate(engines)]
    assert len({run.summary["weights_sha256"] for run in runs}) == 1


BITS = "--deterministic --max-steps 20"
OF_CPUS = "needs a GPU: for CPUs there is tests/test_same_training.py"


@needs_horovod
@pytest.mark.parametrize(
    ("flags", "launcher", "of_horovod"),
    [
        ("", "mpirun", ""),
        ("", "horovodrun --gloo", ""),
        ("", "mpirun", "--num-groups 2"),
        ("", "mpirun", "--gradient-predivide-factor 1"),
        ("--precision bf16 --channels-last", "mpirun", ""),
        ("--fp16-allreduce", "mpirun", ""),
    ],
)
def test_equal_weights(
    flags: str,
    launcher: str,
    of_horovod: str,
    dry: bool,
    device_of: Callable[..., str],
    trained: Callable[..., Path],
) -> None:
    """Two workers of each engine end with the same bits, and NCCL has carried the gradients."""
    if dry and (flags or launcher != "mpirun"):
        pytest.skip(OF_CPUS)
    words = f"{BITS} {flags} {device_of()}"
    folders = [
        trained("torchrun", "ddp", words),
        trained(launcher, "horovod", f"{words} {of_horovod}"),
    ]
    weights = [read_json(folder / "summary.json")["weights_sha256"] for folder in folders]
    assert weights[0] == weights[1]
    for folder in folders:
        environment = read_json(folder / "environment.json")
        assert dry or environment["transport"] == "NCCL"
        assert environment["ranks_per_gpu"] == (2 if "share" in device_of() else None)


@needs_horovod
@pytest.mark.parametrize(("workers", "norm"), [(2, "local"), (2, "sync"), (4, "local")])
def test_parity(
    workers: int, norm: str, dry: bool, device_of: Callable[..., str], tmp_path: Path
) -> None:
    """Both engines are equal within 1e-5 step by step, with each worker's own BatchNorm and with
    sync BatchNorm, and NCCL carries the gradients."""
    if dry and (workers, norm) == (2, "local"):
        pytest.skip(OF_CPUS)
    words = f"--workers {workers} --steps 3 --relative 1e-5 --out {tmp_path} -- --data digits "
    words += f"--threads 1 --batch-norm {norm} --deterministic {device_of(workers)}"
    run([sys.executable, "compare/parity.py", *words.split()]).checked()
    transports = {read_json(path)["transport"] for path in tmp_path.glob("**/summary.json")}
    assert transports and (dry or transports == {"NCCL"})


@needs_horovod
def test_adasum(dry: bool, device_of: Callable[..., str], trained: Callable[..., Path]) -> None:
    """It trains, and the ranks end with the same weights, or there would be no summary."""
    if dry:
        pytest.skip(OF_CPUS)
    folder = trained("mpirun", "horovod", f"--use-adasum --arch resnet18 {device_of()}")
    of_steps = losses(folder)
    assert fmean(of_steps[-5:]) < 0.7 * fmean(of_steps[:5])
    assert read_json(folder / "summary.json")["transport"] == "NCCL"


@pytest.mark.parametrize("way", ["sockets", "memory"])
def test_all_reduce(
    way: str, dry: bool, device_of: Callable[..., str], tmp_path: Path, note: Note
) -> None:
    """Sums are right, and NCCL names the transport that it takes, as in P2P/CUMEM: between GPUs its
    own choice; between ranks of one GPU sockets, and, since NCCL 2.30, the GPU's memory."""
    if way == "memory" and (device_of() != "--share-gpu" or min(nccl_versions()) < (2, 30)):
        pytest.skip("needs one GPU and NCCL 2.30, by which ranks share it")
    backends = ["torch.distributed", *["horovod-mpi"] * checks.has_horovod()]
    sizes = "4K 1M" if dry else "4K 16M 256M"
    words = f"--workers 2 --blocks 1 --model none --wires fp32 --out {tmp_path} {device_of()} "
    words += f"--json {tmp_path}/figures.json --sizes {sizes} --backends"
    ways = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if way == "memory" else {}
    command = [sys.executable, "compare/collectives.py", *words.split(), *backends]
    run(command, NCCL_DEBUG="INFO", **ways).checked()
    via = {
        log.parts[-3]: Counter(re.findall(r" via (\S+)", log.read_text(errors="replace")))
        for log in tmp_path.rglob("0/output.log")
    }
    note(measured=read_json(tmp_path / "figures.json"), nccl_via=via)
    assert via.keys() == {*backends} and (dry or all(via.values())), "NCCL names no transport"


def kill_of_torchrun(launcher: subprocess.Popen[bytes], folder: Path) -> None:
    kill_ranks_of_torchrun(1, folder)(launcher)


def kill_of_horovod(launcher: subprocess.Popen[bytes], folder: Path) -> None:
    wait_until(lambda: len(elastic.steps_in(folder)) > 3)
    ranks_below(launcher)[1].kill()


@needs_horovod
@pytest.mark.parametrize("kill", [kill_of_torchrun, kill_of_horovod])
def test_killed_rank(
    kill: Callable[..., None], dry: bool, device_of: Callable[..., str], tmp_path: Path, note: Note
) -> None:
    """kill -9 of a rank: all go on, on GPUs from a checkpoint, and end when they are asked to."""
    folder, flags = tmp_path / "run", f"--checkpoint-steps 2 --log-interval 1 {device_of()}"
    folder.mkdir()
    elastic.write_slots(folder, "localhost:2")
    words = elastic.command(folder, flags)
    if kill is kill_of_torchrun:
        own = words_of("torchrun --max-restarts", TRAINERS["ddp"])
        words = [*own, *words[words.index(TRAINERS["horovod"]) + 1 :]]

    def is_back() -> bool:
        resumes = resumed_at(folder)
        return bool(resumes) and elastic.steps_in(folder)[-1]["step"] > resumes[-1]

    def happen(launcher: subprocess.Popen[bytes]) -> None:
        kill(launcher, folder)
        killed = time.monotonic()
        wait_until(is_back)
        note(back_after_seconds=time.monotonic() - killed)
        (folder / "stop").touch()

    run(words, meanwhile=happen).checked()
    [resumed] = resumed_at(folder)
    note(resumed_at=resumed)
    assert dry or resumed % 2 == 0, "only CPUs keep the last step"


def test_stopped_neighbour(dry: bool, tmp_path: Path, note: Note) -> None:
    """A side's speed alone and beside one that is stopped, in turns of each kind: that costs less
    than 1 %, beyond the noise."""
    flags = f"{WORK} {RANDOM_IMAGES} --batch-size 64 --precision bf16 {SMALL if dry else ''}"
    side = Run(1, CONFIGURATIONS["ddp-torchrun"], 1, 1, flags=tuple(flags.split()))
    neighbour = replace(side, configuration=replace(side.configuration, name="neighbour"))
    turns = range(4 if dry else 12)
    with Scheduler(tmp_path / "stopped", Plan(steps=3 if dry else 40)) as scheduler:
        scheduler.start(side)
        alone = [scheduler.take_turn(side, n).images_per_second for n in turns]
        scheduler.start(neighbour)
        beside = [scheduler.take_turn(side, n).images_per_second for n in turns]
    ratio = fmean(beside) / fmean(alone)
    error = math.hypot(*(stdev(own) / fmean(own) / len(turns) ** 0.5 for own in (alone, beside)))
    note(ratio=ratio, error=error)
    assert dry or ratio + 2 * error > 0.99


@pytest.mark.parametrize(
    "configuration", ["ddp-torchrun", pytest.param("horovod-mpi", marks=needs_horovod)]
)
def test_long_stop(
    configuration: str,
    dry: bool,
    device_of: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    note: Note,
) -> None:
    """Two workers go on after a stop that is twice as long as torch's monitor of NCCL waits for a
    sign of life: 8 minutes by default, as long as a side's stop may last in a comparison."""
    patience = 2 if dry else 20  # seconds
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{patience}")
    flags = f"{WORK} {RANDOM_IMAGES} --batch-size 32 {SMALL if dry else ''} {device_of()}"
    side = Run(1, CONFIGURATIONS[configuration], 2, 1, flags=tuple(flags.split()))
    with Scheduler(tmp_path / "stopped", Plan(steps=3 if dry else 10)) as scheduler:
        scheduler.start(side)
        before = scheduler.take_turn(side, 0)
        time.sleep(2 * patience)
        after = scheduler.take_turn(side, 1)
    note(before=before.images_per_second, after=after.images_per_second)


@needs_horovod
def test_comparison(dry: bool, device_of: Callable[..., str], tmp_path: Path, note: Note) -> None:
    """The plan square-nccl with two workers: turns of four sides (in a dry run of two), whole
    trainings, a report. Both engines end with the same bits, with gradients of either width."""
    sides, of_cpus = "", ""
    if dry:
        sides = "--configurations ddp-mpirun horovod-mpirun"
        of_cpus = f"{SMALL} --precision fp32 --transport gloo --synthetic-images 80"
    flags = f"--arch resnet18 --batch-size 32 --synthetic-images 1280 --deterministic {device_of()}"
    words = f"square-nccl {sides} --workers 2 --blocks 1 --out {tmp_path} -- {flags} {of_cpus}"
    run([sys.executable, "compare/run.py", *words.split()], timeout=1200).checked()
    report = Report(read_comparison(tmp_path))
    note(headline=report.headline, turns=[*turn_lines(report.record)])
    equal = {(pair.first, pair.second): pair.equal_weights for pair in report.verdicts}
    assert equal["ddp-mpirun", "horovod-mpirun"] == (True,)
    assert dry or equal["ddp-fp16", "horovod-fp16"] == (True,)


def test_jpegs(train: Callable[..., Trained], note: Note) -> None:
    flags = "--batch-size 256 --precision bf16 --max-steps 40"
    done = train("run", flags, data=f"--data {jpegs_folder(ROOT / JPEGS)}").summary
    note(
        cores_used=done["cpu_seconds"] / done["train_seconds"],
        input=done["input"],
        images_per_second=done["images_per_second"],
    )


def test_profile(train: Callable[..., Trained], dry: bool, note: Note) -> None:
    """Five steps have kernels in it."""
    done = train("run", "--batch-size 256 --precision bf16 --profile-steps 5 --max-steps 20")
    events = read_json(done.folder / "profile/rank-0.json")["traceEvents"]
    microseconds = Counter[str]()
    for event in events:
        if event.get("cat") == ("cpu_op" if dry else "kernel"):
            microseconds[event["name"][:80]] += event["dur"]
    note(
        events=Counter(event.get("cat", "") for event in events),
        microseconds=microseconds.most_common(20),
    )
    assert microseconds


def test_energy(train: Callable[..., Trained], dry: bool, tmp_path: Path, note: Note) -> None:
    """NVML's counter against the power that nvidia-smi shows, within 15 %."""
    if dry:
        pytest.skip("needs a GPU: NVML's counter")
    watts = list[str]()
    gpu = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # nvidia-smi's own order is another

    run_folder = tmp_path / "run"
    begun, ended = run_folder / "metrics.jsonl", run_folder / "summary.json"

    def look(process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            if begun.exists() and not ended.exists():
                watts.extend(ask_nvidia_smi("power.draw", "--id", gpu))
            time.sleep(0.5)

    flags = "--batch-size 256 --precision bf16 --max-steps 300"
    energy = train("run", flags, meanwhile=look).summary["energy"]
    told = read_json(run_folder / "environment.json")
    assert told["gpu_clock_mhz"] and told["gpu_clock_limit_mhz"]
    note(energy=energy, nvidia_smi_watts=watts)
    shown = [float(text) for text in watts if text.replace(".", "").isdigit()]  # else "[N/A]"
    if energy["gpu_watts"] is None or not shown:
        pytest.skip(f"needs NVML's counter, and power in nvidia-smi: {energy}, {watts}")
    assert energy["gpu_watts"] / fmean(shown) == pytest.approx(1, abs=0.15)
