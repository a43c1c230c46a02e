"""Guards the lesson: the two train.py differ only where the engines do, each time for a reason."""

import difflib
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOROVOD = (ROOT / "horovod_train" / "train.py").read_text().splitlines()
DDP = (ROOT / "ddp_train" / "train.py").read_text().splitlines()
MAX_CHANGED_LINES = 115
MAX_LINES = 220

# A reason for each hunk, and a word that a hunk of this kind holds.
REASONS = {
    "what the file is": (
        '"""Train ImageNet with',
        "torchrun --nproc-per-node 8",
        "horovodrun -np 8",
        "Its twin is",
    ),
    "imports": ("import ",),
    "name of the engine": ('"ddp"', '"horovod"'),
    "init, and the refusal of lone copies": ("hvd.init()", "dist.init_process_group"),
    "sums over ranks": ("hvd.allreduce(", "dist.all_reduce("),
    "rank 0's values": ("hvd.broadcast(", "dist.broadcast("),
    "SyncBatchNorm": ("SyncBatchNorm",),
    "Adasum's learning rate": ("Adasum", "use_adasum", "linear scaling rule"),
    "wrap, broadcast and compression": (
        "hvd.DistributedOptimizer(",
        "DistributedDataParallel(",
        "register_comm_hook",
    ),
    "accumulation": ("no_sync", "counts backward passes", "batch_number"),
    "steps without an exchange of gradients": ("exchange", "set_backward_passes_per_step"),
    "order of Horovod's sums": ("HOROVOD_FUSION_THRESHOLD",),
    "Horovod's own timeline": ("HOROVOD_TIMELINE", "start_timeline"),
    "scaler step order": ("optimizer.synchronize()", "scaler.unscale_", "skip_synchronize"),
    "teardown": ("hvd.shutdown()", "dist.destroy_process_group()"),
}


def hunks() -> list[str]:
    """The changed lines of each hunk of `diff horovod_train/train.py ddp_train/train.py`."""
    matcher = difflib.SequenceMatcher(None, HOROVOD, DDP, autojunk=False)
    return [
        "\n".join(HOROVOD[i1:i2] + DDP[j1:j2])
        for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        if tag != "equal"
    ]


def test_every_hunk_has_its_reason() -> None:
    unexplained = [
        hunk
        for hunk in hunks()
        if hunk.strip() and not any(word in hunk for words in REASONS.values() for word in words)
    ]
    assert not unexplained, "a difference that no reason allows:\n\n" + "\n---\n".join(unexplained)


def test_no_reason_is_left_over() -> None:
    joined = "\n".join(hunks())
    assert [
        name for name, words in REASONS.items() if not any(word in joined for word in words)
    ] == []


def test_changed_lines_are_few() -> None:
    changed = sum(len(hunk.splitlines()) for hunk in hunks())
    assert changed <= MAX_CHANGED_LINES, f"{changed} changed lines"


def test_each_twin_is_short() -> None:
    assert len(HOROVOD) <= MAX_LINES, len(HOROVOD)
    assert len(DDP) <= MAX_LINES, len(DDP)


def test_engine_calls_are_in_sight_and_nowhere_else() -> None:
    assert any("hvd." in line for line in HOROVOD)
    assert not any("hvd." in line or "horovod.torch" in line for line in DDP)
    assert not any(
        "dist." in line.split("#")[0].split() or "torch.distributed" in line for line in HOROVOD
    )
