#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4

# Single quotes: the shell of each task fills in SLURM_PROCID.
export GPUS_PER_NODE=4
export HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)

srun bash -c 'accelerate launch \
    --num_processes $((SLURM_NNODES * GPUS_PER_NODE)) --num_machines $SLURM_NNODES \
    --machine_rank $SLURM_PROCID --main_process_ip $HEAD --main_process_port 6000 \
    steps.py --max_train_steps 12'
