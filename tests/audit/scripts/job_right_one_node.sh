#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=4

# One node has machine rank 0.
srun accelerate launch --multi_gpu --num_machines 1 --num_processes 4 --machine_rank 0 split.py
