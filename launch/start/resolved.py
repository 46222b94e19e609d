"""All that `samerun launch` found out about where it is and what it runs, and the commands that follow from it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.environment.degrees import Degrees
from app.environment.topology import Topology
from app.recipe.batching import BatchPlan
from app.recipe.recipe_file import LoadedRecipe
from launch import one_process, parallelism
from launch.node_command import accelerate_argv
from launch.preset import Preset
from launch.run_module import program
from launch.schedulers.job import ATTEMPT, Allocation, Job, Times


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """All that was found out and checked."""

    allocation: Allocation | None
    job: Job | None
    topology: Topology
    preset: Preset
    preset_origin: str
    recipe: str
    recipe_origin: str
    loaded: LoadedRecipe
    run_dir: str | None
    run_dir_origin: str
    plan: BatchPlan
    degrees: Degrees
    """By how much the model is divided."""
    options: argparse.Namespace
    argv: list[str]
    """As it was typed."""
    passed_on: list[str]
    """What of it is app.train's."""

    @property
    def is_task(self) -> bool:
        """Whether this process runs the `accelerate launch` of its node, and no more."""
        return self.allocation is not None and self.allocation.is_task

    @property
    def is_started_elsewhere(self) -> bool:
        """Whether the scheduler's command has to start `samerun launch` on every node."""
        return self.allocation is not None and bool(self.allocation.start)

    @property
    def writes_outcome(self) -> bool:
        """Whether the main process of the run is on this node, and trains."""
        return self.topology.node_rank == 0 and "--print-recipe" not in self.passed_on

    def accelerate_argv(self, node_rank: int | None = None, *, again: bool = False) -> list[str]:
        """Return the `accelerate launch` of this node, or of another; `again`: to go on with the run."""
        return accelerate_argv(
            self.topology,
            self.preset,
            self._app_args(again=again),
            mixed_precision=self.options.mixed_precision,
            node_rank=node_rank,
            sizes=parallelism.asked_by(self.options),
        )

    def alone(self, environment: Mapping[str, str], *, again: bool = False) -> list[str] | None:
        """Return what starts the one process of this run without its `accelerate launch`, if that is known."""
        if self.is_started_elsewhere or parallelism.asked_by(self.options):
            return None
        precision = self.options.mixed_precision
        app_args = self._app_args(again=again)
        return one_process.argv(self.topology, self.preset, app_args, environment, mixed_precision=precision)

    def _app_args(self, *, again: bool) -> list[str]:
        app_args = ["--recipe", self.recipe]
        app_args += ["--run-dir", self.run_dir] if self.run_dir else []
        resume = self.resume(again=again)
        app_args += ["--resume", resume] if resume else []
        return [*app_args, *self.passed_on]

    def command(self, *, again: bool = False) -> list[str]:
        """Return what this process starts, or what `alone` stands for; `again`: to go on with the run."""
        return self.start(again=again) if self.is_started_elsewhere else self.accelerate_argv(again=again)

    def start(self, *, again: bool = False) -> list[str]:
        """Return what starts `samerun launch` on every node; each is told what it would not find by itself."""
        assert self.allocation is not None
        told = [] if self.options.processes_per_node else ["--processes-per-node", str(self.topology.processes_per_node)]
        told += ["--run-dir", self.run_dir] if self.run_dir and not self.options.run_dir else []
        resume = self.resume(again=again)
        words = list(self.argv)
        if resume and self.options.resume not in (None, resume):  # in the place of what was said for the first start
            at = next(index for index, word in enumerate(words) if word.partition("=")[0] == "--resume")
            words[at : at + (1 if "=" in words[at] else 2)] = ["--resume", resume]
        return [*self.allocation.start, *program("launch.cli"), "launch", *told, *words]

    def resume(self, *, again: bool = False) -> str | None:
        """Return the --resume of app.train. What the user said is for the first start only, as any other goes on with it."""
        if self.run_dir is None or self.options.resume is None:
            return self.options.resume or ("auto" if self.run_dir else None)
        again = again or (self.job is not None and self.job.requeues > 0)
        return "auto" if again and Path(self.run_dir, "recipe.yaml").exists() else self.options.resume

    def with_threads(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with what torchrun would set under DeepSpeed, and say in six lines."""
        is_torchruns = self.preset.strategy == "deepspeed" and self.topology.processes_per_node > 1
        return {**({"OMP_NUM_THREADS": "1"} if is_torchruns and not self.is_started_elsewhere else {}), **environment}

    def times(self, environment: Mapping[str, str]) -> Times:
        """Return those of the job. What the environment holds comes from what started this task, or elsewhere from the user."""
        if self.job is None or (self.is_task and ATTEMPT in environment):
            return Times.of(environment)
        return self.job.times()
