#!/bin/bash
# All crawls of FineWeb-Edu, one job each: `bash examples/slurm_fineweb.sh`, in a folder that all nodes see, lists them in
# all/crawls.txt and submits the array. After kills, time limits or network failures the same command continues: jobs
# whose crawl is complete end at once, the others go on. Then `python train_gpt2.py --preset gpt2 --data all`.
#SBATCH --job-name=fineweb
#SBATCH --cpus-per-task=13
#SBATCH --time=12:00:00
#SBATCH --requeue
set -euo pipefail
CRAWLS=all/crawls.txt
if [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then # not in a job yet
    mkdir -p all
    # Listed only once: the dataset grows, but numbers must keep their crawls.
    [ -s $CRAWLS ] || python -c 'import datasets as d; print(*d.get_dataset_config_names("HuggingFaceFW/fineweb-edu"))' |
        tr " " "\n" | grep ^CC-MAIN- | sort > $CRAWLS
    exec sbatch --array="1-$(wc -l < $CRAWLS)%8" "$0" # eight at a time, which share the network
fi
CRAWL=$(sed -n "${SLURM_ARRAY_TASK_ID}p" $CRAWLS)
exec python fineweb.py --name "${CRAWL:?line $SLURM_ARRAY_TASK_ID of $CRAWLS is empty}" --out "all/$CRAWL" \
    --workers "${SLURM_CPUS_PER_TASK:-0}"
