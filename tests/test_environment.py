"""What a run ran on, and the fingerprint that two runs must share to be compared."""

import json
import math
import os
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from making import CPU, TinyNet, a_config, a_world, folder_config, write_images, write_program
from records import an_environment

from recipe.data.batches import open_data
from recipe.data.loading import InputMeter
from recipe.errors import UserError
from recipe.record import fingerprint as environment
from recipe.record.energy import EnergyMeter, EnergyUse
from recipe.record.fingerprint import (
    describe,
    fingerprint,
    first_line_of,
    git_commit,
    weights_sha256,
)
from recipe.record.meter import PhaseSums, Usage, straggler, summarize
from recipe.record.schema import Energy, RankUsage
from recipe.settings.config import Config
from recipe.settings.flags import FLAGS, RunFlags
from recipe.training.model import build_model

CONFIG = a_config(
    data="synthetic",
    synthetic_images=40,
    arch="squeezenet1_1",
    train_crop_size=32,
    val_crop_size=32,
    val_resize_size=32,
)


def print_of(config: Config = CONFIG, size: int = 2, rank: int = 0, threads: int = 1) -> dict:
    """The fingerprint that a trainer would make."""
    data = open_data(config)
    model = build_model(config, 10, download=True)
    world = a_world(rank, size)
    scale = config.batches_per_allreduce * size
    return fingerprint(config, world, data, model, CPU, threads, scale)


def test_equal_for_both_engines_and_all_ranks() -> None:
    """It is made from nothing that an engine could change."""
    first = print_of()
    assert print_of(rank=1) == first
    words = set(re.findall("[a-z]+", json.dumps(first).lower()))  # it goes into summary.json
    assert not words & {"horovod", "ddp", "engine", "gloo", "mpi"}


@pytest.mark.parametrize(
    ("changes", "others", "differs"),
    [
        ({"seed": 1}, {}, {"data_order_sha256", "initial_weights_sha256", "seed"}),
        ({"base_lr": 0.5}, {}, {"learning_rates_sha256", "base_lr"}),
        ({"warmup_epochs": 0.0}, {}, {"learning_rates_sha256", "warmup_epochs"}),
        ({"epochs": 9}, {}, {"learning_rates_sha256", "epochs"}),
        ({"batch_size": 5}, {}, {"batch_size"}),
        ({"arch": "squeezenet1_0"}, {}, {"arch", "initial_weights_sha256"}),
        ({"synthetic_images": 41}, {}, {"data_order_sha256", "num_images", "num_val_images"}),
        ({}, {"size": 4, "threads": 2}, {"world_size", "learning_rates_sha256", "threads"}),
    ],
)
def test_differs_where_the_work_differs(
    changes: dict[str, Any], others: dict[str, int], differs: set[str]
) -> None:
    first, second = print_of(), print_of(replace(CONFIG, **changes), **others)
    found = {key for key in first if first[key] != second[key]}
    assert found == differs | (set(changes) & first.keys())


def test_every_setting_of_the_work_is_in_it() -> None:
    """Whether a flag counts as work follows from its scope."""
    own_entries = {"max_steps", "threads"}
    work = {name for name, flag in FLAGS.items() if flag.scope in ("work", "measurement")}
    assert print_of().keys() & FLAGS.keys() == work | own_entries
    assert not {item.name for item in fields(RunFlags)} & work


def test_places_make_no_difference(tmp_path: Path) -> None:
    for name in ("here", "there"):
        write_images(tmp_path / name / "train", 2)
        write_images(tmp_path / name / "val", 1)

    def print_at(name: str) -> dict[str, Any]:
        root = tmp_path / name
        own = vars(folder_config(root))
        places = {key: own[key] for key in ("data", "train_dir", "val_dir", "cache_dir")}
        return print_of(replace(CONFIG, log_dir=name, name=name, weights=f"{name}.pth", **places))

    first = print_at("here")
    assert print_at("there") == first
    (tmp_path / "there/train/a/0.png").rename(tmp_path / "there/train/a/9.png")
    assert print_at("there")["data_order_sha256"] != first["data_order_sha256"]


def test_weights_sha256() -> None:
    torch.manual_seed(0)
    model = TinyNet()
    first, parameters = weights_sha256(model), weights_sha256(model, buffers=False)
    assert re.fullmatch(r"[0-9a-f]{64}", first)
    assert weights_sha256(model.to(memory_format=torch.channels_last)) == first
    model.norm.running_mean += 1
    assert weights_sha256(model) != first
    assert weights_sha256(model, buffers=False) == parameters
    bits = model.head.bias.detach().view(torch.int32)
    for shift in (0, 9, 22, 30):  # one bit of one weight is enough
        bits[1] ^= 1 << shift
        assert weights_sha256(model, buffers=False) != parameters
        bits[1] ^= 1 << shift
    assert weights_sha256(model.bfloat16(), buffers=False) != parameters


# What `summarize` and `usage_row` ask a StepMeter for.
METER: Any = SimpleNamespace(
    cpu_seconds_before=0.0,
    wall_images_per_second=3.5,
    network_bytes=5e6,
    total_seconds=60.0,
    made=SimpleNamespace(steps=10, images=200, total_seconds=50.0),
    phases=PhaseSums(),
    train_input=InputMeter(),
    val_input=InputMeter(),
    energy=EnergyMeter([CPU], local_rank=1),
    replaced={3: "empty"},
    progress=SimpleNamespace(step=25, samples_seen=300, best_top1=40.0, skipped_steps=3),
    data=SimpleNamespace(num_train=150, train=None),
    config=a_config(),
)
RAN_ON = an_environment(rank_hosts=["here", "there"])
NO_ENERGY = EnergyUse(math.nan, math.nan, math.nan, math.nan)
FIGURES = {"loss": 0.5, "top1": 50.0, "top5": 90.0}


def a_usage(rank: int, cpu_seconds: float, memory: int, **others: Any) -> Usage:
    """Of a rank that waited 1 s in steps of 15 s, with 40 files of 1 MB, 2 of them suspect."""
    record = RankUsage(
        rank=rank,
        host=("here", "there")[rank],
        cpu_seconds=cpu_seconds,
        peak_memory_bytes=memory,
        steps=10,
        step_seconds=15.0,
        data_seconds=1.0,
    )
    return replace(Usage(record, NO_ENERGY, "digest", 40, 40_000_000, 2, 5e6), **others)


def summary_of(*used: Usage, figures: dict[str, float] = FIGURES) -> dict[str, Any]:
    return asdict(summarize(RAN_ON, {"seed": 42}, METER, figures, used, TinyNet()))


def test_summary() -> None:
    used = [a_usage(0, 10.0, 1000), a_usage(1, 30.0, 3000)]
    summary = summary_of(*used)
    expected = {
        "engine": "ddp",
        "launcher": "torchrun",
        "world_size": 2,
        "epochs": 2.0,
        "steps": 25,
        "samples_seen": 300,
        "wall_images_per_second": 3.5,
        "skipped_steps": 3,
        "gradient_bytes": 4 * sum(weight.numel() for weight in TinyNet().parameters()),
        "network_bytes_per_step": 2 * 5e6 / 10,
        "cpu_seconds": 40,
        "cpu_seconds_per_image": 40 / 200,  # of this session's images
        "peak_memory_bytes": 3000,  # the hungriest rank's
        "top1": 50.0,
        "best_top1": 50.0,
        "ranks": [asdict(usage.rank) for usage in used],
        "input": {
            "images_per_second": 200 / 50,
            "files_per_second": 80 / 50,
            "megabytes_per_second": 80 / 50,
            "wait_share": 1 / 15,
        },
        "energy": asdict(Energy()),
        "suspect_images": {"count": 4, "names": []},
        "replaced_images": 1,
    }
    assert summary.items() >= expected.items()
    assert json.loads(json.dumps(summary)) == summary
    assert summary_of(*used, figures={**FIGURES, "top1": 30.0})["best_top1"] == 40.0
    not_evaluated = summary_of(*used, figures={})
    assert {not_evaluated[name] for name in ("loss", "top1", "top5", "best_top1")} == {None}
    silent = a_usage(0, 10.0, 1000, network_bytes=math.nan)  # a host that does not say
    assert summary_of(silent, used[1])["network_bytes_per_step"] is None


def test_ranks_that_drifted_apart() -> None:
    told = "different weights: digest on rank 0 .here., other on rank 1 .there."
    with pytest.raises(UserError, match=told):
        summary_of(a_usage(0, 10.0, 1000), a_usage(1, 30.0, 3000, weights_sha256="other"))


def test_describe_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 580.65.06\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(environment, "cpu_quota_cores", lambda: math.inf)
    monkeypatch.setattr(environment, "gpu_clocks_mhz", lambda device: (1200.0, 1980.0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    device = torch.device("cuda", 0)
    places = [("here", [0, 1]), ("there", [3])]
    monkeypatch.setattr(environment, "nccl_versions", lambda: [(2, 27, 3), (2, 30, 1)])
    for transport, nccl in (("NCCL", "2.27.3 and 2.30.1"), ("Gloo", None)):
        found = describe(a_world(0, 2), "ddp", transport, device, 1, places, ranks_per_gpu=2)
        assert (found.nccl, found.driver, found.cpu_quota_cores) == (nccl, "580.65.06", None)
        assert (found.gpu_clock_mhz, found.gpu_clock_limit_mhz) == (1200, 1980)
        assert found.ranks_per_gpu == 2
    assert (found.rank_hosts, found.affinity) == (["here", "there"], ["0-1", "3"])
    assert found.allocator in ("C library", *environment.ALLOCATORS) and found.cpu_model
    assert json.loads(json.dumps(asdict(found))) == asdict(found)


def test_variables_that_steer_an_engine() -> None:
    steering = {
        "HOROVOD_CYCLE_TIME",
        "NCCL_DEBUG",
        "GLOO_SOCKET_IFNAME",
        "UCX_TLS",
        "MKL_CBWR",
        "LD_LIBRARY_PATH",
        "ATEN_CPU_CAPABILITY",
        "THP_MEM_ALLOC_ENABLE",
    }
    # Launchers set these, to other values in each run.
    others = {"HOROVOD_RANK", "NCCL_SOCKET_IFNAME", "OMPI_COMM_WORLD_RANK", "MASTER_PORT"}
    environ = dict.fromkeys(steering | others, "7")
    assert environment.steering_variables(environ).keys() == steering


def test_programs_that_tell_their_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git_commit()
    assert commit is None or re.fullmatch(r"[\w.-]{7,}\+?", commit)
    with monkeypatch.context() as hook:  # of another repository
        hook.setenv("GIT_DIR", str(tmp_path))
        assert git_commit() == commit
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None and first_line_of("mpirun", "--version") is None
    write_program(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 4.1.8'\necho more\n")
    assert first_line_of("mpirun", "--version") == "mpirun (Open MPI) 4.1.8"


@pytest.mark.parametrize(
    ("seconds", "named"),
    [([1.0, 1.9, 1.1, 1.0], None), ([1.0, 2.1], 1), ([1.0, 1.0, 3.0, 1.0], 2), ([0.0], None)],
)
def test_a_rank_that_the_others_waited_for_is_named(
    seconds: list[float], named: int | None
) -> None:
    """By the phases in which no rank waits for another: data, forward and optimizer."""
    ranks = [
        replace(
            a_usage(0, 1, 1).rank,
            rank=rank,
            host=f"host{rank}",
            data_seconds=own / 2,
            forward_seconds=own / 4,
            backward_seconds=10 - own,
            optimizer_seconds=own / 4,
            step_seconds=10.0,
        )
        for rank, own in enumerate(seconds)
    ]
    line = straggler(ranks)
    assert line == "" if named is None else f"waited for rank {named} on host{named}:" in line
