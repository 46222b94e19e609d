#!/bin/sh
# Train as one process per GPU that mpirun starts, as Horovod's users do, from a batch script or a shell:
#     NP=8 launch/mpirun.sh --recipe digits [key=value ...]
# In a job of Slurm, PBS or Grid Engine, mpirun knows the machines. Elsewhere name them, and the first as the head:
#     NP=4 MASTER_ADDR=node1 MPIRUN="mpirun --host node1:2,node2:2" launch/mpirun.sh --recipe digits
# shellcheck disable=SC2086 # MPIRUN is a command with options, to be divided into words
exec ${MPIRUN:-mpirun} -np "${NP:-2}" ${MASTER_ADDR:+-x MASTER_ADDR} python -m app.train "$@"
