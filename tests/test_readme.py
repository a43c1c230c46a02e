"""README and docs promise only what is there: commands, flags, files."""

import contextlib
import functools
import importlib
import io
import operator
import re
import runpy
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from making import a_world
from needs import tracked_files
from torch.distributed.run import get_args_parser

from compare import run
from recipe.settings.config import Config, parse_args
from recipe.settings.presets import PRESETS, preset

ROOT = Path(__file__).parent.parent
NAMES = ["README.md", "CONTRIBUTING.md", "hostfiles/README.md", "slurm/README.md"]
NAMES += [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
PAGES = {name: (ROOT / name).read_text() for name in NAMES}
README = PAGES["README.md"]
TRAINER = "ddp_train/train.py"


def test_the_diff_of_the_twins_is_the_real_one() -> None:
    block = re.search(r"```diff\n(.*?)```", README, re.DOTALL)
    sources = {
        "-": (ROOT / "horovod_train" / "train.py").read_text().splitlines(),
        "+": (ROOT / "ddp_train" / "train.py").read_text().splitlines(),
    }
    other = {"-": "+", "+": "-"}
    lines = [line for line in block[1].splitlines() if line]
    assert len(lines) > 8
    for line in lines:
        sign, text = line[0], line[1:]
        assert text in sources[sign], f"not in that train.py: {line}"
        assert text not in sources[other[sign]], f"in both: {line}"


def test_every_make_target_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page, text in PAGES.items():
        named = re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
        assert set(named) <= set(targets), page


def anchors(path: Path) -> list[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings]


def test_every_named_file_exists() -> None:
    for page, text in PAGES.items():
        for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?", text):
            path = (ROOT / page).parent.joinpath(link) if link else ROOT / page
            assert "://" in link or path.exists(), (page, link)
            assert not anchor or anchor in anchors(path), (page, link, anchor)
        for name in re.findall(r"(?<!\S)`?((?:[a-z0-9]\w*/)+\w+\.(?:py|sbatch))\b", text):
            assert name.startswith("deploy/") or (ROOT / name).exists(), (page, name)
    tree = re.search(r"## Where things are\n\n```\n(.*?)```", PAGES["CONTRIBUTING.md"], re.DOTALL)
    folder = ""
    for line in tree[1].splitlines():
        if match := re.match(r"(\w+)/", line):
            folder = match[1]
            assert (ROOT / folder).is_dir(), folder
        for name in re.findall(r"\b(\w+\.py)\b", line):
            assert (ROOT / folder / name).exists(), f"{folder}/{name}"


def test_what_contributing_names_in_a_file_is_there() -> None:
    """As in "`NAME` in `file.py`", and in "`file.py`: a row in `NAME`"."""
    text, named = PAGES["CONTRIBUTING.md"], r"((?:`[\w.]+`(?:, and |, | and )?)+)"
    of_files = [
        (names, file)
        for names, file in re.findall(rf"{named}\s+in\s+`([\w/]+\.(?:py|toml))`", text)
    ] + [
        (names, file)
        for file, names in re.findall(rf"`([\w/]+\.py)`:[^`;\n]*?\b(?:in|of)\s+{named}", text)
    ]
    assert len(of_files) > 40
    for names, file in of_files:
        content = (ROOT / file).read_text()
        for word in re.findall(r"\w+", names):
            assert re.search(rf"\b{word}\b", content), (word, file)


def test_every_module_of_the_recipe_is_in_the_tree() -> None:
    for file in (ROOT / "recipe").glob("*.py"):
        assert file.name == "__init__.py" or file.name in PAGES["CONTRIBUTING.md"], file.name


@functools.cache
def flags_of(program: str, *command: str) -> set[str]:
    """The flags that one of the project's programs knows, or a command of it."""
    if program.endswith("_train/train.py"):
        names = {item.name.replace("_", "-") for item in fields(Config)}
        return {f"--{name}" for name in (*names, "list-presets")}

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown:
        patch.setattr(sys, "argv", [program, *command, "--help"])
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / program), run_name="__main__")
    # A flag's line begins with it, after a frame or two spaces; two more come before its text.
    lines = [line[2:].split("  ")[0] for line in shown.getvalue().splitlines() if line[2:3] == "-"]
    return set(re.findall("--[a-z][a-z0-9-]+", " ".join(lines)))


def test_every_flag_exists() -> None:
    """In the parser of the program that it follows; those that follow ` -- ` are the trainers'."""
    known = {
        "--mpi",
        "--gloo",
        "--nodes",
        "--ntasks-per-node",
        "--gpus-per-node",
        "--exclusive",
        "--kill-on-bad-exit",
        "--cpu-bind",
        "--gpu-bind",
        "--fp16-allreduce",
        "--no-build-isolation",
        "--shm-size",
    }  # others', aliases
    for page, text in PAGES.items():
        commands = re.sub(r"\\\n|'[^'`\n]*'", " ", text)  # one line each, quoted words left out
        # After --commits a command of a user's own follows the dashes.
        commands = re.sub(r"(--commits [^`\n]*?) -- [^`\n]*", r"\1", commands)
        commands = commands.replace("TOOL/", "")  # this project's folder, seen from another
        commands = re.sub(
            r"-m (recipe[.\w]+)", lambda word: word[1].replace(".", "/") + ".py", commands
        )
        parts = re.split(r"(\b\w+/[\w/]+\.py)\b(?=[^`|#;&\n]* --)", commands)
        for program, rest in zip(parts[1::2], parts[2::2], strict=True):
            own, _, trainers = re.split(r"[`|#;&\n]", rest)[0].partition(" -- ")
            command = own.split()[: program == "recipe/data/prepare.py"]
            flags_here = flags_of(program, *command), flags_of(TRAINER)
            for words, flags in zip((own, trainers), flags_here, strict=True):
                named = set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]+", words))
                assert named <= flags, (page, program, named - flags)
                known |= flags
    known |= get_args_parser()._option_string_actions.keys()
    for page in ("README.md", "docs/recipe.md", "docs/data.md"):  # the others name other tools'
        for flag in re.findall(r"(?<!\w)--[a-z][a-z0-9-]+", PAGES[page]):
            assert flag in known, (page, flag)


def test_every_named_test_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for page, text in PAGES.items():
        for name in re.findall(r"`(test_\w+)`", text):
            assert f"def {name}(" in sources, (page, name)


def test_the_calls_of_either_engine_exist() -> None:
    """Those that docs/migrating.md puts beside each other."""
    page = PAGES["docs/migrating.md"]
    known = {"dist": torch.distributed, "nn": torch.nn}
    with contextlib.suppress(ImportError):
        known["hvd"] = importlib.import_module("horovod.torch")
    for module, names in re.findall(r"\b(hvd|dist|nn)\.([A-Za-z_.]\w[\w.]*)", page):
        if module in known:
            assert operator.attrgetter(names.rstrip("."))(known[module]), names


def test_every_torchrun_of_several_hosts_has_an_id() -> None:
    """Without one, two jobs that are started on the same hosts form one training."""
    lines = []
    for name in tracked_files():
        path = ROOT / name
        if path.suffix in (".md", ".sbatch", ".sh", ".py", ".yaml", ".yml", ".def", ""):
            text = path.read_text(errors="ignore") if path.is_file() else ""
            found = re.findall(r"torchrun\b(?:(?!torchrun).){,400}?_train/train\.py", text, re.S)
            lines += [(name, line) for line in found if "--nnodes" in line]
    assert {name for name, _ in lines} >= {"README.md", "slurm/ddp_torchrun.sbatch"}
    assert [found for found in lines if not re.search(r"--rdzv-id[= ]\S", found[1])] == []


def test_every_page_is_linked() -> None:
    for page in PAGES:
        index, name = page.startswith("docs/"), page.removeprefix("docs/")
        assert page in ("README.md", "docs/README.md") or (
            f"({name})" in PAGES["docs/README.md" if index else "README.md"]
        ), page
    assert "(docs/README.md)" in README


def test_ci_calls_the_commands_of_the_readme() -> None:
    commands = re.findall(r"^(make \w+) +#", README, re.MULTILINE)
    assert commands == ["make compare", "make test"]
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    phases = [line.split()[1] for line in lines if line.startswith("phase ")]
    assert all(f"phase {name.split()[1]} {name}" in lines for name in commands)
    assert phases[-3:] == ["packages", "extras", "skipped"]  # what a user may lack comes last


# The flags of the scripts that docs/flags.md is about, as their parsers have them.
OTHERS = {
    "E": "-a -j -b -p -e --arch --workers --epochs --start-epoch --batch-size --lr --momentum "
    "--weight-decay --wd --print-freq --resume --evaluate --pretrained --world-size --rank "
    "--dist-url --dist-backend --seed --gpu --no-accel --multiprocessing-distributed --dummy",
    "V": "-b -j --data-path --model --device --batch-size --epochs --workers --opt --lr --momentum "
    "--wd --weight-decay --norm-weight-decay --bias-weight-decay --transformer-embedding-decay "
    "--label-smoothing --mixup-alpha --cutmix-alpha --lr-scheduler --lr-warmup-epochs "
    "--lr-warmup-method --lr-warmup-decay --lr-step-size --lr-gamma --lr-min --print-freq "
    "--output-dir --resume --start-epoch --cache-dataset --sync-bn --test-only --auto-augment "
    "--ra-magnitude --augmix-severity --random-erase --amp --world-size --dist-url --model-ema "
    "--model-ema-steps --model-ema-decay --use-deterministic-algorithms --interpolation "
    "--val-resize-size --val-crop-size --train-crop-size --clip-grad-norm --ra-sampler --ra-reps "
    "--weights --backend --use-v2",
    "H": "--train-dir --val-dir --log-dir --checkpoint-format --fp16-allreduce "
    "--batches-per-allreduce --use-adasum --gradient-predivide-factor --batch-size "
    "--val-batch-size --epochs --base-lr --warmup-epochs --momentum --wd --no-cuda --seed",
    "A": "-a -j -b -p -e --arch --workers --epochs --start-epoch --batch-size --lr --momentum "
    "--weight-decay --wd --print-freq --resume --evaluate --pretrained --local_rank --sync-bn "
    "--opt-level --keep-batchnorm-fp32 --loss-scale --channels-last",
}
SHORT = {"-b": "--batch-size", "-j": "--workers"}
FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGES["docs/flags.md"].splitlines()
    if line.startswith("| ") and not line.startswith(("| | ", "| there"))
]


@pytest.mark.parametrize("script", OTHERS)
def test_every_flag_of_other_scripts_has_a_row(script: str) -> None:
    same = PAGES["docs/flags.md"].partition("## Flag by flag")[2].partition("| there")[0]
    known = set(FLAG.findall(same))
    for there, _, here, *_ in (row for row in ROWS if len(row) > 2 and script in row[1].split()):
        known |= {*FLAG.findall(there), *FLAG.findall(here)}
    known |= {SHORT.get(flag, flag) for flag in known}
    assert set(OTHERS[script].split()) <= known


LINES = dict.fromkeys(
    re.findall(r"`([^`]+)`", " ".join(row[1 if len(row) == 2 else 2] for row in ROWS))
)


@pytest.mark.parametrize("line", LINES)
def test_what_replaces_the_flags_of_other_scripts_is_parsed(line: str) -> None:
    words = line.split()
    if not {"--data", "--train-dir"} & {*words}:
        words += ["--data", "DIR"]
    engine = "horovod" if "--gradient-predivide-factor" in words else "ddp"
    assert parse_args(engine, a_world(size=8), words).batch_size


def test_the_start_lines_train_at_the_rate_that_is_said() -> None:
    (flags,) = re.findall(r'^FLAGS="(.*)"', README, re.MULTILINE)
    config = parse_args("ddp", a_world(size=16), flags.split())
    peak = f"{config.base_lr * 16:g}"
    assert f"here {peak}." in README
    [command] = re.findall(r"`python (compare/run.py --dry-run .*) \$FLAGS`", README)
    with redirect_stdout(io.StringIO()) as shown:
        assert run.answer([*command.split()[1:], *flags.split()]) == 0
    assert (
        f"# ddp-torchrun-16: 4,096 images a step, peak learning rate {peak}\n" in shown.getvalue()
    )


def test_the_table_of_presets_has_all_with_their_epochs() -> None:
    rows = re.findall(r"^\| (`.*?) \| ([\d, ]+) \|", README, re.MULTILINE)
    told = {
        name: epochs[-1 if len(epochs) == 1 else index]
        for names, cell in rows
        if (epochs := [int(one) for one in cell.split(", ")])
        for index, name in enumerate(re.findall(r"`([\w-]+)`", names))
        if name in PRESETS
    }
    epochs = {name: preset(name).epochs for name in PRESETS if not name.startswith("digits")}
    assert told == epochs
