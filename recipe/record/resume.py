"""Resuming from a checkpoint: finds it, sends it to all ranks, checks it, and restores it."""

import errno
import io
import math
import shutil
import zipfile
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import convert

from recipe.data.batches import Data
from recipe.errors import UserError, first_line
from recipe.marks import marks
from recipe.ranks import Ranks
from recipe.record.checkpoint import (
    FORMAT,
    NETWORK,
    NORMALISATION,
    checkpoints_in,
    load_state,
    mark_best,
    momentum,
    not_finite,
    other_classes,
    read_file,
    setting_in,
    step_in_name,
    step_path,
)
from recipe.record.folder import new_folder, one_sentence, records
from recipe.record.formats import format_of
from recipe.record.kept_state import KeptState
from recipe.settings.config import Config
from recipe.settings.flags import FLAGS, names_of, spelled, written
from recipe.training.state import Progress, Trainables, round_weights
from recipe.watch import expect_delay
from recipe.world import World

KEPT = "the state kept in memory"  # how messages call it
PIECE_BYTES = 2**28  # sent at once: MPI cannot count more than 2 GiB


def resume(
    parts: Trainables,
    config: Config,
    ranks: Ranks,
    data: Data,
    run_folder: Path,
    kept_state: KeptState | None = None,
) -> tuple[Progress, bool]:
    """Resume from the checkpoint that --resume means, on all ranks alike, and return its progress;
    that of a fresh start if there is none. A later state that a rank has kept when another rank was
    lost takes precedence: return, too, whether there was one. Rank 0 then prepares the folder for
    what will be written."""
    progress, world, is_kept = Progress(), ranks.world, False
    path: Path | None = None
    if config.resume is not None:
        try:
            path, holder, is_kept = _newest_state(config, ranks, run_folder, kept_state)
            name = KEPT if is_kept else str(path or config.resume)
            contents = load_on_all_ranks(path, ranks, holder, name)
        except OSError as error:
            raise UserError(
                f"--resume {config.resume}: {error.filename or path or run_folder} cannot be read "
                f"({error.strerror}); nothing was changed, start again when it can be read"
            ) from error
        if contents is not None:
            progress = restore(contents, parts, config, world, data, name)
            if kept_state and is_kept:
                kept_state.take_statistics(progress.step)
            changed = changed_settings(contents, config, world)
            if changed and world.is_first:
                print(f"warning: {name} was trained with other settings: {changed}", flush=True)
    if world.is_first:
        take_over(run_folder, config, progress)
    return progress, is_kept


def _newest_state(
    config: Config, ranks: Ranks, run_folder: Path, kept_state: KeptState | None
) -> tuple[Path | None, int, bool]:
    """Return the file to resume from, on the rank that has it, and None on the others; that rank;
    and whether it holds a state that was kept when another rank was lost."""
    path = find_checkpoint(config, run_folder) if ranks.world.is_first else None
    if not marks.is_watched:
        return path, 0, False
    steps = [int(kept_state.step) if kept_state else 0, step_in_name(path) if path else 0]
    kept, saved = ranks.rows(torch.tensor(steps)).T.tolist()
    if max(kept) <= max(saved):
        return path, 0, False
    holder = kept.index(max(kept))
    path = kept_state.state if kept_state and holder == ranks.world.rank else None
    return path, holder, True


def repair_best(config: Config, run_folder: Path, progress: Progress) -> tuple[float, bool]:
    """Return what the folder's record says of the checkpoint from which a run resumes: its top-1 in
    percent, -1 without one, and whether it ends an epoch whose evaluation was interrupted. Call
    this on rank 0.

    A checkpoint is written first, then evaluated, then marked as the best. This makes up for what a
    run that was interrupted in between has left out. Puts the top-1 of best.pt into `progress`.
    """
    if progress.step == 0 or config.evaluate:
        return -1.0, False
    best, evaluations = run_folder / "checkpoints" / "best.pt", records(run_folder, "eval")
    top1 = {line.step: line.top1 for line in sorted(evaluations, key=lambda line: line.top1)}
    progress.best_top1 = top1[int(_step_of(best))] if best.exists() else -1.0
    of_step = [line for line in evaluations if line.step == progress.step]
    for line in of_step:
        progress.total_seconds = max(progress.total_seconds, line.train_seconds_so_far)
    if of_step and progress.take_best(top1[progress.step]):
        mark_best(step_path(best.parent, progress.step))
    ends_epoch = any(line.step == progress.step for line in records(run_folder, "epoch"))
    return top1.get(progress.step, -1.0), ends_epoch and len(of_step) < 1 + config.model_ema


def steps_left_out(run_folder: Path) -> list[tuple[int, int]]:
    """Return, from the folder's record, the steps whose images are left out since they made the
    loss infinite or NaN: where each begins, and its number of images."""
    left_out = [event.left_out for event in records(run_folder, "event")]
    return max(left_out, key=len, default=[])


def has_kept(run_folder: Path) -> bool:
    """Return whether the folder's record shows that a checkpoint was on disk. A run waits until its
    checkpoint is written before it stops, and before it saves the next evaluation's checkpoint."""
    ends = [event for event in records(run_folder, "event") if event.name in ("stop", "end")]
    steps = {line.step for line in records(run_folder, "eval")}
    return any(event.step for event in ends) or len(steps - {0}) > 1


def go_back(
    parts: Trainables,
    config: Config,
    ranks: Ranks,
    data: Data,
    run_folder: Path,
    diverged_at: int,
) -> Progress:
    """Restore, on all ranks alike, the newest checkpoint that was followed by a finite loss, after
    that of step `diverged_at` was not. Set later ones aside. UserError if there is none."""
    path, world = None, ranks.world
    if world.is_first:
        files = reversed(checkpoints_in(run_folder / "checkpoints"))
        path = next((file for file in files if step_in_name(file) < diverged_at - 1), None)
        if path is None:
            raise UserError(
                f"the loss of step {diverged_at} is not finite, and no checkpoint from before it "
                "is left (--rollback); lower --base-lr, or set --clip-grad-norm"
            )
    contents = load_on_all_ranks(path, ranks)
    progress = restore(contents, parts, config, world, data, str(path))
    if world.is_first:
        with one_sentence(run_folder):
            set_aside(run_folder, progress.step)
        repair_best(config, run_folder, progress)
    return progress


def take_over(run_folder: Path, config: Config, progress: Progress) -> None:
    """Prepare rank 0's folder for a run from `progress` on; UserError if it holds another run."""
    metrics, checkpoints = run_folder / "metrics.jsonl", run_folder / "checkpoints"
    if config.evaluate and metrics.exists():
        return  # the record of the training that is evaluated stays as it is
    goes_on_here = config.resume == "auto" or (
        config.resume is not None
        and Path(config.resume).resolve().is_relative_to(run_folder.resolve())
    )
    with one_sentence(run_folder):
        if (metrics.exists() or checkpoints_in(checkpoints)) and not goes_on_here:
            raise UserError(
                f"{run_folder}: already holds a run; choose another --name, or resume it with "
                "--resume auto"
            )
        if not config.evaluate:
            set_aside(run_folder, progress.step)


def set_aside(run_folder: Path, step: int) -> None:
    """Before a run resumes from `step`, move the files that an earlier start left of later steps,
    and a copy of its metrics, into a separate folder. So this run neither takes them for its own
    nor deletes them.

    A run that was lost before its first checkpoint (step 0) leaves only metrics.
    """
    folder = run_folder / "checkpoints"
    later = [file for file in checkpoints_in(folder) if file > step_path(folder, step)]
    best = folder / "best.pt"
    # A best.pt without a known evaluation has no top-1 to compare others with.
    evaluated = {line.step for line in records(run_folder, "eval") if line.step <= step}
    moves_best = best.exists() and _step_of(best) not in evaluated
    metrics = run_folder / "metrics.jsonl"
    if later or moves_best or (step == 0 and metrics.exists()):
        aside = new_folder(folder / datetime.now().strftime("set-aside-%Y%m%d-%H%M%S"))
        if metrics.exists():
            shutil.copyfile(metrics, aside / metrics.name)
        for file in [*later, best] if moves_best else later:
            file.rename(aside / file.name)
        print(f"warning: files of an earlier start, of steps after {step}, were moved to {aside}")


def _step_of(path: Path) -> float:
    """Return a checkpoint's step, without reading most of the file; infinity if it is damaged."""
    try:
        with path.open("rb") as file:  # torch refuses a path with bytes that are not UTF-8
            place = f"/proc/self/fd/{file.fileno()}"
            return float(torch.load(place, mmap=True, weights_only=True)["progress"]["step"])
    except OSError:
        raise
    except Exception:  # torch raises several kinds
        return math.inf


def find_checkpoint(config: Config, run_folder: Path) -> Path | None:
    """Return the file that --resume means, or None for a fresh start (`auto`, and no run yet).

    `auto` skips damaged files, with a warning, and takes the newest intact one. A file that cannot
    be read does not count as damaged: OSError. UserError if no file is intact, since a fresh start
    would destroy the run.
    """
    if config.resume is not None and config.resume != "auto":
        path = Path(config.resume)
        if path.is_dir():
            raise UserError(
                f"--resume {path}: is a folder; give a file, such as "
                "RUN/checkpoints/step-000000500.pt, or to resume that run its --log-dir and --name "
                "with --resume auto"
            )
        if not _is_whole(path):
            with path.open("rb") as content:
                problem = format_of(content)
            problem = problem or "is damaged, or is not a checkpoint of this project"
            raise UserError(f"--resume {path}: {problem}")
        return path
    folder = run_folder / "checkpoints"
    best, files = folder / "best.pt", checkpoints_in(folder)
    diverged = {event.step for event in records(run_folder, "event") if event.name == "diverged"}
    for path in reversed(files):
        if not _is_whole(path):
            print(f"warning: {path} is damaged; trying the one before it")
        elif path != files[0] and diverged & {step_in_name(path), step_in_name(path) + 1}:
            print(f"warning: {path}: a loss after it was not finite; trying the one before it")
        else:
            return path
    # A run that was lost before its first checkpoint, as a preempted job may be, starts afresh; its
    # metrics are set aside.
    if files or best.exists() or (config.keep_checkpoints and has_kept(run_folder)):
        instead = "restore one from a backup"
        if best.exists() and _is_whole(best):
            instead = f"resume from the best with --resume {best}"
        raise UserError(
            f"--resume auto: {run_folder} holds a run, but no intact checkpoint of a step; "
            f"{instead}, or start a new run under another --name"
        )
    return None


def _is_whole(path: Path) -> bool:
    """Return whether every checksum in the archive that torch.save wrote is right. OSError if it
    cannot be read, which is no damage."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except MemoryError:
        raise
    except Exception as error:  # damage can look like encryption, an unknown method, ...
        # ... and a wrong length lets the reader seek to before the file's start (EINVAL).
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            error.filename = error.filename or str(path)
            raise
        return False


def load_on_all_ranks(
    path: Path | None, ranks: Ranks, holder: int = 0, name: str = ""
) -> dict[str, Any] | None:
    """Return, on every rank, the contents of the file at the `path` that the rank `holder` gives,
    whether or not other ranks can read it. The other ranks give no `path`. None if `holder` gives
    none. Messages call the file `name`, by default its path.

    Only bytes travel, in pieces, of which a rank holds at most one beside the file. Each rank reads
    the file with weights_only=True: nothing from the network is ever unpickled freely.
    """
    send = ranks.sum if holder else ranks.from_first  # the other ranks add zeros
    size = path.stat().st_size if path is not None else 0
    size = int(send(torch.tensor([size], dtype=torch.int64)))
    if size == 0:
        return None
    content = io.BytesIO()
    with path.open("rb") if path is not None else nullcontext() as file:
        while (left := size - content.tell()) > 0:
            num_bytes = min(left, PIECE_BYTES)
            piece = np.zeros(math.ceil(num_bytes / 8), dtype=np.int64)  # Horovod cannot sum bytes
            target = piece.view(np.uint8)[:num_bytes]
            if file is not None and file.readinto(target.data) < num_bytes:
                raise UserError(f"{name or path}: was cut short while it was read; start again")
            expect_delay()  # before each piece: rank 0's disk may be slow
            content.write(send(torch.from_numpy(piece)).numpy().view(np.uint8)[:num_bytes].data)
    content.seek(0)
    return read_file(content, name or str(path))


def restore(
    checkpoint: Any, parts: Trainables, config: Config, world: World, data: Data, name: str
) -> Progress:
    """Put a checkpoint's contents into `parts`, and return its progress. Its keys have no prefixes
    of wrappers, so they fit either engine. UserError if it does not fit this run, or holds what no
    training writes."""
    try:
        if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
            raise UserError(
                f"--resume {name}: is not a checkpoint of this project; to start from its weights "
                "use --weights"
            )
        for misfit, words in _misfits(checkpoint, config, world, data):
            if misfit:
                raise UserError(f"--resume {name}: {words}")
        if bad := not_finite(checkpoint):
            raise UserError(
                f"--resume {name}: {bad} is not finite, since the training that wrote it had "
                "diverged; resume from an earlier file with --resume FILE"
            )
        load_state(parts.model, checkpoint["model"], f"--resume {name}")
        if parts.ema is not None:
            load_state(parts.ema, checkpoint["ema"], f"--resume {name}")
        if not config.evaluate:
            _load_optimizer(parts.optimizer, checkpoint, world)
        if checkpoint["scaler"] and parts.scaler.is_enabled():
            if not 0 < checkpoint["scaler"]["scale"] < math.inf:
                raise ValueError("the loss scale is not above 0")
            parts.scaler.load_state_dict(checkpoint["scaler"])
        round_weights(parts.fp16_model, parts.model)
        progress = _progress_in(checkpoint)
        parts.scaler.skipped_steps = progress.skipped_steps
        return progress
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"--resume {name}: holds values that this project does not write "
            f"({type(error).__name__}: {first_line(error)}); resume from another checkpoint"
        ) from None


def _progress_in(checkpoint: dict[str, Any]) -> Progress:
    """Return a checkpoint's progress; ValueError if no training can have made it."""
    progress = convert(checkpoint["progress"], Progress)
    if not (
        0 <= progress.skipped_steps <= progress.step <= progress.samples_seen
        and -1 <= progress.best_top1 <= 100
        and 0 <= progress.total_seconds < math.inf
    ):
        raise ValueError(f"no training makes {progress}")
    return progress


# Settings that a run must share with the run from which it resumes. (The weights do not show
# whether a network uses --blur-pool, nor how its images were normalised.)
SAME_WEIGHTS = ("arch", *NETWORK, *NORMALISATION)
SAME_TRAINING = ("optimizer", "seed", "model_ema", "augment_repeats")


def _misfits(
    checkpoint: dict[str, Any], config: Config, world: World, data: Data
) -> list[tuple[Any, str]]:
    """Return reasons why this run may be unable to resume from the checkpoint: whether each
    applies, and its message, with what to do instead. The first that applies is shown."""
    saved = checkpoint["config"]
    names = [*SAME_WEIGHTS, *(SAME_TRAINING if not config.evaluate else ())]
    if config.model_ema:  # an evaluation needs it, too
        names.append("model_ema")
    pairs = {name: (setting_in(saved, name), getattr(config, name)) for name in names}
    misfits: list[tuple[Any, str]] = [
        (
            then != now,
            f"was trained with {spelled(name)} {written(then)}, but this run has {written(now)}; "
            "give the same value, or start from the weights alone with --weights",
        )
        for name, (then, now) in pairs.items()
    ]
    problem = other_classes(checkpoint.get("classes"), data)
    if problem and not (
        config.allow_changed_data and len(checkpoint["classes"]) == len(data.classes)
    ):
        misfits.append(
            (
                True,
                f"{problem}, or add --allow-changed-data if only the names are others, or train a "
                "new last layer with --weights FILE --new-head",
            )
        )
    if config.evaluate:
        return misfits
    return [
        *misfits,
        *_misfits_of_data(checkpoint, config, data),
        *_misfits_of_momenta(checkpoint, config, world),
    ]


def _misfits_of_data(
    checkpoint: dict[str, Any], config: Config, data: Data
) -> list[tuple[Any, str]]:
    saved, reached = checkpoint["config"], checkpoint["progress"]
    is_past = reached["step"] > (config.max_steps or math.inf) or (
        saved.get("epochs", 0) > config.epochs
        and reached["samples_seen"] > config.epochs * data.num_train
    )
    images = checkpoint.get("data") or data.identity  # older checkpoints lack it
    order = data.identity["order_sha256"]
    known = {name: value for name, value in data.identity.items() if name in images}
    # Contents are known only for shards and images in memory.
    is_changed = known != {name: images[name] for name in known} or "sha256" not in images
    then, now = (
        f"{identity['num_train']:,} training and {identity['num_val']:,} validation images"
        for identity in (images, data.identity)
    )
    return [
        (
            is_past,
            f"is of step {reached['step']}, past the end that --epochs {config.epochs} or "
            "--max-steps sets: nothing is left to train; raise that, or add --evaluate",
        ),
        (
            images.get("order_sha256", order) != order and not config.allow_changed_data,
            f"was trained on images in the order of numpy {checkpoint.get('numpy')}, but numpy "
            f"{np.__version__} here gives another order; install the former, or add "
            "--allow-changed-data",
        ),
        (
            is_changed and not config.allow_changed_data,
            f"was trained on {then}, but this run has {now}, or as many with other names, classes "
            "or contents; restore the old data, or add --allow-changed-data",
        ),
    ]


def _misfits_of_momenta(
    checkpoint: dict[str, Any], config: Config, world: World
) -> list[tuple[Any, str]]:
    saved, momenta = checkpoint["config"], checkpoint.get("momenta")
    return [
        (
            momenta and not (config.use_adasum and len(momenta) == world.size),
            f"holds the momentum of each of {len(momenta or ())} workers under --use-adasum; "
            "resume with as many workers and that flag, or start from its weights with --weights",
        ),
        (
            saved.get("use_adasum") and world.size > 1 and config.momentum and not momenta,
            "was trained with --use-adasum but holds only one worker's momentum, from which other "
            "workers cannot resume exactly; start from its weights with --weights",
        ),
    ]


def changed_settings(checkpoint: dict[str, Any], config: Config, world: World) -> str:
    """Return, in words, the settings in which this run differs from the checkpoint's."""
    names = [name for name in names_of("work") if FLAGS[name].per_rank == "equal"]
    now = {"workers": world.size, **{spelled(name): getattr(config, name) for name in names}}
    saved = checkpoint["config"]
    then = {"workers": checkpoint.get("world_size", world.size)}
    then |= {spelled(name): saved[name] for name in names if name in saved}
    return ", ".join(
        f"{name} {now[name]} (was {value})" for name, value in then.items() if now[name] != value
    )


def _load_optimizer(
    optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any], world: World
) -> None:
    """Restore the optimizer's state; --momentum, --wd and the like stay as this run's flags and its
    config.json say."""
    state = checkpoint["optimizer"]
    both = zip(optimizer.param_groups, state["param_groups"], strict=True)
    # Set before it is loaded: whether groups are fused decides where torch puts Adam's step counts.
    # LAMB keeps its own step count in the group.
    groups = [
        own | {key: saved[key] for key in saved.keys() & {"params", "step"}} for own, saved in both
    ]
    optimizer.load_state_dict(state | {"param_groups": groups})
    for weight, values in optimizer.state.items():
        for key, value in values.items():
            if value is not None and key != "step" and value.shape != weight.shape:
                raise ValueError(f"{key} has another shape")
    if checkpoint.get("momenta"):  # each rank's, as `_momentum_of_each` has gathered them
        buffers = momentum(optimizer)
        parts = checkpoint["momenta"][world.rank].split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))
