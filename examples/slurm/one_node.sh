#!/bin/bash
# One node, 8 GPUs, one worker on each. Saved and requeued when its time is over: sbatch one_node.sh my.yaml
#SBATCH --job-name=isoloco
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300  # to the tasks, five minutes before the end
#SBATCH --requeue
#SBATCH --open-mode=append

export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
# one task is one process; what torchrun would have set comes from SLURM, so that the exit code is isoloco's own
srun --kill-on-bad-exit=0 bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
  exec isoloco train "$@" --resume auto' isoloco "$@"
code=$?
# 75: saved and not finished
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
