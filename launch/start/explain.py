"""What `samerun launch` prints before it starts a run: --dry-run, --explain, and the lines that it always prints."""

from __future__ import annotations

import functools
import shlex
import time
from collections.abc import Callable, Iterator, Mapping

from app.environment.degrees import DERIVED
from app.environment.topology import listed
from launch import parallelism
from launch.start.resolved import Resolved


def introduce(resolved: Resolved, say: Callable[[str], None]) -> None:
    """Say what is run, and where."""
    say(f"preset {resolved.preset.name} ({resolved.preset_origin}), {resolved.topology.described('processes_per_node')}")
    say(str(resolved.plan))
    if resolved.allocation and resolved.allocation.start:
        where = f"{resolved.allocation.scheduler} on {listed(resolved.topology.hosts)}"
        say(f"{where}; {resolved.allocation.start_origin}, so {resolved.allocation.start[0]} starts it on each node")


def commands(resolved: Resolved) -> Iterator[str]:
    """Yield the lines of --dry-run: the command that this process would start and, across an allocation, each node's own."""
    yield shlex.join(resolved.command()) + "\n"
    if not resolved.is_started_elsewhere:
        return
    quote = functools.lru_cache(shlex.quote)  # of thousands of nodes, most words are the same
    for node_rank, host in enumerate(resolved.topology.hosts):
        yield f"# node {node_rank}, {host}:\n{' '.join(map(quote, resolved.accelerate_argv(node_rank)))}\n"


def explanation(resolved: Resolved, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of --explain: name, value and origin of everything that was decided."""
    topology, plan = resolved.topology, resolved.plan
    names = ["num_nodes", "processes_per_node", "node_rank", "head_address", "port", "threads_per_process"]
    rows = [(name, getattr(topology, name), topology.origins.get(name, "default")) for name in names]
    where = resolved.allocation.scheduler if resolved.allocation else "this machine"
    rows = [("runs in", where, "its variables" if resolved.allocation else "no scheduler's variables"), *rows]
    if topology.hosts:
        rows.append(("hosts", listed(topology.hosts), topology.origins.get("hosts", "default")))
    divide = "world_size" if plan.tensor_parallel == 1 else "data_ranks"
    rows += [
        ("world_size", topology.world_size, "num_nodes x processes_per_node"),
        *_rows_of_degrees(resolved),
        ("preset", resolved.preset.name, resolved.preset_origin),
        ("recipe", resolved.recipe, resolved.recipe_origin),
        ("global_batch_size", plan.global_batch_size, "recipe, train.global_batch_size"),
        ("micro_batch", plan.micro_batch, f"global_batch_size / ({divide} x accumulation)"),
        ("accumulation", plan.accumulation, "as few passes as train.max_micro_batch allows"),
    ]
    rows += _rows_of_time(resolved, environment)
    if resolved.allocation and resolved.allocation.start:
        rows.append(("started by", resolved.allocation.start[0], resolved.allocation.start_origin))
    width = min(max(len(str(value)) for _, value, _ in rows), 32)  # long lists of hosts stick out
    yield from (f"{name:<20} {value!s:<{width}}  {origin}".rstrip() + "\n" for name, value, origin in rows)


def _rows_of_degrees(resolved: Resolved) -> Iterator[tuple[str, object, str]]:
    """How the model is divided otherwise than over all processes."""
    degrees, world_size = resolved.degrees, resolved.topology.world_size
    if degrees.tensor_parallel > 1:
        yield "tensor_parallel", degrees.tensor_parallel, _origin_of_size(resolved, "tp_size")
    divided = " / tensor_parallel" if degrees.tensor_parallel > 1 else ""
    yield "data_ranks", resolved.plan.data_ranks, f"world_size{divided}"
    if degrees.replicas > 1:
        origin = _origin_of_size(resolved, "dp_replicate_size")
        yield "replicas", degrees.replicas, f"{origin}; each is sharded over {world_size // degrees.replicas} processes"


def _origin_of_size(resolved: Resolved, name: str) -> str:
    if name in parallelism.asked_by(resolved.options):
        return parallelism.OPTIONS[name]
    derived = ", from the topology" if resolved.preset.sizes[name] == DERIVED else ""
    return f"preset {resolved.preset.name}{derived}"


def _rows_of_time(resolved: Resolved, environment: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    """Where the run goes on, and until when it may run."""
    yield "run_dir", resolved.run_dir or "-", resolved.run_dir_origin
    yield "resume", resolved.resume() or "never", "--resume" if resolved.options.resume else "resumes the run in run_dir"
    times = resolved.times(environment)
    for name, moment_s in (("submitted", times.submitted_s), ("started", times.started_s), ("ends", times.ends_s)):
        if moment_s is not None or name == "ends":
            shown = "not known" if moment_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment_s))
            yield name, shown, times.origin
