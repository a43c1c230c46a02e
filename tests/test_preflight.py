"""What is said before a comparison starts: each warning appears when it should, and only then."""

import subprocess
import sys
from collections import namedtuple

import psutil
import pytest

from compare.plan.environment import REMOVED_VARIABLES
from compare.plan.options import make_plan, parse_options
from compare.plan.plan import Plan
from compare.running import preflight


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch):
    """Four cores, an idle moment, no GPU, a plain shell."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(preflight, "busy_cores", lambda seconds: (0.0, []))
    monkeypatch.setattr(preflight, "visible_gpus", lambda: 0)
    monkeypatch.setattr(preflight, "clock_warnings", lambda folder: [])
    for name in REMOVED_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def plan_of(*words: str) -> Plan:
    return make_plan(parse_options(list(words), ""))


def only(warnings: list[str]) -> str:
    assert len(warnings) == 1, warnings
    return warnings[0]


def test_a_plain_machine_gives_no_warning(tmp_path):
    assert preflight.find_warnings(plan_of(), tmp_path / "not/there/yet") == []


def test_other_load_is_told_with_the_busiest_processes(tmp_path, monkeypatch):
    load = (1.5, ["cc1plus (process 7, 1.3 cores)"])
    monkeypatch.setattr(preflight, "busy_cores", lambda seconds: load)
    warning = only(preflight.find_warnings(plan_of(), tmp_path))
    assert "1.5 of this machine's 4 cores" in warning and "cc1plus (process 7" in warning
    monkeypatch.setattr(preflight, "busy_cores", lambda seconds: (0.1, []))
    assert preflight.find_warnings(plan_of(), tmp_path) == []


def test_a_busy_loop_is_found(monkeypatch):
    monkeypatch.undo()
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        cores, busiest = preflight.busy_cores(seconds=1.0)
        assert cores > 0.2
        # Others may be busier; so look at all.
        monkeypatch.setattr(preflight, "BUSIEST_SHOWN", 1000)
        cores, busiest = preflight.busy_cores(seconds=1.0)
        assert any(f"process {loop.pid}," in text for text in busiest)
    finally:
        loop.kill()
        loop.wait()


def test_more_workers_than_cores(tmp_path):
    warning = only(preflight.find_warnings(plan_of("--workers", "1", "6"), tmp_path))
    assert "6 on this machine" in warning and "--workers up to 4" in warning


def test_more_threads_than_cores(tmp_path):
    plan = plan_of("--workers", "1", "2", "--", "--threads", "3")
    warning = only(preflight.find_warnings(plan, tmp_path))
    assert "2 workers of 3 threads on 4 cores" in warning and "--threads 2" in warning
    plan = plan_of("--workers", "1", "--", "--threads", "3")
    assert preflight.find_warnings(plan, tmp_path) == []


def test_workers_on_other_hosts_do_not_count_here(tmp_path):
    words = ("--configurations", "ddp-mpirun", "--workers", "16", "--", "--threads", "4")
    assert preflight.find_warnings(plan_of("--hosts", "a:8,b:8", *words), tmp_path) == []
    plan = plan_of("--hosts", "localhost:8,b:8", *words)
    assert "8 on this machine" in only(preflight.find_warnings(plan, tmp_path))


def test_unequal_threads_by_flags(tmp_path):
    plan = plan_of("--define", "more=horovod-mpi --threads 1")
    warning = only(preflight.find_warnings(plan, tmp_path))
    assert "unequal threads" in warning and "more 1" in warning and "horovod-mpi 2" in warning


def test_unequal_threads_by_variables(tmp_path):
    plan = plan_of("--define", "more=horovod-mpi OMP_NUM_THREADS=2")
    warning = only(preflight.find_warnings(plan, tmp_path))
    assert "unequal threads: OMP_NUM_THREADS" in warning and "more 2" in warning


def test_a_threads_variable_of_the_shell_that_reaches_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    warning = only(preflight.find_warnings(plan_of(), tmp_path))
    assert "OMP_NUM_THREADS=8" in warning and "has 2 thread(s)" in warning
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # what every worker has anyway
    assert preflight.find_warnings(plan_of(), tmp_path) == []


REPORT = """Available Tensor Operations:
    [{}] NCCL
    [ ] DDL
    [X] MPI
"""


@pytest.mark.parametrize("mark", ["X", " "])
def test_a_horovod_without_nccl_on_a_machine_with_gpus(tmp_path, monkeypatch, mark):
    asked = []

    def answer(command, seconds):
        asked.append(command[1:])
        return REPORT.format(mark)

    monkeypatch.setattr(preflight, "command_output", answer)
    monkeypatch.setattr(preflight.shutil, "which", lambda tool, path=None: f"/bin/{tool}")
    monkeypatch.setattr(preflight, "visible_gpus", lambda: 4)
    warnings = preflight.find_warnings(plan_of(), tmp_path)
    assert asked == [["--check-build"]]
    if mark == "X":
        assert warnings == []
    else:
        assert "without NCCL" in only(warnings) and "build_horovod.py --nccl" in only(warnings)
    asked.clear()
    assert preflight.find_warnings(plan_of("--", "--no-cuda"), tmp_path) == []
    assert preflight.find_warnings(plan_of("--configurations", "ddp-torchrun"), tmp_path) == []
    assert asked == []  # seconds that are not spent where nothing can be wrong


def test_more_workers_than_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "visible_gpus", lambda: 1)
    plan = plan_of("--configurations", "ddp-torchrun", "--workers", "2")
    assert "1 visible GPU" in only(preflight.find_warnings(plan, tmp_path))


def test_gpus_are_counted_as_a_trainer_sees_them(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(preflight.shutil, "which", lambda tool: f"/bin/{tool}")
    listed = "GPU 0: A (UUID: GPU-1)\nGPU 1: A (UUID: GPU-2)\n"
    monkeypatch.setattr(preflight, "command_output", lambda command, seconds: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert preflight.visible_gpus() == 2
    for value, number in (("", 0), ("-1", 0), ("1", 1), ("0,1", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert preflight.visible_gpus() == number


def test_little_disk_and_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(
        preflight.shutil, "disk_usage", lambda path: namedtuple("U", "free")(10_000_000)
    )
    assert "little disk: 0.0 GiB" in only(preflight.find_warnings(plan_of(), tmp_path / "new"))
    monkeypatch.undo()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: namedtuple("M", "available")(900_000_000))
    warning = only(preflight.room_warnings(plan_of("--workers", "2"), tmp_path))
    assert "little memory: 0.8 GiB are available to 4 workers" in warning  # of two sides
    one_by_one = plan_of("--measure", "runs", "--workers", "1")
    assert preflight.room_warnings(one_by_one, tmp_path) == []


def test_a_clock_that_follows_the_load(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    assert preflight.clock_warnings(tmp_path) == []  # nothing that could be read
    for cpu, governor in ((0, "performance"), (1, "performance")):
        folder = tmp_path / f"cpu{cpu}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{governor}\n")
    assert preflight.clock_warnings(tmp_path) == []
    (tmp_path / "cpu1/cpufreq/scaling_governor").write_text("powersave\n")
    assert "governor performance, powersave" in only(preflight.clock_warnings(tmp_path))


def test_a_machine_on_its_battery(tmp_path, monkeypatch):
    monkeypatch.undo()
    battery = namedtuple("B", "power_plugged")
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery(False), raising=False)
    assert "battery" in only(preflight.clock_warnings(tmp_path))
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery(True), raising=False)
    assert preflight.clock_warnings(tmp_path) == []
