#!/bin/bash
# GPT-2 (124M) on two nodes of eight GPUs: `sbatch examples/slurm.sh`. The folder must be one that all nodes see; make
# the shards first. Two minutes before the time limit the run saves and stops; the same command goes on from there.
#
# Slurm starts the ranks itself, one task a GPU. torchrun would do, but it kills its workers 30 s after passing a signal
# on: of the two minutes a step and a checkpoint would have a quarter. (From torch 2.12 on TORCH_ELASTIC_SHUTDOWN_TIMEOUT
# can say otherwise; before it cannot.)
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
srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \
    exec python train_gpt2.py --preset gpt2 --resume'
