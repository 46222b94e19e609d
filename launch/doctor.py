"""`samerun doctor`: examine this machine, or the allocation that this is part of, as a run there would find it.

Starts `app.doctor` as `samerun launch` would start a training. Before that the nodes meet at the run's address and port,
so that one that cannot get there is named in half a minute instead of being waited for.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from app.errors import TopologyError
from app.topology import Topology
from launch import find, local
from launch.command import accelerate_argv
from launch.start import default_preset

_MEETING_S = 30.0
"""Longest time from the first node that is ready to the last."""


def doctor(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun doctor` with these arguments and return its exit code. Raises SamerunError."""
    options = _parser().parse_args(argv)
    allocation = find.find(environment, processes=options.processes, processes_per_node=options.processes_per_node)
    topology = allocation.topology if allocation else local.find(environment, processes=options.processes)
    if options.port is not None:
        topology = replace(topology, port=options.port, origins={**topology.origins, "port": "--port"})
    if allocation and allocation.start:
        told = [] if options.processes_per_node else ["--processes-per-node", str(topology.processes_per_node)]
        # A label in front of every line would spoil the JSON.
        start = [word for word in allocation.start if not (options.json and word == "--label")]
        command = [*start, sys.executable, "-m", "launch.cli", "doctor", *told, *argv]
        say(shlex.join(command))
        os.execvp(command[0], command)  # noqa: S606 - a shell would stand between
    if topology.num_nodes > 1:
        meet(topology, timeout_s=min(options.patience, _MEETING_S))
    return _run(topology, options, environment)


def _run(topology: Topology, options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    with tempfile.TemporaryDirectory(prefix="samerun-doctor-") as folder:
        exit_code_file = Path(folder) / "exit-code"
        arguments = ["--run-dir", options.run_dir, "--patience", str(options.patience), "--exit-code-file", str(exit_code_file)]
        arguments += ["--json"] if options.json else []
        command = accelerate_argv(topology, default_preset(topology, environment), arguments, module="app.doctor")
        ended = subprocess.run(command, check=False).returncode
        return ended or int(exit_code_file.read_text())


def meet(topology: Topology, *, timeout_s: float) -> None:
    """Wait until every node has reached node 0 at the run's port. Raises TopologyError on all, naming those that did not.

    Node 0 listens there as the run's would, the others try until the time is over: they may start earlier.
    """
    if topology.node_rank == 0:
        _await_others(topology, timeout_s)
    else:
        _reach_head(topology, timeout_s)


def _await_others(topology: Topology, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(socket.create_server(("", topology.port), backlog=topology.num_nodes))
        except OSError as error:
            raise TopologyError(
                f"{topology.described('port')} cannot be listened at on {topology.head_address}, node 0: {os.strerror(error.errno or 0)}. "
                "Choose a free one with --port N"
            ) from error
        arrived: dict[int, socket.socket] = {}
        while len(arrived) < topology.num_nodes - 1 and (left_s := deadline_s - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                visitor = stack.enter_context(listener.accept()[0])
                visitor.settimeout(2.0)
                node_rank = int(visitor.recv(16))
            except (TimeoutError, ValueError, ConnectionError):  # the time is over, or somebody else called
                continue
            arrived[node_rank] = visitor
        missing = [_name(topology, rank) for rank in range(1, topology.num_nodes) if rank not in arrived]
        verdict = _missing_sentence(topology, missing, timeout_s) if missing else "all here"
        for visitor in arrived.values():
            visitor.sendall(verdict.encode())
    if missing:
        raise TopologyError(verdict)


def _missing_sentence(topology: Topology, missing: list[str], timeout_s: float) -> str:
    shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return (
        f"{shown} did not reach {topology.head_address}:{topology.port} (head_address: "
        f"{topology.origins.get('head_address', 'default')}; port: {topology.origins.get('port', 'default')}) in "
        f"{timeout_s:.0f} s: see what that says of itself, or do without: --exclude={','.join(missing)}"
    )


def _reach_head(topology: Topology, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((topology.head_address, topology.port), timeout=timeout_s) as head:
                head.sendall(f"{topology.node_rank}".encode())
                head.settimeout(timeout_s + 5)
                verdict = head.recv(2**16).decode()
            break
        except OSError as error:  # not there yet, no such name, no way
            if time.monotonic() > deadline_s:
                raise TopologyError(
                    f"{socket.gethostname()}, node {topology.node_rank}, cannot reach node 0 in {timeout_s:.0f} s: "
                    f"{topology.described('head_address')}, {topology.described('port')}, {error}. If nodes have other names "
                    "in the fast network, set SAMERUN_HOST_SUFFIX; if a firewall is between, choose another --port"
                ) from error
            time.sleep(0.2)
    if verdict != "all here":
        raise TopologyError(verdict or f"node 0, {topology.head_address}, ended before all nodes were there: see what it says")


def _name(topology: Topology, node_rank: int) -> str:
    return topology.hosts[node_rank] if topology.hosts else f"node {node_rank}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samerun doctor",
        description="Examine this machine, or all nodes of the scheduler's job that this is part of: devices, sums, clocks, "
        "links, versions and the run folder. The exit code is 0 only if nothing is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int, help="processes on this machine (default: one per accelerator, at least one)")
    parser.add_argument("--processes-per-node", type=int, metavar="N", help="processes on each node of an allocation (default: "
                        "one per GPU; without GPUs, the tasks per node that the job asked for)")  # fmt: skip
    parser.add_argument(
        "--port", type=int, help="TCP port on node 0, where the processes meet (default: made from the job's id)"
    )
    parser.add_argument("--run-dir", default="runs", help="folder that a run would write to (default: runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--patience", type=float, default=60.0, metavar="SECONDS", help="longest time of one measurement; then "
                        "a rank is stuck (default: 60)")  # fmt: skip
    return parser
