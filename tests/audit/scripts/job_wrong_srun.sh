#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=02:00:00

# Each node is given machine rank 0.
source activate train
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun accelerate launch --multi_gpu --num_machines 2 --num_processes 8 --machine_rank 0 \
    --main_process_ip "$MASTER_ADDR" --main_process_port 29500 epochs.py --num_epochs 2
