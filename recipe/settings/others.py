"""Command lines as they are written for other trainers: what each of their flags is called here,
and the whole line in this project's words.

The trainers are pytorch/examples' imagenet/main.py, torchvision's references/classification/
train.py, Horovod's examples/pytorch/pytorch_imagenet_resnet50.py, and imagenet_ddp_apex.py of a
tutorial by K. Xu. Flags that they and these trainers share are not listed.
"""

import difflib
import math
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from recipe.settings.flags import FLAG_NAMES, Config

LAUNCHER = "the launcher says it (docs/launching.md)"


class Other(NamedTuple):
    """What stands here for a flag of another trainer: the words, in which `{value}` is its value
    (see `_values` for others), and what else to know of it."""

    words: str = ""
    why: str = ""
    takes_value: bool = True


# By flag, or by flag and value where the value matters.
OTHERS_FLAGS = {
    "--amp": Other("--precision fp16", "or bf16, which needs no loss scaling", takes_value=False),
    "--augmix-severity": Other(why="it is torchvision's default"),
    "--b": Other("--batch-size {value}"),
    "--backend": Other(why="libjpeg-turbo decodes, and tensors are transformed"),
    "--cache-dataset": Other(why="listings are always kept, in --cache-dir", takes_value=False),
    "--checkpoint-format": Other(why="checkpoints are in the run folder, --log-dir/--name"),
    "--data-dir": Other("--data {value}"),
    "--data-path": Other("--data {value}"),
    "--device": Other(why="GPUs are used where there are any"),
    "--device cpu": Other("--no-cuda"),
    "--dist-backend": Other("--transport {value}"),
    "--dist-url": Other(why=LAUNCHER),
    "--dummy": Other("--data synthetic", takes_value=False),
    "--gpu": Other(why="each rank takes the GPU of its place on the host"),
    "--local-rank": Other(
        why="torchrun, in place of python -m torch.distributed.launch, adds none"
    ),
    "--lr": Other(
        "--base-lr {per_worker}",
        "it is one worker's: --lr / {world_size} here, on 8 workers --base-lr {per_8} (if the "
        "script multiplied --lr by batch / 256, as Apex's examples do: --base-lr {per_256})",
    ),
    "--lr-step-size": Other("--lr-step-epochs {multiples}"),
    "--lr-warmup-decay": Other(why="--lr-warmup-method linear begins at 0.01 of the rate"),
    "--multiprocessing-distributed": Other(
        why=f"{LAUNCHER}; -b and -j are one worker's here: divide those of a node by its GPUs",
        takes_value=False,
    ),
    "--no-accel": Other("--no-cuda", takes_value=False),
    "--opt": Other("--optimizer {value}"),
    "--opt sgd_nesterov": Other("--optimizer sgd --nesterov"),
    "--output-dir": Other("--log-dir {value}"),
    "--print-freq": Other("--log-interval {value}"),
    "-p": Other("--log-interval {value}"),
    "--ra-magnitude": Other(why="--auto-augment rand-m9 sets it, with timm's RandAugment"),
    "--ra-sampler": Other(
        "{repeats}", "--augment-repeats, or --ra-reps, is its number", takes_value=False
    ),
    "--rank": Other(why=LAUNCHER),
    "--start-epoch": Other(why="--resume goes on where its checkpoint was kept"),
    "--sync-bn": Other("--batch-norm sync", takes_value=False),
    "--transformer-embedding-decay": Other(why="embeddings decay by --wd"),
    "--use-deterministic-algorithms": Other("--deterministic", takes_value=False),
    "--use-v2": Other(why="the transforms are torchvision's second ones", takes_value=False),
    "--world-size": Other(why=LAUNCHER),
}
OTHERS_FLAGS["--learning-rate"] = OTHERS_FLAGS["--lr"]
APEX_RATE = Other(
    "--base-lr {per_256}", "Apex's examples multiply --lr by batch / 256; here it is one worker's"
)
UNKNOWN = Other(why="there is no such flag; --help lists all")
DISTRIBUTED = {"--multiprocessing-distributed", "--world-size", "--local-rank", "--dist-url"}
OF_A_NODE = {"-b", "--batch-size", "-j", "--workers"}  # in pytorch/examples with the first of these
NEARLY_CERTAIN = 0.85  # difflib's ratio: so are --epoch and --epochs, not --rank and --rollback


def is_others(word: str) -> bool:
    """Whether the word is a flag of another trainer, and not a misspelling."""
    return _flag(word) in OTHERS_FLAGS


def _flag(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def in_our_words(
    words: Sequence[str], unknown: Sequence[str], config: Config, world_size: int
) -> tuple[list[str], list[str]]:
    """The command line with what stands here for its `unknown` words, in their order, and a line on
    each of these. `config` has what the other words say."""
    corrected, told = list[str](), list[str]()
    left, strange = list(words), list(unknown)
    while left:
        word = left.pop(0)
        if [word] != strange[:1]:
            corrected.append(word)
            continue
        name, equals, value = strange.pop(0).partition("=")
        flag = _flag(name)
        other = OTHERS_FLAGS.get(flag) or _nearest(flag)
        # What follows a flag that is not known may be its value, or the folder of the images.
        is_open = other is UNKNOWN and left and (len(left) == 1 or "/" in left[0])
        if not flag.startswith("-"):
            value, other = word, _alone(word, corrected)
        elif other.takes_value and not equals and not is_open and left[:1] == strange[:1] != []:
            value = "" if left[0].startswith("--") else left.pop(0)
            del strange[: bool(value)]
        other = OTHERS_FLAGS.get(f"{flag} {value}", other)
        if flag == "--lr" and "--opt-level" in words:
            other = APEX_RATE
        values = _values(value, config, world_size)
        replaced = other.words.partition(" ")[0]
        if replaced and replaced in corrected:  # of a flag given twice the last one counts
            place = corrected.index(replaced)
            del corrected[place : place + 1 + FLAG_NAMES[replaced]]
        instead = other.words.format(**values)
        corrected += shlex.split(instead)
        advice = f"write {instead}" if instead else "leave it out"
        reason = f"; {other.why.format(**values)}" if other.why else ""
        shown = word if equals or word == value else f"{word} {value}".strip()
        told.append(f"{shown}: {advice}{reason}")
    return corrected, told


def with_open_numbers(line: Sequence[str], unknown: Sequence[str], world_size: int) -> list[str]:
    """The corrected line, in which numbers of a whole job are to be divided by what it does not
    say: nothing to be run as it is."""
    flags, filled = set(map(_flag, unknown)), list(line)
    for place, flag in enumerate(line[:-1], 1):
        if flag in OF_A_NODE and "--multiprocessing-distributed" in flags:
            filled[place] += "/GPUS_OF_A_NODE"
        if flag == "--base-lr" and "--lr" in flags and flags & DISTRIBUTED and world_size == 1:
            filled[place] += "/WORKERS"
    return filled


def _values(value: str, config: Config, world_size: int) -> dict[str, str]:
    """What the words of OTHERS_FLAGS may name."""
    number = float(value) if value.replace(".", "", 1).isdecimal() else math.nan
    steps = range(int(number), config.epochs, int(number)) if number >= 1 else ()
    return {
        "value": shlex.quote(value),
        "per_worker": f"{number / world_size / config.batches_per_allreduce:.6g}",
        "per_256": f"{number * config.batch_size / 256:.6g}",
        "world_size": str(world_size),
        "per_8": f"{number / 8 / config.batches_per_allreduce:.6g}",
        "multiples": " ".join(map(str, steps)) or shlex.quote(value),
        "repeats": "--augment-repeats 3" if config.augment_repeats == 1 else "",
    }


def _nearest(flag: str) -> Other:
    """A flag of this project's that nearly certainly is meant."""
    for name in difflib.get_close_matches(flag, FLAG_NAMES, n=1, cutoff=NEARLY_CERTAIN):
        takes_value = FLAG_NAMES[name]
        return Other(f"{name} {{value}}" if takes_value else name, takes_value=takes_value)
    return UNKNOWN


def _alone(word: str, before: list[str]) -> Other:
    """A word that belongs to no flag: a value of a switch, which takes none, or the images."""
    switch = before[-1] if before else ""
    if word.lower() in ("true", "false") and FLAG_NAMES.get(switch) is False:
        if word.lower() == "false":
            before[-1] = switch.replace("--", "--no-", 1)
        return Other(why=f"{switch} takes no value, and --no-{switch[2:]} turns it off")
    is_folder = not {"--data", "--train-dir"} & set(before)
    return Other("--data {value}" if is_folder else "", "it belongs to no flag")
