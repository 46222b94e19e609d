#!/bin/sh
# Train as one process per GPU that mpirun starts, as Horovod's users do, from a batch script or a shell.
#     NP=8 launch/mpirun.sh --recipe digits [key=value ...]
# In a job of Slurm or PBS, mpirun knows the machines. Elsewhere name them, and the first as the head:
#     NP=4 MASTER_ADDR=node1 MPIRUN="mpirun --bind-to none --host node1:2,node2:2" launch/mpirun.sh --recipe digits
# With --run-dir, what is in that folder goes on; without, each start is a new run.
# Without --bind-to none, Open MPI may leave each process a single core, for its data workers too.
python=$(command -v python) || { echo "mpirun.sh: no python on the PATH: activate the environment of samerun" >&2; exit 127; }
# By its file: `python -m app.train` would look for app in the working folder first.
find='import sys; sys.path[:] = filter(None, sys.path); from launch import run_module; print(run_module.__file__)'
run_module=$("$python" -c "$find") || exit
# shellcheck disable=SC2086 # MPIRUN is a command with options, to be divided into words
exec ${MPIRUN:-mpirun --bind-to none} -np "${NP:-2}" ${MASTER_ADDR:+-x MASTER_ADDR} \
    "$python" "$run_module" app.train --resume auto "$@" # by its path: ssh hands no PATH on
