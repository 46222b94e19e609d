"""What `samerun scale` measures: the description of a sweep, its cases, and the recipe values that each case runs with.

The folder of a sweep holds scale.json, which is its description, recipe.yaml, which is the recipe of all its cases, and in
cases/ a run folder for each case, with the output of the case as CASE.log and, where it did not go well or is a job,
CASE.json beside it. A folder belongs to one recipe, length and kind of scaling; sizes and repeats may come later.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from app.errors import PresetError, RecipeError, RunFolderError, TopologyError
from app.place.topology import Topology
from app.recipe import recipe_file
from app.recipe.batching import BatchPlan
from app.recipe.schema import Recipe
from app.record import run_folder
from launch import parallelism
from launch import preset as presets

Scaling = Literal["strong", "weak"]

DESCRIPTION, RECIPE, CASES = "scale.json", "recipe.yaml", "cases"
OWN_KEYS = {
    "train.steps": "--steps",
    "train.epochs": "--steps",
    "train.evaluate_every_epochs": None,
    "train.evaluate_every_steps": None,
    "log.every_steps": "--warm-up-steps",
    "checkpoint.every_steps": None,
    "checkpoint.every_minutes": None,
    "checkpoint.keep_best": None,
}
"""Recipe keys that the sweep sets itself, and the option that says the same, if any."""


@dataclass(frozen=True)
class Size:
    """A number of devices, and how they cooperate."""

    preset: str
    """Name of a shipped preset, or path of one."""
    nodes: int
    processes: int
    """Processes, and so devices, on each node."""

    @property
    def devices(self) -> int:
        """All processes."""
        return self.nodes * self.processes

    def __str__(self) -> str:
        return f"{Path(self.preset).stem}-{self.nodes}x{self.processes}"


@dataclass(frozen=True)
class Case:
    """One run of a size."""

    size: Size
    repeat: int
    """From 1."""
    scaling: Scaling

    def __str__(self) -> str:
        return f"{self.size}{'-weak' if self.scaling == 'weak' else ''}-{self.repeat}"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The description of a sweep."""

    recipe: str
    """As it was given: a name, or a path."""
    overrides: tuple[str, ...]
    recipe_digest: str
    scaling: Scaling
    """strong: the global batch stays. weak: it is the recipe's times the number of processes."""
    steps: int
    """Steps that are measured."""
    warm_up_steps: int
    """Steps before them."""
    presets: tuple[str, ...]
    nodes: tuple[int, ...]
    processes: tuple[int, ...]
    """On each node."""
    repeats: int

    @property
    def sizes(self) -> list[Size]:
        """All of them, the smallest of a preset first."""
        found = [Size(*one) for one in itertools.product(self.presets, self.nodes, self.processes)]
        return sorted(found, key=lambda size: (self.presets.index(size.preset), size.devices, size.nodes))

    @property
    def cases(self) -> list[Case]:
        """All of them, in the order in which they run: each size once before one is repeated, so that drift hits all alike."""
        return [Case(size, repeat, self.scaling) for repeat in range(1, self.repeats + 1) for size in self.sizes]


@dataclass(frozen=True)
class Folder:
    """The folder of a sweep."""

    path: Path
    sweep: Sweep
    recipe: Recipe
    """That of all cases, before `own_overrides`."""
    about: Mapping[str, Any]
    """All of scale.json."""

    def run_dir(self, case: Case) -> Path:
        """Return the run folder of a case."""
        return self.path / CASES / str(case)

    def beside(self, case: Case, ending: str) -> Path:
        """Return the file CASE.`ending` beside its run folder."""
        return self.path / CASES / f"{case}.{ending}"

    def own_overrides(self, size: Size) -> list[str]:
        """Return what the sweep sets in the recipe of a case, as key=value."""
        own = [f"train.steps={self.sweep.warm_up_steps + self.sweep.steps}", "train.evaluate_every_epochs=0"]
        # A line when the warm-up is over; the last step always has one.
        own += [f"log.every_steps={self.sweep.warm_up_steps}"]
        own += ["checkpoint.every_steps=none", "checkpoint.every_minutes=none", "checkpoint.keep_best=false"]
        if self.sweep.scaling == "weak":
            own.append(f"train.global_batch_size={self.recipe.train.global_batch_size * size.devices}")
        return own

    def expected_digest(self, size: Size) -> str:
        """Return the digest of the recipe that a case of this size must have run."""
        batch = self.recipe.train.global_batch_size * (size.devices if self.sweep.scaling == "weak" else 1)
        steps = self.sweep.warm_up_steps + self.sweep.steps
        train = replace(self.recipe.train, epochs=None, steps=steps, global_batch_size=batch)
        return recipe_file.digest(replace(self.recipe, train=train))

    def is_legal(self, devices: int) -> bool:
        """Return whether the global batch can be divided among so many processes."""
        try:
            return self.sweep.scaling == "weak" or BatchPlan.of(self.recipe, devices) is not None
        except RecipeError:
            return False

    def why_not(self, size: Size) -> str:
        """Return why a size cannot run, as far as that is known before; empty if it can."""
        try:
            preset = presets.load(size.preset)
            if preset.is_single_process and size.devices > 1:
                return f"preset {size.preset} starts one process, and this size has {size.devices}"
            where = Topology(num_nodes=size.nodes, processes_per_node=size.processes, head_address="the-first-node", port=1)
            ranks = parallelism.data_ranks(preset.name, preset.sizes, where)
            if self.sweep.scaling == "strong":
                BatchPlan.of(self.recipe, ranks, tensor_parallel=size.devices // ranks)
        except (PresetError, RecipeError, TopologyError) as error:
            return str(error)
        return ""


def open_for(path: Path, sweep: Sweep, about: Mapping[str, Any]) -> Folder:
    """Return `path` as the folder of this sweep, of which `about` tells the rest; nothing is written yet.

    Raises RunFolderError where it holds another sweep or something else, RecipeError.
    """
    recipe = recipe_file.load(sweep.recipe, sweep.overrides).recipe
    if (path / DESCRIPTION).exists():
        _refuse_another(read(path), sweep)
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunFolderError(f"{path} (--out) is not the folder of a sweep (it has no {DESCRIPTION}): choose a new folder.")
    return Folder(path, sweep, recipe, {**asdict(sweep), **about})


def write(folder: Folder) -> None:
    """Make the folder, and write down what it is of. Raises RunFolderError."""
    try:
        (folder.path / CASES).mkdir(parents=True, exist_ok=True)
        run_folder.write_text(folder.path / RECIPE, recipe_file.to_yaml(folder.recipe))
        run_folder.write_json(folder.path / DESCRIPTION, folder.about)
    except OSError as error:
        raise RunFolderError(f"{folder.path} (--out) cannot be written: {error.strerror}. Choose another folder.") from error


def read(path: Path) -> Folder:
    """Return the folder of a sweep as it is. Raises RunFolderError, RecipeError."""
    about = run_folder.read_json(path / DESCRIPTION)
    names = [field.name for field in fields(Sweep)]
    if missing := [name for name in names if name not in about]:
        raise RunFolderError(f"{path / DESCRIPTION} is broken: it has no {', '.join(missing)}.")
    values: dict[str, Any] = {name: tuple(about[name]) if isinstance(about[name], list) else about[name] for name in names}
    return Folder(path, Sweep(**values), recipe_file.load(str(path / RECIPE)).recipe, about)


def _refuse_another(there: Folder, asked: Sweep) -> None:
    before, differing = there.sweep, []
    for name, option in (("scaling", "--strong, --weak"), ("steps", "--steps"), ("warm_up_steps", "--warm-up-steps")):
        if getattr(before, name) != getattr(asked, name):
            differing.append(f"{name.replace('_', ' ')} {getattr(before, name)}, now {getattr(asked, name)} ({option})")
    if before.recipe_digest != asked.recipe_digest:
        was, now = (" ".join((sweep.recipe, *sweep.overrides)) for sweep in (before, asked))
        differing.append(f"the recipe {was}, now {now}{', which has changed' if was == now else ''}")
    if differing:
        raise RunFolderError(
            f"{there.path} (--out) belongs to another sweep: {'; '.join(differing)}. Choose another --out, or "
            "request the same sweep."
        )
