#!/bin/bash
# GPT-2 (124M) on two nodes of eight GPUs: `sbatch examples/slurm.sh`, in a folder that all nodes see. Make the shards
# first. If the nodes have no network, run `python hellaswag.py -m gpt2 --limit 1` before, for HellaSwag.
# It takes another script and other flags, here on one node:
# sbatch --nodes=1 examples/slurm.sh train_rotary.py --preset gpt2 --seed 1338 --log-dir log_rotary
# Two minutes before the time limit the run saves and stops, after the update or the evaluation that is running. If one of
# these, and a save, take longer, raise the 120 below. Submit it again, and it continues. Slurm requeues it by itself
# only when a node fails or a job of higher priority takes its place.
#
# Slurm starts the ranks itself, one task per GPU, so that they receive its signal: torchrun would kill its workers
# 30 seconds after passing it on.
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=4
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-4}" # from Slurm 22.05 on srun does not inherit --cpus-per-task
[ $# -gt 0 ] || set -- train_gpt2.py --preset gpt2 --log-dir log_gpt2
# --kill-on-bad-exit: when one rank fails, end the others, which would otherwise wait for it.
srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \
    exec python "$@" --resume' bash "$@"
