"""Environment variables that change what an engine does or how fast. One list serves the plan of a
comparison and a run's environment.json."""

from recipe.world import LAUNCHERS

RANK_START = "RANK_START"  # how a comparison started this rank: "fork" or "exec"

STEERING_PREFIXES = (
    RANK_START,
    "HOROVOD_", "NCCL_", "GLOO_", "OMPI_", "PMIX_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "CUDA_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "LD_PRELOAD",
    "LD_LIBRARY_PATH", "ATEN_CPU_CAPABILITY", "THP_MEM_ALLOC_ENABLE",
    "SLURM_MPI_TYPE", "SLURM_PMIX_FENCE", "SLURM_CPU_BIND",
)  # fmt: skip

# Launchers set variables with these prefixes for each rank, too: its number, and where the ranks
# meet. Of them, only those in the second list come from the user. (The trainers set the threads of
# MKL and OpenBLAS themselves.)
SHARED_WITH_LAUNCHERS = (
    *(family for launcher in LAUNCHERS.values() for family in launcher.sets),
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
)
OF_THE_USER = (
    "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_HIERARCHICAL_", "HOROVOD_TORUS_ALLREDUCE", "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_BATCH_D2D_MEMCOPIES", "HOROVOD_ENABLE_ASYNC_COMPLETION",
    "HOROVOD_DISABLE_GROUP_FUSION", "HOROVOD_THREAD_AFFINITY", "HOROVOD_MPI_THREADS_DISABLE",
    "HOROVOD_AUTOTUNE", "HOROVOD_CCL", "HOROVOD_TIMELINE",
    "OMPI_MCA_coll", "OMPI_MCA_mpi_yield_when_idle", "OMP_WAIT_POLICY", "OMP_PROC_BIND",
    "OMP_PLACES", "CUDA_LAUNCH_BLOCKING",
)  # fmt: skip


def steers(name: str) -> bool:
    """Return whether this variable in the user's shell changes what an engine does or how fast."""
    return name.startswith(STEERING_PREFIXES)


def steers_rank(name: str) -> bool:
    """Return whether this variable in a rank's environment steers an engine, and the user rather
    than a launcher has set it."""
    if name.startswith(SHARED_WITH_LAUNCHERS):
        return name.startswith(OF_THE_USER)
    return steers(name)
