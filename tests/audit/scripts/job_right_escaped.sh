#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4

# The backslash keeps SLURM_NODEID for the shell of each task.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun bash -c "accelerate launch --multi_gpu --num_machines $SLURM_NNODES --num_processes 8 \
    --machine_rank \$SLURM_NODEID --main_process_ip $MASTER_ADDR --main_process_port 29500 \
    epochs.py --num_epochs 2"
