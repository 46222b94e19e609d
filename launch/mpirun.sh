#!/bin/sh
# Train as one process per GPU that mpirun starts, as Horovod's users do, from a batch script or a shell.
#     NP=8 launch/mpirun.sh --recipe digits [key=value ...]
# In a job of Slurm or PBS, mpirun knows the machines (and in PBS, NP is the lines of PBS_NODEFILE). Elsewhere name them, and the
# first as the head:
#     NP=4 MASTER_ADDR=node1 MPIRUN="mpirun --bind-to none --host node1:2,node2:2" launch/mpirun.sh --recipe digits
# With --run-dir, the run in that folder continues; without, each start is a new run.
# Without --bind-to none, Open MPI may leave each process a single core, for its data workers too.
if [ "$1" = pbs_tmrsh ]; then # called by Open MPI, as below: pbs_tmrsh HOST COMMAND...
    host=$2 && shift 2
    exec pbs_tmrsh "$host" /bin/sh -c "$*" # it starts no shell itself
fi
python=$(command -v python) || { echo "mpirun.sh: no python on the PATH: activate the environment of samerun" >&2; exit 127; }
# By its file: `python -m app.train` would look for app in the working folder first.
find='import sys; sys.path[:] = filter(None, sys.path); from launch import run_module; print(run_module.__file__)'
run_module=$("$python" -c "$find") || exit
case " $* " in *" --resume"[\ =]*) ;; *) set -- --resume auto "$@" ;; esac
if [ -n "$PBS_NODEFILE" ] && [ -z "$MPIRUN" ] && mpirun --version | grep -q "Open MPI"; then
    # Built without PBS's library, as Debian's is, it knows neither the hosts of the job nor how to reach them.
    PATH=$PATH:/opt/pbs/bin NP=${NP:-$(wc -l < "$PBS_NODEFILE")} MPIRUN="mpirun --bind-to none --machinefile $PBS_NODEFILE"
    this=$(realpath "$0")
    export PATH OMPI_MCA_plm_rsh_agent="/bin/sh $this pbs_tmrsh" OMPI_MCA_plm_rsh_no_tree_spawn=1
fi
# shellcheck disable=SC2086 # MPIRUN is a command with options, to be divided into words
exec ${MPIRUN:-mpirun --bind-to none} -np "${NP:-2}" ${MASTER_ADDR:+-x MASTER_ADDR} \
    "$python" "$run_module" app.train "$@" # by its path: ssh hands no PATH on
