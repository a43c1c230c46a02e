# What the scripts of this folder share; each reads it in.
#
# Set when a job is submitted (NAME=first sbatch slurm/...):
#     VENV    the environment (default .venv; where there is none, the shell's own is used)
#     RUNS    where run folders are made (default runs)
#     NAME    the run's name (default: the job's name and number)
# What a site needs beside that (module load, NCCL_SOCKET_IFNAME=...) stands in slurm/site.sh, which
# is nobody else's and not in git.
cd "$SLURM_SUBMIT_DIR"
if [ -e slurm/site.sh ]; then . slurm/site.sh; fi
if [ -n "${VENV:-}" ] || [ -e .venv ]; then . "${VENV:-.venv}/bin/activate"; fi
folder=${RUNS:-runs}/${NAME:-$SLURM_JOB_NAME-$SLURM_JOB_ID}
flags=(--log-dir "${RUNS:-runs}" --name "${folder##*/}" --resume auto --checkpoint-steps 500)

allocated_hosts() {  # the allocation's nodes and tasks, as mpirun and horovodrun take them: a:4,b:4
    python -c 'import os; from compare.hosts import read_allocation; print(read_allocation(os.environ))'
}

train() {  # train COMMAND...: run it, and have the job queued again if it had to stop before its end
    local is_warned="" status=0 pid
    # Slurm sends USR1 to this script (--signal, in its head) before the time is over, and before a
    # preemption where the site has PreemptParameters=send_user_signal. The trainer finds the file,
    # keeps a checkpoint and ends.
    trap 'is_warned=yes; mkdir -p "$folder"; touch "$folder/stop"' USR1
    "$@" &
    pid=$!
    trap 'kill -TERM "$pid"' TERM
    wait "$pid" || status=$?
    while kill -0 "$pid" 2>/dev/null; do  # a signal ended the wait, not the training
        status=0
        wait "$pid" || status=$?
    done
    if [ "$status" -eq 0 ] && [ -n "$is_warned" ] && [ ! -e "$folder/summary.json" ]; then
        scontrol requeue "$SLURM_JOB_ID"  # under the same number, so that it finds its checkpoint
    fi
    return "$status"
}
