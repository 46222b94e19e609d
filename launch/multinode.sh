#!/bin/sh
# Train on several machines with Slurm.
#     sbatch --account=A --partition=P [--nodes=N] launch/multinode.sh --preset multi_node --recipe digits [key=value ...]
# When its time is over, the run saves and the job is run again, until it is finished (samerun launch --max-requeues).
# Whole nodes with all they have. Any line is replaced by the same option before the script's name; to share nodes:
#     sbatch --oversubscribe --mem=32G --gpus-per-node=2 --cpus-per-task=8 ... launch/multinode.sh ...
#SBATCH --job-name=samerun
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
exec samerun launch "$@"
