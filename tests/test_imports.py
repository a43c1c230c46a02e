"""Rules about imports that the contracts in pyproject.toml (make lint) cannot express."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("recipe", "horovod_train", "ddp_train", "compare")
RUNGS_RANKS = ROOT / "recipe" / "meeting.py"  # of the scripts in baselines/, not of the engines
RECIPE = sorted({*(ROOT / "recipe").rglob("*.py")} - {RUNGS_RANKS})


def uses_of_distributed(source: str) -> list[int]:
    """Lines on which a source imports or names torch.distributed or DDP (submodules of one
    external package look all alike to import-linter)."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        if any(
            name.startswith(("torch.distributed", "torch.nn.parallel.Distributed"))
            for name in names
        ):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", RECIPE, ids=lambda path: path.name)
def test_recipe_does_not_use_torch_distributed(path):
    assert uses_of_distributed(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "import torch\n\ndef f():\n    torch.distributed.init_process_group()",
    ],
)
def test_the_rule_above_finds(source):
    assert uses_of_distributed(source)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_bears_a_standard_module_s_name(package):
    """`python ddp_train/train.py` puts ddp_train/ first on sys.path: logging.py there would win."""
    names = {path.stem for path in (ROOT / package).iterdir()} - {"__init__", "__pycache__"}
    assert not names & set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    "name", ["compare.report", "compare.timeline", "compare.parity", "recipe.data.prepare"]
)
def test_commands_that_read_start_without_torch(name):
    """The contract is about imports that are written; this is about those that happen."""
    code = f"import {name}, sys; print(*{{'torch', 'horovod', 'mpi4py'}} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
