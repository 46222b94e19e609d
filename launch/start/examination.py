"""`samerun doctor`: check this machine, or all nodes of the current job, as a run there would find them.

Starts `app.checks.doctor` as `samerun launch` would start a training. Before that the nodes meet at the run's address and port,
so that one that cannot get there is named in half a minute instead of being waited for.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from app.environment.topology import Topology
from app.errors import TopologyError
from app.options import Parser, above_zero
from launch.node_command import accelerate_argv, one_process_argv
from launch.run_module import program
from launch.schedulers import detect
from launch.start import supervise
from launch.start.rendezvous import PATIENCE_S, find_token, meet, new_token, without_token
from launch.start.resolved import add_processes, default_preset, set_processes, with_port


def doctor(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun doctor` with these arguments and return its exit code. Raises SamerunError."""
    options = _parser().parse_all(argv)
    set_processes(options, environment)
    allocation = detect.find(environment, processes=options.processes, processes_per_node=options.processes_per_node)
    topology = allocation.topology if allocation else detect.this_machine(environment, processes=options.processes)
    topology = with_port(topology, options.port)
    if allocation and allocation.start:
        added = [] if options.processes_per_node else ["--processes-per-node", str(topology.processes_per_node)]
        start = [word for word in allocation.start if word != "--label"]
        command = [*start, *program("launch.cli"), "doctor", *added, *argv]
        say(shlex.join(command))
        os.execvpe(command[0], command, {**environment, **new_token()})  # noqa: S606 - a shell would stand between
    if topology.num_nodes > 1:
        signal.signal(signal.SIGTERM, _end_with_the_first)
        job = detect.job(environment)
        key = find_token(environment, options.run_dir, job.name if job else "")
        try:
            port = meet(topology, key, timeout_s=min(options.patience, PATIENCE_S), only_port=options.port is not None)
        except TopologyError as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in `_run`
            sys.stderr.write(f"WRONG {error}\n")
            sys.stderr.flush()
            time.sleep(1.0)  # srun ends the others at once, and what it has not read by then is lost
            return 1
        topology = replace(topology, port=port)
    return _run(topology, options, environment)


def _end_with_the_first(*_: object) -> None:
    """The first node that has found something wrong ends, and srun ends the others for it: for them it is the same."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def _run(topology: Topology, options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    with tempfile.TemporaryDirectory(prefix="samerun-doctor-") as folder:
        exit_code_file = Path(folder) / "exit-code"
        arguments = ["--patience", str(options.patience), "--exit-code-file", str(exit_code_file)]
        chosen = default_preset(topology, environment)
        # Without names of hosts no line begins with one: labels would spoil the tables.
        topology, module = replace(topology, hosts=()), "app.checks.doctor"
        alone = one_process_argv(topology, chosen, arguments, environment, module=module)
        command = alone or accelerate_argv(topology, chosen, arguments, module=module)
        # What torchrun puts into TMPDIR it leaves there when it is ended, as for another node that failed.
        ended = supervise.run(command, {**without_token(environment), "TMPDIR": folder}, watched=False).exit_code
        # From here to its end Python would die of it: another node may be a moment sooner, and srun end this one.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return 1 if ended else int(exit_code_file.read_text())


def _parser() -> Parser:
    parser = Parser(
        prog="samerun doctor",
        description="Check this machine, or all nodes of the current Slurm or PBS job: connections between nodes, devices and "
        "their arithmetic, versions, and the bandwidth of all-reduce. The exit code is 0 only if nothing is wrong.",
    )
    add_processes(parser)
    parser.add_argument("--run-dir", default="runs", help="for `srun samerun doctor`: folder that all nodes can read, in which "
        "they find their token (default: runs)")  # fmt: skip
    parser.add_argument("--patience", type=above_zero, default=60.0, metavar="SECONDS", help="time limit of one phase; "
        "a rank that takes longer is reported as stuck (default: 60)")  # fmt: skip
    parser.take_accelerates_words()
    return parser
