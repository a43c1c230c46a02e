"""What some tests need beyond `make setup`.

A test that lacks it is skipped with a reason of the form "needs WHAT: HOW". `.ci/run` brings all of
it but GPUs, and fails if a test is then skipped for want of anything else.
"""

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from recipe.data.idx import FASHION_MNIST

ROOT = Path(__file__).parent.parent
PACKAGES = "sudo bash tools/debian_packages.sh"
HOROVOD = "needs Horovod: make setup WITHOUT_HOROVOD=0"
GIT = "needs a checkout by git: git clone"
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch sees")
needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None,
    reason="needs timm: .venv/bin/pip install -e '.[timm]'",
)
needs_dali = pytest.mark.skipif(  # whose import takes seconds
    not Path(sysconfig.get_path("platlib"), "nvidia", "dali").is_dir(),
    reason="needs DALI: .venv/bin/pip install -e '.[dali]'",
)
needs_sshd = pytest.mark.skipif(
    None in (SSHD, shutil.which("ssh-keygen")), reason=f"needs sshd: {PACKAGES}"
)
needs_fashion_mnist = pytest.mark.skipif(
    not FASHION_MNIST.is_dir(), reason=f"needs Fashion-MNIST (dataset-fashion-mnist): {PACKAGES}"
)


def skip_if_missing(tools: list[str], what: str) -> None:
    """Skip this test if there are any: tools that are missing here, or "root"."""
    if tools == ["root"]:
        pytest.skip(f"needs {what}: run the tests as root, in a container with --privileged")
    if tools:
        as_root = ", and run the tests as root" if "root" in tools else ""
        pytest.skip(f"needs {what}: {PACKAGES}{as_root}")


def tracked_files() -> list[str]:
    """The project's files, by their paths in it; skip this test where git does not know them: in
    an image or an archive, or in another user's checkout."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a checkout that git knows as yours: git clone")
    return listed.stdout.decode().split("\0")[:-1]
