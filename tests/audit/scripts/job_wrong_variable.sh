#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=8

# LAUNCHER holds the machine rank of the batch shell, 0, on each node.
set -e
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$(hostname)" hostname --ip-address)
export LAUNCHER="accelerate launch \
    --num_machines $SLURM_NNODES \
    --num_processes $((SLURM_NNODES * 8)) \
    --machine_rank $SLURM_PROCID \
    --main_process_ip $head_node_ip \
    --main_process_port 29500"
export SCRIPT="tokens.py --epochs 2"

srun $LAUNCHER $SCRIPT
