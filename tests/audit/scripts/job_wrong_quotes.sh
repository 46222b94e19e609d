#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --output=%x_%j.out

# The batch shell fills in its own SLURM_PROCID, 0, before srun starts the tasks.
GPUS_PER_NODE=4
HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)

srun bash -c "accelerate launch \
    --num_processes $((SLURM_NNODES * GPUS_PER_NODE)) --num_machines $SLURM_NNODES \
    --machine_rank $SLURM_PROCID --main_process_ip $HEAD --main_process_port 6000 \
    steps.py --max_train_steps 12"
