"""Nothing of ours unpickles what came over a network or from a file, but for what docs/security.md
names: to unpickle is to run whatever code the sender wrote."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("recipe", "ddp_train", "horovod_train", "baselines", "compare", "benchmarks", "tools")
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Functions, of whatever module, that unpickle what other ranks send.
OBJECTS = {
    "all_gather_object",
    "allgather_object",
    "broadcast_object",
    "broadcast_object_list",
    "broadcast_optimizer_state",
    "consolidate_state_dict",
    "gather_object",
    "init_rpc",
    "recv_object_list",
    "scatter_object_list",
}
# Those that do unless they are told not to.
READERS = {"torch.load", "load_state_dict_from_url", "published.get_state_dict"}
ALLOWED = {
    "recipe/rendezvous.py": {"init_rpc"},  # for the three rungs that call functions of other ranks
    "baselines/zero_optimizer.py": {"consolidate_state_dict"},
    "benchmarks/programs/plain_horovod.py": {"broadcast_optimizer_state"},
}


def risks(source: str) -> set[str]:
    """What in a module's text unpickles, by its name there."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & PICKLES
        elif isinstance(node, ast.ImportFrom):
            imported = {alias.name for alias in node.names}
            if node.module in PICKLES and imported != {"UnpicklingError"}:
                found.add(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name.rpartition(".")[2] in OBJECTS:
                found.add(name.rpartition(".")[2])
            if name in READERS and given.get("weights_only") != "True":
                found.add(name)
            if given.get("allow_pickle", "False") != "False":
                found.add("allow_pickle")
            if name.endswith(".recv") and not node.args:  # of a multiprocessing.Connection
                found.add("recv")
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os, pickle", {"pickle"}),
        ("from cloudpickle import loads", {"cloudpickle"}),
        ("from pickle import UnpicklingError", set()),
        ("torch.load(file)", {"torch.load"}),
        ("torch.load(file, weights_only=False)", {"torch.load"}),
        ("torch.load(file, weights_only=True)", set()),
        ("dist.all_gather_object(all, own)", {"all_gather_object"}),
        ("np.load(file, allow_pickle=True)", {"allow_pickle"}),
        ("connection.recv()", {"recv"}),
        ("socket.recv(64)", set()),
    ],
)
def test_what_unpickles_is_found(source: str, found: set[str]) -> None:
    assert risks(source) == found


def test_nothing_else_unpickles() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    found = {str(file.relative_to(ROOT)): risks(file.read_text()) for file in files}
    assert {name: what for name, what in found.items() if what} == ALLOWED


# ---- rules about imports that `make lint` cannot express ----


@pytest.mark.parametrize("package", ["recipe", "horovod_train", "ddp_train", "compare"])
def test_no_file_bears_a_standard_module_s_name(package):
    """`python ddp_train/train.py` puts ddp_train/ first on sys.path: logging.py there would win."""
    names = {path.stem for path in (ROOT / package).iterdir()} - {"__init__", "__pycache__"}
    assert not names & set(sys.stdlib_module_names)


def test_commands_that_read_start_without_torch():
    """The contract is about imports that are written; this is about those that happen."""
    names = "compare.report, compare.timeline, compare.parity, recipe.data.prepare"
    code = f"import {names}, sys; print({{'torch', 'horovod', 'mpi4py'}} & {{*sys.modules}})"
    done = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert done == "set()\n"
