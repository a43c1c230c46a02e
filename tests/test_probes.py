"""Tensors of the first steps, and the profile."""

import json
from pathlib import Path

import numpy as np
import torch
from making import TinyNet, a_config, a_world

from recipe.record.probes import StepProfiler, write_trace
from recipe.training.phases import WARM_UP_STEPS


def test_a_trace_holds_what_the_step_computed(tmp_path: Path) -> None:
    model = TinyNet()
    loss = model(torch.rand(2, 3, 8, 8)).square().mean()
    loss.backward()
    for step in (7, 8):
        write_trace(a_config(tensor_steps=7), a_world(1, 2), tmp_path, step, model, loss)
    (path,) = tmp_path.rglob("*.*")
    assert path == tmp_path / "trace/rank-1/step-000007.npz"
    arrays = np.load(path)
    names = [name for name, _ in model.named_parameters()]
    assert set(arrays) == {
        "loss",
        *(f"{kind}/{name}" for kind in ("gradient", "weight") for name in names),
        *(f"buffer/norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
    }
    assert arrays["loss"] == loss.item()
    assert np.array_equal(arrays["gradient/head.weight"], model.head.weight.grad.numpy())
    assert np.array_equal(arrays["weight/head.weight"], model.head.weight.detach().numpy())


def profiled(tmp_path: Path, steps: int, ended: int) -> tuple[StepProfiler, list[str]]:
    calls: list[str] = []
    model = TinyNet()
    begin, end = lambda path: calls.append(Path(path).name), lambda: calls.append("end")
    config, timeline = a_config(profile_steps=steps), ("engine", begin, end)
    profiler = StepProfiler(config, a_world(), tmp_path, 0, model, timeline)
    for step in range(1, ended + 1):
        for _ in range(2):  # passes of accumulation
            model(torch.rand(2, 3, 8, 8)).square().mean().backward()
        profiler.end_step(step)
    return profiler, calls


def test_a_profile_covers_the_steps_after_the_first_few(tmp_path: Path) -> None:
    profiler, calls = profiled(tmp_path, 2, WARM_UP_STEPS + 5)
    profiler.close(calls.append)
    assert calls == ["engine-timeline.json", "end"]
    trace = json.loads((tmp_path / "profile/rank-0.json").read_text())
    marks = {e["name"] for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep")}
    assert len(marks) == 2
    times = json.loads((tmp_path / "profile/gradients-rank-0.json").read_text())
    assert times["elements"] == {n: p.numel() for n, p in TinyNet().named_parameters()}
    assert len(times["steps"]) == 2
    for step in times["steps"]:
        assert step["ready"].keys() == times["elements"].keys()
        assert all(step["backward"] <= ready <= step["end"] for ready in step["ready"].values())


def test_a_profile_that_the_end_cuts_short_is_said(tmp_path: Path) -> None:
    profiler, calls = profiled(tmp_path, 9, WARM_UP_STEPS + 2)
    profiler.close(calls.append)
    assert calls[-2] == "end"
    assert "the profile is shorter" in calls[-1]
    assert (tmp_path / "profile/rank-0.json").exists()
    profiler, calls = profiled(tmp_path / "none", 9, 2)
    profiler.close(calls.append)
    assert len(calls) == 1 and "no profile" in calls[0]
    StepProfiler(a_config(), a_world(), tmp_path, 0, TinyNet(), ("", print, print)).close(
        calls.append
    )
    assert len(calls) == 1
