# The common part of the scripts in this folder, which source it.
#
# Variables to set when you submit a job (NAME=first sbatch slurm/...):
#     VENV    the environment (default .venv; if there is none, that of the shell)
#     RUNS    the folder for run folders (default runs)
#     NAME    the run's name (default: the job's name and number)
# Put everything else that your site needs (module load, NCCL_SOCKET_IFNAME=...) into slurm/site.sh,
# which git ignores.
refuse() {
    echo "$1" >&2
    exit 2
}

cd "$SLURM_SUBMIT_DIR" || exit
# With these mpirun notices within a minute that a node is cut off; by default it takes eight or more.
export OMPI_MCA_oob_tcp_keepalive_{time=20,intvl=5,probes=6}
# mpirun waits 10 s before it passes SIGTERM on, and 10 s more before it kills: time for a checkpoint.
export OMPI_MCA_odls_base_sigkill_timeout=10
export PET_LOG_DIR=/dev/null  # torchrun would leave an empty folder in TMPDIR
if [ -e slurm/site.sh ]; then . slurm/site.sh; fi
if [ -n "${VENV:-}" ] || [ -e .venv ]; then . "${VENV:-.venv}/bin/activate"; fi
RUNS=${RUNS:-runs}
NAME=${NAME:-${SLURM_JOB_NAME//\//-}-$SLURM_JOB_ID}  # a job's name may have slashes
folder=$RUNS/$NAME
case $NAME in */*) refuse "NAME=$NAME: a run's name has no slash; the folder is RUNS" ;; esac
for word in "$@"; do  # the arguments of the script that sources this
    case $word in
        --name | --name=* | --log-dir | --log-dir=*)
            refuse "$word: set NAME or RUNS before sbatch instead, so that this script knows them, too" ;;
    esac
done
flags=(--log-dir "$RUNS" --name "$NAME" --resume auto --checkpoint-steps 500)

allocated_hosts() {  # the allocation's nodes and tasks, as mpirun and horovodrun take them: a:4,b:4
    python -c 'from compare.plan.environment import slurm_hosts; print(slurm_hosts())'
}

rendezvous_port() {  # this job's port for its ranks to meet; kernels assign none of this range
    echo $((20000 + SLURM_JOB_ID % 12000))
}

passed_on() {  # mpirun's flags for the variables that it must pass to other nodes
    compgen -e | grep -E '^(PATH|LD_LIBRARY_PATH|PYTHONPATH|(NCCL|GLOO|HOROVOD|UCX|FI)_.*)$' |
        sed 's/^/-x /'
}

is_too_short() {  # is_too_short SECONDS: whether a short time limit caused this early warning
    local job
    [ "$1" -lt 60 ] || return
    job=$(scontrol show job "$SLURM_JOB_ID")
    # PreemptTime=None, or no PreemptTime if the site does not preempt: it was the time limit.
    [[ $job =~ TimeLimit=00: && ! $job =~ PreemptTime=[0-9] ]]
}

train() {  # train COMMAND...: run it, and requeue the job if it had to stop before its end
    local warned_at="" cancelled="" status=0 again=0 pid
    if grep -qsx "$SLURM_JOB_ID" "$folder/stop"; then  # left by this job before it was requeued
        rm -f "$folder/stop"
    fi
    # Slurm sends USR1 to this script (--signal, in its head) before the time limit, and before a
    # preemption if the site has preempt_send_user_signal. The trainer finds the file, keeps a
    # checkpoint, ends, and removes the file. The job's number in the file tells a trainer that is just
    # starting that the file is meant for it.
    trap 'warned_at=$SECONDS; mkdir -p "$folder"; echo "$SLURM_JOB_ID" >"$folder/stop"' USR1
    "$@" &
    pid=$!
    trap 'cancelled=1; kill -TERM "$pid"' TERM
    wait "$pid" || status=$?
    while kill -0 "$pid" 2>/dev/null; do  # a signal has ended the wait, but not the training
        status=0
        wait "$pid" || status=$?
    done
    if [ "$status" -gt 128 ]; then  # both may have ended at once; 127: its own status is known
        wait "$pid" || again=$?
        [ "$again" -eq 127 ] || status=$again
    fi
    # 75: the ranks got a signal themselves, for example before a preemption, and kept a checkpoint.
    if { [ -n "$warned_at" ] || [ "$status$cancelled" = 75 ]; } && [ ! -e "$folder/stop" ] &&
        [ ! -e "$folder/summary.json" ] &&
        compgen -G "$folder/checkpoints/step-*.pt" >/dev/null; then
        if [ -n "$warned_at" ] && is_too_short "$warned_at"; then
            refuse "--time is hardly longer than the warning before its end (--signal): $NAME was \
warned in its first minute, would make only a few steps per start, and is not requeued. Its checkpoint \
is kept: submit it again with NAME=$NAME and a longer --time"
        fi
        scontrol requeue "$SLURM_JOB_ID"  # keeps its number, so that it finds its checkpoint
    fi
    return "$status"
}
