"""Records as a trainer writes them, made up; each field can be given."""

from typing import Any

from compare.plan.plan import Plan
from recipe.record.schema import Environment, Summary


def a_plan(**fields: Any) -> Plan:
    """Both engines at one and at two workers, in three blocks of whole runs."""
    values: dict[str, Any] = {"measure": "runs", "blocks": 3, "workers": (1, 2)}
    return Plan(**values | fields)


def an_environment(**fields: Any) -> Environment:
    """A trainer of two workers on one host."""
    values: dict[str, Any] = {
        "engine": "ddp", "version": "1", "launcher": "torchrun", "transport": "Gloo",
        "world_size": 2, "local_size": 2, "hosts": ["node"], "rank_hosts": ["node", "node"],
        "device": "cpu", "device_name": "", "cpu_model": "A Processor 9000", "cores": 2,
        "threads": 1, "affinity": ["0-1", "0-1"], "allocator": "C library",
        "python": "3.11.7", "torch": "2.14.1", "torchvision": "0.29.2", "horovod": None,
        "mpi": None, "cuda": None, "kernel": "6.1", "command": ["python", "train.py"],
        "started_utc": "2026-11-21T12:00:00Z", "git_commit": "abc123",
    }  # fmt: skip
    return Environment(**values | fields)


def a_summary(**fields: Any) -> Summary:
    """Six epochs on two workers, at 1000 images a second."""
    values: dict[str, Any] = {
        "engine": "ddp", "launcher": "torchrun", "transport": "Gloo", "world_size": 2, "threads": 1,
        "epochs": 6, "steps": 72, "samples_seen": 4608, "images_per_second": 1000.0,
        "train_seconds": 4.608, "total_seconds": 12.0, "cpu_seconds": 11.0,
        "cpu_seconds_per_image": 0.002, "peak_memory_bytes": 400_000_000, "loss": 0.1,
        "top1": 97.5, "top5": 99.9, "best_top1": 97.8, "weights_sha256": "a" * 64,
        "fingerprint": {}, "ended_utc": "2026-11-21T12:01:00Z",
    }  # fmt: skip
    return Summary(**values | fields)
