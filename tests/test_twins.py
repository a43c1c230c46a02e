"""Guards the lesson: the two train.py differ only where the engines do, each time for a reason.

Their `main` is one long function on purpose: read from top to bottom, it is the lesson.
"""

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOROVOD = (ROOT / "horovod_train" / "train.py").read_text().splitlines()
DDP = (ROOT / "ddp_train" / "train.py").read_text().splitlines()
MAX_CHANGED_LINES = 80
MAX_LINES = 185

# A reason for each line that differs, and the words by which such lines are known.
REASONS = {
    "what the file is": ('"""Train ImageNet with', "torchrun --nproc", "horovodrun -np"),
    "imports": ("import ",),
    "name of the engine": ("ENGINE =",),
    "start of the engine": (
        "prepare(config, world)",
        "hvd.init()",
        "transport =",
        "backend =",
        "dist.init_process_group(",
    ),
    "sums over ranks": (
        "hvd.allreduce(",
        "total = values.clone()",
        "dist.all_reduce(",
        "return total",
    ),
    "rank 0's values": ("hvd.broadcast(", "dist.broadcast(", "return values"),
    "SyncBatchNorm": ("SyncBatchNorm",),
    "Adasum's learning rate": ("if config.use_adasum:  # it accounts", "lr_scale ="),
    "Horovod's optimizer": (
        "predivide",
        "hvd.broadcast_parameters(",
        "hvd.DistributedOptimizer(",
        "build_optimizer(model, config),",
        "named_parameters=",
        "COMPRESSION",
        "backward_passes_per_step=",
        "hvd.Adasum",
        "groups=",
        "return model, waiting_asleep(",
    ),
    "DDP's network": (
        "if world.size == 1:",
        "return model, build_optimizer(",
        "DistributedDataParallel(",
        "    model,",
        "device_ids=",
        "bucket_sizes(",
        "gradient_as_bucket_view=",
        "static_graph=",
        "broadcast_buffers",
        "BatchNorm's statistics",
        "bucket_hook(",
        "register_comm_hook(",
        "return network,",
    ),
    "the engine's timeline": ("timeline =",),
    "steps without an exchange of gradients": (
        "passes = ",
        "set_backward_passes_per_step(passes)",
    ),
    "accumulation": (
        "range(",
        "# Gradients add up",
        "is_last =",
        "syncs =",
        "with autocast(",
    ),
    "order of the scaler's step": (
        "if config.use_adasum:",
        "optimizer.step()",
        "if exchange:",
        "optimizer.synchronize()",
        'meter.lap("backward")',
        "elif exchange:",
        "skip_synchronize",
        "scaler.step(optimizer)",
    ),
    "teardown": ("hvd.shutdown()", "dist.destroy_process_group()"),
}


def changed_lines() -> list[str]:
    """The lines of `diff horovod_train/train.py ddp_train/train.py`."""
    matcher = difflib.SequenceMatcher(None, HOROVOD, DDP, autojunk=False)
    return [
        line
        for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        if tag != "equal"
        for line in HOROVOD[i1:i2] + DDP[j1:j2]
    ]


def test_every_changed_line_has_its_reason() -> None:
    words = [word for words in REASONS.values() for word in words]
    unexplained = [
        line
        for line in changed_lines()
        if line.strip(" )") and not any(word in line for word in words)
    ]
    assert not unexplained, "differences that no reason allows:\n" + "\n".join(unexplained)


def test_no_reason_is_left_over() -> None:
    changed = changed_lines()
    assert [
        word
        for words in REASONS.values()
        for word in words
        if not any(word in line for line in changed)
    ] == []


def test_twins_are_short_and_changed_lines_are_few() -> None:
    assert len(HOROVOD) <= MAX_LINES and len(DDP) <= MAX_LINES, (len(HOROVOD), len(DDP))
    assert len(changed_lines()) <= MAX_CHANGED_LINES, f"{len(changed_lines())} changed lines"


def engines_in(lines: list[str]) -> set[str]:
    """The engines whose calls stand in these lines of code."""
    code = "\n".join(line.split("#")[0] for line in lines)
    return set(re.findall(r"\b(hvd|dist)\.\w", code))


def test_engine_calls_are_in_sight_and_nowhere_else() -> None:
    assert engines_in(["x = dist.get_rank()", "y  # hvd.init()"]) == {"dist"}
    assert engines_in(HOROVOD) == {"hvd"}
    assert engines_in(DDP) == {"dist"}
    assert not any("torch.distributed" in line or "torch.nn.parallel" in line for line in HOROVOD)
    assert not any("horovod.torch" in line or "horovod_train.engine" in line for line in DDP)
