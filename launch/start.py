"""`samerun launch`: find out where this is, check the run as far as it can be without torch, and become what runs it.

On one machine that is `accelerate launch`. In an allocation it starts, by the scheduler's command, `samerun launch` once on
every node, and watches over that to the end (`supervise.py`); there it becomes the `accelerate launch` of that node, when all
have met (`meeting.py`).
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from app.batching import BatchPlan
from app.recipe_file import load as load_recipe
from app.topology import Topology
from launch import find, local, meeting, preset, supervise
from launch.allocation import Allocation
from launch.command import accelerate_argv
from launch.preset import PRECISIONS, Preset


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """All that was found out and checked."""

    allocation: Allocation | None
    topology: Topology
    preset: Preset
    preset_origin: str
    recipe: str
    recipe_origin: str
    plan: BatchPlan
    options: argparse.Namespace
    app_args: list[str]
    """Arguments for app.train."""
    start: list[str]
    """What starts `samerun launch` on every node, or nothing."""

    def accelerate_argv(self, node_rank: int | None = None) -> list[str]:
        """The `accelerate launch` of this node, or of another."""
        precision = self.options.mixed_precision
        return accelerate_argv(self.topology, self.preset, self.app_args, mixed_precision=precision, node_rank=node_rank)


def launch(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun launch` with these arguments and return its exit code, unless this process becomes the run's launcher.

    Raises SamerunError.
    """
    options, passed_on = _parser().parse_known_args(argv)
    found = _find_out(options, passed_on, argv, environment)
    found.accelerate_argv()  # what cannot be is refused here, not on every node
    if found.topology.node_rank == 0:  # or each node would say the same
        _introduce(found, say)
    if options.explain:
        sys.stdout.writelines(_explanation(found))
    if options.dry_run:
        sys.stdout.writelines(_commands(found))
    if options.explain or options.dry_run:
        return 0
    if found.start:
        say(shlex.join(found.start))
        return supervise.run(found.start)
    command = replace(found, topology=_met(found, say)).accelerate_argv()
    say(shlex.join(command))
    os.execvp(command[0], command)  # noqa: S606 - becoming the launcher makes its signals and its exit code this program's
    return 0


def _met(found: _Launch, say: Callable[[str], None]) -> Topology:
    """The topology when its nodes have met: with another port, if a program is at the one made from the job's id."""
    topology = found.topology
    if topology.num_nodes == 1:
        return topology
    port = meeting.meet(topology, only_port=found.options.port is not None)
    if port != topology.port and topology.node_rank == 0:
        say(f"{topology.described('port')} is in use on {topology.hosts[0]}: the run takes {port}")
    return replace(topology, port=port)


def _find_out(options: argparse.Namespace, passed_on: list[str], argv: list[str], environment: Mapping[str, str]) -> _Launch:
    allocation = find.find(environment, processes=options.processes, processes_per_node=options.processes_per_node)
    chosen = preset.load(options.preset) if options.preset else None
    topology = allocation.topology if allocation else _this_machine(chosen, options.processes, environment)
    if options.port is not None:
        topology = replace(topology, port=options.port, origins={**topology.origins, "port": "--port"})
    origin = "--preset"
    if chosen is None:
        chosen, origin = default_preset(topology, environment), "chosen for these processes; --preset says otherwise"
    app_args = ["--recipe", options.recipe or "digits"]
    app_args += ["--run-dir", options.run_dir] if options.run_dir else []
    start: list[str] = []
    if allocation and allocation.start:
        told = [] if options.processes_per_node else ["--processes-per-node", str(topology.processes_per_node)]
        start = [*allocation.start, sys.executable, "-m", "launch.cli", "launch", *told, *argv]
    recipe = options.recipe or "digits"
    # What every process would refuse after its slow imports is refused now.
    overrides = [word for word in passed_on if "=" in word and not word.startswith("-")]
    return _Launch(
        allocation=allocation,
        topology=topology,
        preset=chosen,
        preset_origin=origin,
        recipe=recipe,
        recipe_origin="--recipe" if options.recipe else "default",
        plan=BatchPlan.of(load_recipe(recipe, overrides).recipe, topology.world_size),
        options=options,
        app_args=[*app_args, *passed_on],
        start=start,
    )


def _this_machine(chosen: Preset | None, processes: int | None, environment: Mapping[str, str]) -> Topology:
    if chosen and chosen.is_single_process and processes is None:
        return local.find(environment, processes=1, origin=f"preset {chosen.name}")
    return local.find(environment, processes=processes)


def default_preset(topology: Topology, environment: Mapping[str, str]) -> Preset:
    """Return the preset for these processes where the user names none."""
    if topology.num_nodes > 1:
        return preset.load("multi_node")
    if topology.world_size > 1:
        return preset.load("multi_gpu")
    # Nodes may have accelerators that this machine has not; single_gpu runs on the CPU where there is none.
    has_accelerator = bool(topology.hosts) or local.count_accelerators(environment)[0] > 0
    return preset.load("single_gpu" if has_accelerator else "cpu")


def _introduce(found: _Launch, say: Callable[[str], None]) -> None:
    say(f"preset {found.preset.name} ({found.preset_origin}), {found.topology.described('processes_per_node')}")
    say(str(found.plan))
    if found.start and found.allocation:
        where = f"{found.allocation.scheduler} on {_listed(found.topology.hosts)}"
        say(f"{where}; {found.allocation.start_origin}, so {found.start[0]} starts it on each node")


def _listed(hosts: tuple[str, ...]) -> str:
    shown = ", ".join(hosts[:8])
    return shown if len(hosts) <= 8 else f"{shown} and {len(hosts) - 8} more"


def _commands(found: _Launch) -> Iterator[str]:
    """The lines of --dry-run: the command that this process would become and, across an allocation, each node's own."""
    if not found.start:
        yield shlex.join(found.accelerate_argv()) + "\n"
        return
    yield shlex.join(found.start) + "\n"
    quote = functools.lru_cache(shlex.quote)  # of thousands of nodes, most words are the same
    for node_rank, host in enumerate(found.topology.hosts):
        yield f"# node {node_rank}, {host}:\n{' '.join(map(quote, found.accelerate_argv(node_rank)))}\n"


def _explanation(found: _Launch) -> Iterator[str]:
    """The lines of --explain: name, value and origin of everything that was decided."""
    topology, plan = found.topology, found.plan
    names = ["num_nodes", "processes_per_node", "node_rank", "head_address", "port", "threads_per_process"]
    rows = [(name, getattr(topology, name), topology.origins.get(name, "default")) for name in names]
    where = found.allocation.scheduler if found.allocation else "this machine"
    rows = [("runs in", where, "its variables" if found.allocation else "no scheduler's variables"), *rows]
    if topology.hosts:
        rows.append(("hosts", _listed(topology.hosts), topology.origins.get("hosts", "default")))
    rows += [
        ("world_size", topology.world_size, "num_nodes x processes_per_node"),
        ("preset", found.preset.name, found.preset_origin),
        ("recipe", found.recipe, found.recipe_origin),
        ("global_batch_size", plan.global_batch_size, "recipe, train.global_batch_size"),
        ("micro_batch", plan.micro_batch, "global_batch_size / (world_size x accumulation)"),
        ("accumulation", plan.accumulation, "as few passes as train.max_micro_batch allows"),
    ]
    if found.start and found.allocation:
        rows.append(("started by", found.start[0], found.allocation.start_origin))
    width = min(max(len(str(value)) for _, value, _ in rows), 32)  # long lists of hosts stick out
    yield from (f"{name:<20} {value!s:<{width}}  {origin}".rstrip() + "\n" for name, value, origin in rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samerun launch",
        usage="%(prog)s [options] [app.train options] [key=value ...]",
        description="Train a recipe, on this machine or across the allocation of the scheduler's job that this is part of: "
        "check it, print the command that runs it, and become it.",
        epilog="Other options and key=value go to app.train; `python -m app.train --help` lists them and all recipe keys.",
        allow_abbrev=False,
    )
    parser.add_argument("--preset", help="name of a shipped preset, or path of an Accelerate config file (default: multi_node "
                        "for several nodes, multi_gpu for several processes on one, else single_gpu, or cpu where there is "
                        "no accelerator)")  # fmt: skip
    parser.add_argument("--processes", type=int, help="processes on this machine (default: one per accelerator, at least one)")
    parser.add_argument("--processes-per-node", type=int, metavar="N", help="processes on each node of an allocation (default: "
                        "one per GPU; without GPUs, the tasks per node that the job asked for)")  # fmt: skip
    parser.add_argument("--port", type=int, help="TCP port on node 0, where the processes meet (default: made from the job's "
                        "id; on one node any that is free)")  # fmt: skip
    parser.add_argument("--recipe", help="name of a shipped recipe, or path of a YAML file (default: digits)")
    parser.add_argument("--run-dir", help="folder for all that the run writes (default: runs/<recipe>-<time>)")
    parser.add_argument("--mixed-precision", choices=PRECISIONS, help="instead of the preset's, which is fp32 in those shipped")
    parser.add_argument("--dry-run", action="store_true", help="check all, print the command of every node, and stop")
    parser.add_argument("--explain", action="store_true", help="print every value and where it came from, and stop")
    return parser
