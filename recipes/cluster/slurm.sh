#!/bin/bash
# An array of Slurm tasks, a shard and a GPU each; all write into one folder.
#
#   MANIFEST=jobs.jsonl OUT=runs/night sbatch recipes/cluster/slurm.sh
#   hyimg report runs/night
#
# Sent again, also with another --array, tasks skip what is done. One task alone is named, since Slurm tells it that it
# is one of one:  SHARD=4/8 MANIFEST=jobs.jsonl OUT=runs/night sbatch --array=3 recipes/cluster/slurm.sh
#SBATCH --job-name=hyimg
#SBATCH --array=0-7
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --requeue
# Two minutes before the end: the step that is under way is finished, and what is done is kept.
#SBATCH --signal=B:TERM@120
set -euo pipefail
# exec: the signal reaches hyimg itself.
exec hyimg generate "$MANIFEST" --shard "${SHARD:-auto}" -o "$OUT" --progress plain "$@"
