"""What some tests need beyond `make setup`.

A test that lacks it is skipped with a reason of the form "needs WHAT: HOW". `.ci/run` brings all of
it but GPUs, and fails if a test is then skipped for want of anything else.
"""

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

PACKAGES = "bash tools/debian_packages.sh"
HOROVOD = "needs Horovod: make setup WITHOUT_HOROVOD=0"
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch sees")
needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None, reason="needs timm: pip install -e '.[timm]'"
)
needs_dali = pytest.mark.skipif(  # whose import takes seconds
    not Path(sysconfig.get_path("platlib"), "nvidia", "dali").is_dir(),
    reason="needs DALI: pip install -e '.[dali]'",
)
needs_sshd = pytest.mark.skipif(
    None in (SSHD, shutil.which("ssh-keygen")), reason=f"needs sshd: {PACKAGES}"
)


def skip_if_missing(tools: list[str], what: str) -> None:
    """Skip this test if there are any: tools that are missing here, or "root"."""
    if tools == ["root"]:
        pytest.skip(f"needs {what}: run the tests as root")
    if tools:
        as_root = ", and run the tests as root" if "root" in tools else ""
        pytest.skip(f"needs {what}: {PACKAGES}{as_root}")
