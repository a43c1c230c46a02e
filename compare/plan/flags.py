"""Words of the trainers' command lines."""

from collections.abc import Sequence
from itertools import zip_longest

# Second names of the trainers' flags (recipe/config.py).
FLAG_ALIASES = {
    "-a": "--arch", "--model": "--arch", "-b": "--batch-size", "-j": "--workers",
    "-e": "--evaluate", "--test-only": "--evaluate", "--weight-decay": "--wd",
    "--opt-level": "--precision", "--lr-warmup-epochs": "--warmup-epochs",
    "--lr-warmup-method": "--warmup-method",
}  # fmt: skip


def flag_name(word: str) -> str:
    """Return a word's flag by its first name, without a value; "" if the word is no flag."""
    name = word.split("=")[0].replace("_", "-")
    name = FLAG_ALIASES.get(name, name)
    return name if name.startswith("--") else ""


def last_value(words: Sequence[str], flag: str) -> str | None:
    """Return the value that a trainer would take for a flag: the last one given."""
    value = None
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if flag_name(word) == flag:
            value = word.partition("=")[2] if "=" in word else following
    return value


def without_flag(words: Sequence[str], flag: str) -> list[str]:
    """Return the words without a flag that takes one value."""
    kept, skip = list[str](), False
    for word in words:
        if skip:
            skip = False
        elif flag_name(word) == flag:
            skip = "=" not in word
        else:
            kept.append(word)
    return kept
