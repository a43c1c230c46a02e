"""make gpu-check: that each check's end is told. CI carries out the checks by ARGS=--dry."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT

from benchmarks import gpu_check
from benchmarks.gpu_check import CHECKS, NotPossibleError, Setting, carry_out
from recipe.errors import UserError


def raises(error: Exception) -> Any:
    def check(setting: Setting) -> dict[str, Any]:
        raise error

    return check


@pytest.mark.parametrize(
    ("run", "gpus", "status", "reason"),
    [
        (lambda setting: {"value": 1}, 1, "ok", ""),
        (lambda setting: {"value": 1}, 2, "not possible", "2 GPUs are needed"),
        (raises(NotPossibleError("no nvidia-smi")), 1, "not possible", "no nvidia-smi"),
        (raises(UserError("they differ")), 1, "failed", "UserError: they differ"),
        (raises(KeyError("dur")), 1, "failed", "KeyError: 'dur'"),
    ],
)
def test_how_a_check_ends(
    run: Any, gpus: int, status: str, reason: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = carry_out(run, gpus, Setting(tmp_path, dry=False))
    assert result["status"] == status and result["reason"].startswith(reason)
    assert bool(result["figures"]) == (status == "ok")


def test_what_is_skipped_or_not_seen_does_not_pass(tmp_path: Path, monkeypatch: Any) -> None:
    """Of pytest: what it skips. Of torch: GPUs that nvidia-smi sees and it does not."""
    setting = Setting(tmp_path, dry=False)
    (tmp_path / "output.log").write_text("SKIPPED [2] tests/x.py:1: no Apex\n3 passed, 2 skipped\n")
    monkeypatch.setattr(Setting, "start", lambda *_, **__: tmp_path)
    result = carry_out(gpu_check.gpu_tests, 0, setting)
    assert result["status"] == "not possible" and "2 skipped" in result["reason"]
    monkeypatch.setattr(gpu_check, "ask_nvidia_smi", lambda field: ["H200"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert carry_out(gpu_check.facts, 0, setting)["status"] == "failed"


def test_what_fails_is_in_the_file_and_in_the_exit_code(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_check, "CHECKS", {raises(UserError("alas")): 1})
    assert gpu_check.check_gpus(dry=True, out=tmp_path / "found.json") == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["versions"]["torch"] and found["checks"][0]["reason"] == "UserError: alas"
    with pytest.raises(UserError, match="there is no such check"):
        gpu_check.check_gpus(only=("facts",))


def test_the_page_names_each_check() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    assert all(f"| `{check.__name__}` |" in page for check in CHECKS)
