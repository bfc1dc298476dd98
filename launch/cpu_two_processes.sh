#!/usr/bin/env bash
# Two processes on the CPU of this machine, for trying a multi-process run without a GPU.
#   launch/cpu_two_processes.sh run recipes/gpt_tiny.yaml
# Other numbers: NUM_PROCESSES=4 launch/cpu_two_processes.sh ...
# torchrun, because `accelerate launch --cpu --num_processes 2` starts one process without a word.
set -euo pipefail

PATH="$(cd "$(dirname "$0")/.." && pwd)/.venv/bin:$PATH"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" ACCELERATE_USE_CPU=true
exec torchrun --standalone --nproc_per_node "${NUM_PROCESSES:-2}" -m accel_train "$@"
