"""Translate command lines that were written for other trainers into this project's flags.

The other trainers are pytorch/examples' imagenet/main.py, torchvision's references/classification/
train.py, Horovod's examples/pytorch/pytorch_imagenet_resnet50.py, and imagenet_ddp_apex.py of a
tutorial by K. Xu. Flags that are the same here are not listed.
"""

import difflib
import math
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from recipe.settings.flags import FLAG_NAMES, Config, given_flags

LAUNCHER = "the launcher sets it (docs/launching.md)"


class Advice(NamedTuple):
    """What replaces a flag of another trainer: `words` with placeholders, such as `{value}` for the
    flag's value (`_values` has all of them), and `why`, an explanation."""

    words: str = ""
    why: str = ""
    takes_value: bool = True


# Keys are flags, or a flag and its value where the value matters.
OTHERS_FLAGS = {
    "--amp": Advice("--precision fp16", "or bf16, which needs no loss scaling", takes_value=False),
    "--augmix-severity": Advice(why="torchvision's default is used"),
    "--b": Advice("--batch-size {value}"),
    "--backend": Advice(why="libjpeg-turbo always decodes, and transforms work on tensors"),
    "--cache-dataset": Advice(why="listings are always cached, in --cache-dir", takes_value=False),
    "--checkpoint-format": Advice(why="checkpoints are in the run folder, --log-dir/--name"),
    "--data-dir": Advice("--data {value}"),
    "--data-path": Advice("--data {value}"),
    "--device": Advice(why="GPUs are used if there are any"),
    "--device cpu": Advice("--no-cuda"),
    "--dist-backend": Advice("--transport {value}"),
    "--dist-url": Advice(why=LAUNCHER),
    "--dummy": Advice("--data synthetic", takes_value=False),
    "--gpu": Advice(why="each rank takes the GPU with its local rank"),
    "--local-rank": Advice(
        why="start with torchrun, not python -m torch.distributed.launch, which adds this flag"
    ),
    "--lr": Advice(
        "--base-lr {per_worker}",
        "the rate of one worker: --lr / {world_size} here, on 8 workers --base-lr {per_8} (if the "
        "script multiplied --lr by batch / 256, as Apex's examples do: --base-lr {per_256})",
    ),
    "--lr-step-size": Advice("--lr-step-epochs {multiples}"),
    "--lr-warmup-decay": Advice(why="--lr-warmup-method linear starts at 0.01 of the rate"),
    "--multiprocessing-distributed": Advice(
        why=f"{LAUNCHER}; -b and -j are per worker here: divide a node's numbers by its GPUs",
        takes_value=False,
    ),
    "--no-accel": Advice("--no-cuda", takes_value=False),
    "--opt": Advice("--optimizer {value}"),
    "--opt sgd_nesterov": Advice("--optimizer sgd --nesterov"),
    "--output-dir": Advice("--log-dir {value}"),
    "--print-freq": Advice("--log-interval {value}"),
    "-p": Advice("--log-interval {value}"),
    "--ra-magnitude": Advice(why="--auto-augment rand-m9 sets it, with timm's RandAugment"),
    "--ra-sampler": Advice(
        "{repeats}", "--augment-repeats or --ra-reps gives the repeats", takes_value=False
    ),
    "--rank": Advice(why=LAUNCHER),
    "--start-epoch": Advice(why="--resume goes on where the checkpoint was saved"),
    "--sync-bn": Advice("--batch-norm sync", takes_value=False),
    "--transformer-embedding-decay": Advice(why="embeddings decay by --wd"),
    "--use-deterministic-algorithms": Advice("--deterministic", takes_value=False),
    "--use-v2": Advice(why="torchvision's v2 transforms are always used", takes_value=False),
    "--world-size": Advice(why=LAUNCHER),
}
OTHERS_FLAGS["--learning-rate"] = OTHERS_FLAGS["--lr"]
APEX_RATE = Advice(
    "--base-lr {per_256}", "Apex's examples multiply --lr by batch / 256; this is one worker's rate"
)
UNKNOWN = Advice(why="there is no such flag; --help lists all")
DISTRIBUTED = {"--multiprocessing-distributed", "--world-size", "--local-rank", "--dist-url"}
# Flags whose numbers are for a whole node in pytorch/examples with --multiprocessing-distributed.
OF_A_NODE = {"-b", "--batch-size", "-j", "--workers"}
# difflib's ratio from which a flag is taken for a misspelling: --epoch of --epochs, but not --rank
# of --rollback.
NEARLY_CERTAIN = 0.85


def is_others(word: str) -> bool:
    """Return whether the word is a flag of another trainer, and not a misspelling."""
    return _flag(word) in OTHERS_FLAGS


def _flag(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def in_our_words(
    words: Sequence[str], unknown: Sequence[str], config: Config, world_size: int
) -> tuple[list[str], list[str]]:
    """Translate a command line: return its `words` with the `unknown` ones replaced, and a line of
    advice on each of these. `unknown` has the order of `words`; `config` has the settings that the
    other words give."""
    corrected, lines = list[str](), list[str]()
    left, unknown_left = list(words), list(unknown)
    while left:
        word = shown = left.pop(0)
        if not unknown_left or word != unknown_left[0]:
            corrected.append(word)
            continue
        del unknown_left[0]
        flag, equals, value = word.partition("=")
        flag = _flag(flag)
        if flag.startswith("-"):
            advice = OTHERS_FLAGS.get(flag) or _nearest(flag)
            if not equals and _is_value_next(advice, left, unknown_left):
                value = left.pop(0)
                del unknown_left[0]
                shown = f"{word} {value}"
            advice = OTHERS_FLAGS.get(f"{flag} {value}", advice)
            if flag == "--lr" and config.opt_level is not None:
                advice = APEX_RATE
        else:
            value, advice = word, _alone(word, corrected)
        values = _values(value, config, world_size)
        our_flag = advice.words.partition(" ")[0]
        if our_flag and our_flag in corrected:  # if a flag is given twice, the last one counts
            place = corrected.index(our_flag)
            del corrected[place : place + 1 + FLAG_NAMES[our_flag]]
        instead = advice.words.format(**values)
        corrected += shlex.split(instead)
        remedy = f"write {instead}" if instead else "leave it out"
        reason = f"; {advice.why.format(**values)}" if advice.why else ""
        lines.append(f"{shown}: {remedy}{reason}")
    return corrected, lines


def _is_value_next(advice: Advice, left: list[str], unknown_left: list[str]) -> bool:
    """Return whether the next word is the value of the unknown flag before it, on which there is
    this advice. After a flag of no trainer, a path or the last word is the folder of the images."""
    if not advice.takes_value or not left or left[:1] != unknown_left[:1]:
        return False
    is_folder = advice is UNKNOWN and (len(left) == 1 or "/" in left[0])
    return not is_folder and not left[0].startswith("--")


def with_open_numbers(line: Sequence[str], unknown: Sequence[str], world_size: int) -> list[str]:
    """Return the corrected line with /GPUS_OF_A_NODE or /WORKERS after each number that must be
    divided by them, since the line does not give them. It cannot run unchanged."""
    flags, filled = set(map(_flag, unknown)), list(line)
    for place, flag in enumerate(line[:-1], 1):
        if flag in OF_A_NODE and "--multiprocessing-distributed" in flags:
            filled[place] += "/GPUS_OF_A_NODE"
        if flag == "--base-lr" and "--lr" in flags and flags & DISTRIBUTED and world_size == 1:
            filled[place] += "/WORKERS"
    return filled


def _values(value: str, config: Config, world_size: int) -> dict[str, str]:
    """Return the values of all placeholders in OTHERS_FLAGS."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    steps = range(int(number), config.epochs, int(number)) if 1 <= number < math.inf else ()
    return {
        "value": shlex.quote(value),
        "per_worker": f"{number / world_size / config.batches_per_allreduce:.6g}",
        "per_256": f"{number * config.batch_size / 256:.6g}",
        "world_size": str(world_size),
        "per_8": f"{number / 8 / config.batches_per_allreduce:.6g}",
        "multiples": " ".join(map(str, steps)) or shlex.quote(value),
        "repeats": "--augment-repeats 3" if config.augment_repeats == 1 else "",
    }


def _nearest(flag: str) -> Advice:
    """Return the flag of this project that `flag` almost certainly misspells, else UNKNOWN."""
    for name in difflib.get_close_matches(flag, FLAG_NAMES, n=1, cutoff=NEARLY_CERTAIN):
        takes_value = FLAG_NAMES[name]
        return Advice(f"{name} {{value}}" if takes_value else name, takes_value=takes_value)
    return UNKNOWN


def _alone(word: str, before: list[str]) -> Advice:
    """Return advice on a word that belongs to no flag: a value after a switch, which takes none, or
    the folder of the images."""
    switch = before[-1] if before else ""
    if word.lower() in ("true", "false") and FLAG_NAMES.get(switch) is False:
        if word.lower() == "false":
            before[-1] = switch.replace("--", "--no-", 1)
        return Advice(why=f"{switch} takes no value, and --no-{switch[2:]} turns it off")
    has_folder = not {"data", "train_dir"}.isdisjoint(given_flags(before))
    return Advice("" if has_folder else "--data {value}", "it belongs to no flag")
