"""Memory does not grow with the steps: a process holds as much after 3,000 as after 300."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import ROOT, TRAINERS

from compare.running.launch import Launches, last_step

FLAGS = (
    "--data synthetic --synthetic-images 1000000 --epochs 1000 --keep-checkpoints 0 --no-cuda "
    "--arch squeezenet1_1 --train-crop-size 32 --val-crop-size 32 --batch-size 1 --threads 1 "
    "--log-interval 10 --name run"
)
READINGS = 15  # after each of the two steps
POLL_SECONDS = 0.2


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    """Of a process and all that it has started."""
    tree = [root := psutil.Process(process.pid), *root.children(recursive=True)]
    return sum(process.memory_info().rss for process in tree)


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "horovod"])
def test_memory_after_many_steps_is_that_after_few(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    command = [sys.executable, TRAINERS[engine], *FLAGS.split(), "--log-dir", str(tmp_path)]
    early, late = list[int](), list[int]()
    with Launches() as launches:
        process = launches.launch(command, tmp_path, {})
        while len(late) < READINGS:
            assert process.poll() is None, (tmp_path / "output.log").read_text()
            step = last_step(tmp_path / "run/metrics.jsonl")["step"]
            if step >= 300 and len(early) < READINGS:
                early.append(resident_bytes(process))
            elif step >= 3000:
                late.append(resident_bytes(process))
            time.sleep(POLL_SECONDS)
    assert statistics.median(late) < 1.01 * statistics.median(early)
