#!/bin/bash
# An array of Slurm tasks, a shard and a GPU each; all write into one folder.
#
#   MANIFEST=jobs.jsonl OUT=runs/night sbatch recipes/cluster/slurm.sh
#   hyimg report runs/night
#
# Submitted again, also with another --array, tasks skip finished jobs. For one task of the array, name its shard,
# because Slurm says that it is one of one:
#
#   SHARD=4/8 MANIFEST=jobs.jsonl OUT=runs/night sbatch --array=3 recipes/cluster/slurm.sh
#
# To stop after the current step: scancel --batch --signal=TERM ID (without --batch, the signal does not reach hyimg).
# At its time limit a task stops in the same way and ends as FAILED with exit code 143. Slurm does not requeue it:
# submit it again.
#SBATCH --job-name=hyimg
#SBATCH --array=0-7
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --requeue
# A requeued task continues its log.
#SBATCH --open-mode=append
# Two minutes before the time limit, hyimg finishes the current step and keeps what is done.
#SBATCH --signal=B:TERM@120
set -euo pipefail
# exec: the signal reaches hyimg itself.
exec hyimg generate "$MANIFEST" --shard "${SHARD:-auto}" -o "$OUT" --progress plain "$@"
