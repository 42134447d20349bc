#!/bin/bash
# GPT-2 (124M) on two nodes of eight GPUs: `sbatch examples/slurm.sh`. The folder must be one that all nodes see; make
# the shards first. Two minutes before the time limit the run saves and stops; the same command goes on from there.
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
srun torchrun --nnodes="$SLURM_NNODES" --nproc_per_node=8 --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d --rdzv-endpoint="$first:29500" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    train_gpt2.py --preset gpt2 --resume
