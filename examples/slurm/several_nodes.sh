#!/bin/bash
# Four nodes of 8 GPUs. Each node is an island: gradients are averaged inside, deltas meet between the nodes once a round.
# sbatch several_nodes.sh my.yaml --workers 4
#SBATCH --job-name=isoloco
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300  # to the tasks, five minutes before the end
#SBATCH --requeue
#SBATCH --open-mode=append

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
srun --kill-on-bad-exit=0 bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
  exec isoloco train "$@" --compute.processes_per_worker $SLURM_NTASKS_PER_NODE --resume auto' isoloco "$@"
code=$?
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
