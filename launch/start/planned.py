"""What the launcher, which has no torch, says about a run's memory: from the cached plan of its recipe."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from app.place import host_memory
from app.place.degrees import Degrees
from app.place.host_memory import HostMemory
from app.place.topology import Topology
from app.planning import devices, kept, verdict
from app.planning.devices import Device
from app.planning.kept import Kept
from app.recipe.batching import BatchPlan
from app.recipe.schema import Recipe
from launch import cooperation
from launch.preset import Preset
from launch.start.resolved import Resolved

_LARGE = 1e9
"""Smallest model, in parameters, for which a missing plan is mentioned."""
_PATIENCE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch, as far as it decides what memory it takes."""

    recipe: Recipe
    name: str
    """What the recipe is called on the command line."""
    preset: Preset
    topology: Topology
    degrees: Degrees
    precision: str

    @property
    def way(self) -> Kept:
        """How it runs, by the words of a plan, without what it takes."""
        strategy = cooperation.strategy(self.preset)
        if strategy == "ddp" and self.topology.world_size == 1:
            strategy = "single"
        return Kept(
            strategy=strategy,
            data_ranks=self.topology.world_size // self.degrees.tensor_parallel,
            replicas=self.degrees.replicas,
            tensor_parallel=self.degrees.tensor_parallel,
            precision=self.precision,
            checkpoint_activations=self.recipe.train.checkpoint_activations,
            preset=self.preset.name,
            always=0,
            totals=(),
        )


def introduce(resolved: Resolved, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Say what is to be said of a launch before it starts."""
    for note in notes(_launch(resolved), environment, of_this_machine, host_memory.find()):
        say(note)


def after_lack_of_memory(resolved: Resolved, environment: Mapping[str, str]) -> str:
    """Return what is said after a process was ended for lack of memory: what the plan said, and what to change."""
    launch = _launch(resolved)
    # The kernel kills for the host's memory, with GPUs too: offloading to it, or more devices in it, would not help.
    return verdict.ended(kept.read(launch.recipe, environment), launch.way, resolved.plan.micro_batch, on_cpu=True)


def _launch(resolved: Resolved) -> Launch:
    return Launch(
        recipe=resolved.loaded.recipe,
        name=resolved.recipe,
        preset=resolved.preset,
        topology=resolved.topology,
        degrees=resolved.degrees,
        precision=resolved.options.mixed_precision or resolved.preset.mixed_precision,
    )


def notes(
    launch: Launch,
    environment: Mapping[str, str],
    find: Callable[[Mapping[str, str]], Device | None],
    host: HostMemory | None = None,
) -> Iterator[str]:
    """Yield a sentence on a run that will not fit, or on a large one of which nothing was planned.

    `find` tells the device, where that is known; `host` is the memory of each node.
    """
    plan, wanted = kept.read(launch.recipe, environment), launch.way
    planned = plan.find(wanted) if plan else None
    if plan is None or planned is None:
        if (size := _parameters(launch.recipe)) > _LARGE:
            which = f"--recipe {launch.name} --presets {launch.preset.name} --devices {launch.topology.world_size}"
            yield f"this run was not planned ({size / 1e9:.1f} B parameters): `samerun plan {which}` shows whether it fits"
    elif device := find(environment):
        batch = BatchPlan.of(launch.recipe, wanted.data_ranks)
        sentence = verdict.too_large(plan, wanted, batch.micro_batch, memory=device.memory, device=device.name)
        on_host = host and verdict.too_large_for_host(
            planned, launch.topology.processes_per_node, memory=host.limit, where=host.origin
        )
        yield from filter(None, (sentence, on_host))


def of_this_machine(environment: Mapping[str, str]) -> Device | None:
    """Return the smallest GPU of this machine, as nvidia-smi tells; None: there is none, or it does not tell."""
    command = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if command is None:
        return None
    words = [command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_PATIENCE_S)
        return devices.of_nvidia_smi(asked.stdout.splitlines())
    return None


def _parameters(recipe: Recipe) -> float:
    """About how many a network has whose width and depth the recipe says: 12 L H^2 of its blocks. 0: not known."""
    model = getattr(recipe.sections, "model", None)
    width, depth = getattr(model, "hidden_size", None), getattr(model, "layers", None)
    return 12.0 * depth * width**2 if width and depth else 0.0
