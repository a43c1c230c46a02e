"""Environment variables that change what an engine does or how fast: one list for the plan of a
comparison, for a run's environment.json, and for files of knobs."""

from recipe.world import LAUNCHERS

STEERING_PREFIXES = (
    "HOROVOD_", "NCCL_", "GLOO_", "OMPI_", "PMIX_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "CUDA_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "LD_PRELOAD",
    "LD_LIBRARY_PATH", "ATEN_CPU_CAPABILITY", "THP_MEM_ALLOC_ENABLE",
    "SLURM_MPI_TYPE", "SLURM_PMIX_FENCE", "SLURM_CPU_BIND",
)  # fmt: skip
# Those of Horovod that only steer its speed. By name, so that a typing error in a file of knobs is
# found, and because their neighbours are no knobs: HOROVOD_RANK, or HOROVOD_TIMELINE.
HOROVOD_VARIABLES = (
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_CYCLE_TIME",
    "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_TORUS_ALLREDUCE",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
    "HOROVOD_ENABLE_ASYNC_COMPLETION",
    "HOROVOD_DISABLE_GROUP_FUSION",
    "HOROVOD_THREAD_AFFINITY",
    "HOROVOD_MPI_THREADS_DISABLE",
    "HOROVOD_AUTOTUNE",
    "HOROVOD_AUTOTUNE_LOG",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
)

# In a rank's environment launchers have written into these families, too: who the rank is and
# where it meets the others. There only the second list is the user's. (For the threads of MKL and
# OpenBLAS the trainers have a rule of their own.)
SHARED_WITH_LAUNCHERS = (
    *(family for launcher in LAUNCHERS.values() for family in launcher.sets),
    "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
)  # fmt: skip
OF_THE_USER = (
    *HOROVOD_VARIABLES, "HOROVOD_CCL", "HOROVOD_TIMELINE", "OMPI_MCA_coll",
    "OMPI_MCA_mpi_yield_when_idle", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES",
    "CUDA_LAUNCH_BLOCKING",
)  # fmt: skip


def steers(name: str) -> bool:
    """Whether this variable, of the user's shell, changes what an engine does or how fast."""
    return name.startswith(STEERING_PREFIXES)


def steers_rank(name: str) -> bool:
    """Whether it does, and no launcher has set it for the rank in whose environment it is."""
    return name.startswith(OF_THE_USER) if name.startswith(SHARED_WITH_LAUNCHERS) else steers(name)
