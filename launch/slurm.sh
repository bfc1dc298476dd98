#!/usr/bin/env bash
# SLURM: one node or many, preempted or out of time as often as it likes; each start resumes where the last one ended.
#   sbatch launch/slurm.sh run RECIPE
#   sbatch --nodes=4 --gpus-per-node=8 --time=24:00:00 launch/slurm.sh run RECIPE --output_dir /shared/runs/NAME
#   sbatch --gpus-per-node=2 --cpus-per-task=16 --mem=128G launch/slurm.sh run RECIPE
# Submit in the checkout, with an output_dir that all nodes reach. Of each node the job takes:
#   --cpus-per-task     cores: 64, 8 a GPU, for processes and their data workers
#   --mem               memory: 0, which is all of it
# Other variables of the job, by sbatch --export=ALL,NAME=VALUE:
#   GLOO_SOCKET_IFNAME  the nodes' interface to each other, where their names resolve to 127.0.x.x
#   PROCESSES_PER_NODE  processes on each node: its GPUs, unless said
#   MAX_RESTARTS        how often a process that failed is started again in place: 3, unless said
#   MAX_REQUEUES        after a lost process (exit code 5) the job is requeued while it was requeued less often, for whatever
#                       reason: 10, unless said. A node that the run names as the one that failed is excluded.
#SBATCH --job-name=accel_train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@300
set -uo pipefail

PATH="${SLURM_SUBMIT_DIR:-$PWD}/.venv/bin:$PATH"
nodes="${SLURM_JOB_NUM_NODES:-1}"
first_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
port=$((20000 + SLURM_JOB_ID % 20000))  # of this job alone, where nodes are shared
log="$(readlink -f "/proc/$$/fd/2")"  # where sbatch has the output of the job written
[ -f "$log" ] || log=/dev/null
log_begin=$(($(stat -c %s "$log") + 1))  # earlier starts of the job wrote what is before

# The processes write here, one a line, the machines whose process was lost or hung. All nodes reach the folder.
export ACCEL_TRAIN_LOST_HOSTS="${SLURM_SUBMIT_DIR:-$PWD}/.lost-hosts-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
rm -f "$ACCEL_TRAIN_LOST_HOSTS"
trap 'rm -f "$ACCEL_TRAIN_LOST_HOSTS"' EXIT

asked=yes step=
forward() { asked=yes; [ -z "$step" ] || kill -USR1 "$step"; }
trap forward USR1 TERM

# Before GPUs are reserved, on a node with a network: download and tokenize once.
#   accel-train prepare RECIPE
# One task a node, and in it a process a GPU. srun hands a signal on to its tasks, and they to their processes, which all
# save the same step and end with 75.
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=0 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    python -m accel_train.torchrun --nnodes="$nodes" --nproc_per_node="${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}" \
    --rdzv_backend=c10d --rdzv_endpoint="$first_node:$port" --rdzv_id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --max_restarts="${MAX_RESTARTS:-3}" -m accel_train "$@" &
step=$!
while [ "$asked" = yes ]; do  # a trap ends `wait` before the step has ended
    asked=no
    wait "$step"
    code=$?
done

# The step ends with the highest code of its nodes. A node that failed by itself says more than those that lost it: srun names its code.
own_code="$(tail -c "+$log_begin" "$log" | sed -nE 's/^srun: error: .*: Exited with exit code ([0-9]+)$/\1/p' | grep -vxE '5|75' | head -n 1)"
[ -z "$own_code" ] || code="$own_code"

# The node whose process was lost or hung, if the run has written exactly one.
bad_node() {
    sed 's/[.].*//' "$ACCEL_TRAIN_LOST_HOSTS" 2>/dev/null | sort -u | awk '{ node = $0 } END { if (NR == 1) print node }' |
        grep -xFf <(scontrol show hostnames "$SLURM_JOB_NODELIST")
}

requeue() {
    trap '' USR1 TERM  # the requeue ends this script, and there may be more to do
    scontrol requeue "$SLURM_JOB_ID"
}

if [ "$code" -eq 75 ]; then
    echo "asked to stop, or out of memory with a smaller micro-batch remembered: job $SLURM_JOB_ID is requeued, and resumes from its checkpoint"
    requeue
elif [ "$code" -eq 5 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-10}" ]; then
    echo "a process was lost: job $SLURM_JOB_ID is requeued, and resumes from its checkpoint"
    bad="$(bad_node)"
    excluded="$(scontrol show job "$SLURM_JOB_ID" | sed -nE 's/.*ExcNodeList=([^ ]+).*/\1/p' | grep -v '(null)')"
    requeue
    if [ -n "$bad" ] && scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=${excluded:+$excluded,}$bad"; then  # of a pending job
        echo "it will run without $bad, where the process was; undo: scontrol update JobId=$SLURM_JOB_ID ExcNodeList=$excluded"
    fi
elif [ "$code" -eq 5 ]; then
    echo "a process was lost, and job $SLURM_JOB_ID was requeued ${SLURM_RESTART_COUNT:-0} times (MAX_REQUEUES): submit it again once the cause is known"
fi
exit "$code"
