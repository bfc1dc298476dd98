#!/usr/bin/env bash
# SLURM: one node or many, preempted or out of time as often as it likes; each start goes on where the last one ended.
#   sbatch launch/slurm.sh run RECIPE
#   sbatch --nodes=4 --gpus-per-node=8 --time=24:00:00 launch/slurm.sh run RECIPE --output_dir /shared/runs/NAME
# Submit in the checkout, with an output_dir that all nodes reach. Other variables of the job, by sbatch --export=ALL,NAME=VALUE:
#   PROCESSES_PER_NODE  processes on each node: its GPUs, unless said
#   MAX_RESTARTS        how often a process that failed is started again in place: 3, unless said
#SBATCH --job-name=accel_train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
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

asked=yes step=
forward() { asked=yes; [ -z "$step" ] || kill -USR1 "$step"; }
trap forward USR1 TERM

# One task a node, and in it a process a GPU. srun hands a signal on to its tasks, and they to their processes, which all
# save the same step and end with 75.
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=0 \
    python -m accel_train.torchrun --nnodes="$nodes" --nproc_per_node="${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}" \
    --rdzv_backend=c10d --rdzv_endpoint="$first_node:$port" --rdzv_id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --max_restarts="${MAX_RESTARTS:-3}" -m accel_train "$@" &
step=$!
while [ "$asked" = yes ]; do  # a trap ends `wait` before the step has ended
    asked=no
    wait "$step"
    code=$?
done

if [ "$code" -eq 75 ]; then
    echo "preempted: job $SLURM_JOB_ID goes back into the queue, and then on from its checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
