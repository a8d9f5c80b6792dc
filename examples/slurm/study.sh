#!/bin/bash
# A study on 8 nodes of 8 GPUs, a run on each GPU: every task of the array starts the same command, takes runs that nobody
# has, and ends when none is left. sbatch study.sh table2 --scale 178m
#SBATCH --job-name=isoloco-study
#SBATCH --array=1-8
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300  # to this script, five minutes before the end: the runs save themselves
#SBATCH --requeue
#SBATCH --open-mode=append

# the directory of the runs lies on a file system that all nodes share; locks there have to reach across nodes
isoloco study run "$@" --root "${STUDIES:-studies}" --jobs 8 --devices-per-run 1 &
study=$!
trap 'kill -TERM "$study"' TERM
wait "$study"
code=$?
while kill -0 "$study" 2>/dev/null; do wait "$study"; code=$?; done
# 130: told to stop, with runs left
if [ "$code" -eq 130 ]; then scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"; fi
exit "$code"
