"""The README promises only what is there."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_diff_of_the_twins_is_the_real_one() -> None:
    block = re.search(r"```diff\n(.*?)```", README, re.DOTALL)
    assert block
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
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (compare|test|setup|lint|lock|help|clean)\b", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_named_file_exists() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert "://" in link or (ROOT / link).exists(), link
    tree = re.search(r"## Where things are\n\n```\n(.*?)```", README, re.DOTALL)
    assert tree
    folder = ""
    for line in tree[1].splitlines():
        if match := re.match(r"(\w+)/", line):
            folder = match[1]
            assert (ROOT / folder).is_dir(), folder
        for name in re.findall(r"\b(\w+\.py)\b", line):
            assert (ROOT / folder / name).exists(), f"{folder}/{name}"


def test_every_module_of_the_recipe_is_in_the_tree() -> None:
    for file in (ROOT / "recipe").glob("*.py"):
        assert file.name == "__init__.py" or file.name in README, file.name


def test_every_flag_exists() -> None:
    from dataclasses import fields

    from torch.distributed.run import get_args_parser

    from recipe.config import Config

    known = {"--" + item.name.replace("_", "-") for item in fields(Config)}
    torchrun = get_args_parser()._option_string_actions
    others = {
        "--mpi",
        "--gloo",
        "--labels",
        "--help",
        "--list-plans",
        "--hosts",
        "--slurm",
        "--nodes",
        "--tune",
    }
    known |= torchrun.keys() | others | {"--ntasks-per-node"}
    for flag in re.findall(r"(?<!\w)(--[a-z][a-z0-9-]+)", README):
        assert flag in known, flag


def test_every_torchrun_of_several_hosts_has_an_id() -> None:
    """Without one, two jobs that are started on the same hosts form one training."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    lines = []
    for name in files.stdout.decode().split("\0"):
        path = ROOT / name
        if path.suffix in (".md", ".sbatch", ".sh", ".py", ".yaml", ".yml", ".def", ""):
            text = path.read_text(errors="ignore") if path.is_file() else ""
            found = re.findall(r"torchrun\b(?:(?!torchrun).){,400}?_train/train\.py", text, re.S)
            lines += [(name, line) for line in found if "--nnodes" in line]
    assert {name for name, _ in lines} >= {"README.md", "slurm/ddp_torchrun.sbatch"}
    assert [found for found in lines if not re.search(r"--rdzv-id[= ]\S", found[1])] == []


def test_every_page_is_linked() -> None:
    linked = README + "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for page in (ROOT / "docs").glob("*.md"):
        assert f"{page.name}" in linked, page.name
