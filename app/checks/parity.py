"""`samerun parity`: test by real runs that presets, numbers of processes and accumulation give the same run.

The reference is one process with the preset `cpu`, each global batch in one forward pass. Each case is a run of its own by
`samerun launch`, compared with the reference as `samerun compare` does (`app.reports.compare`). A case that did not run as
asked, stopped early or wrote too little is a failure, and so is a comparison without cases.

A recipe can amplify rounding until runs diverge, also on one process. The difference of one process from itself, with two
micro-batches per step, is the recipe's noise floor.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from app.environment.topology import Topology
from app.errors import RecipeError, RunFolderError, TopologyError, UsageError
from app.options import Parser, add_presets, add_recipe, numbers, positive, tolerance
from app.recipe import recipe_file
from app.recipe.schema import Recipe
from app.reports import past_run
from app.reports.compare import Comparison, compare
from app.reports.past_run import PastRun, print_text
from app.reports.runs import Row, write
from launch import cases, preset
from launch.cases import RunCase
from launch.schedulers import detect

_TAIL_LINES = 20
_NEAR_FLOOR = 10
"""A difference of less than so many floors is explained: rounding grows from step to step, from other sums in each run."""
_QUICK_STEPS = 3
_QUICK_SAMPLES = 32
"""Samples of a global batch for --quick, if the size of groups allows it: rules do not depend on it, but time does."""
_EXPLANATIONS = {
    True: f"the noise floor explains {{}}: less than {_NEAR_FLOOR} times the floor, with the same samples and learning rates. "
    "Either the loss of a sample depends on others of its micro-batch (as with batch normalization), on earlier forward passes "
    "or on torch's random numbers, or the recipe amplifies rounding: a lower learning rate, a warm-up, or a network without "
    "kinks (ReLU, maxima) lowers the noise floor",
    False: "the noise floor does not explain {}: something depends on the topology, such as the rank, or on a random state "
    "that differs in each process, where samples are read or batches prepared",
}
"""Why cases differ, by whether the floor is near."""
_OWN_KEYS = {"train.steps", "train.epochs", "train.max_micro_batch", "train.evaluate_every_epochs",
             "train.evaluate_every_steps", "log.every_steps"}  # fmt: skip
"""Keys that the comparison sets itself."""


@dataclass(frozen=True)
class Variant:
    """One way to run the recipe."""

    preset: str
    """Name of a shipped preset, or path of one."""
    processes: int
    accumulation: int
    """Forward passes of each process in one optimizer step."""

    def __str__(self) -> str:
        return f"{Path(self.preset).stem}-{self.processes}x{self.accumulation}"


_REFERENCE, _FLOOR = Variant("cpu", 1, 1), Variant("cpu", 1, 2)


def main(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun parity` with these arguments; 0 only if every case is the same run as the reference. Raises SamerunError."""
    options = _parser().parse_all(argv)
    own = _OWN_KEYS | ({"train.global_batch_size"} if options.quick else set())
    if given := [word for word in options.overrides if word.partition("=")[0].strip() in own]:
        raise RecipeError(f"{', '.join(given)} (command line): the comparison sets this; use --steps and --accumulation")
    if options.quick:
        options.steps, options.presets, options.processes, options.accumulation = _QUICK_STEPS, ["multi_gpu"], [2], [1]
        options.overrides.append(f"train.global_batch_size={quick_batch(options.recipe, options.overrides)}")
        environment = {**environment, "CUDA_VISIBLE_DEVICES": ""}  # two processes cannot share a GPU
    if options.out and os.path.lexists(options.out):  # runs of an earlier state of the task could be in it
        raise UsageError(f"--out {options.out} exists: choose a new folder")
    with nullcontext(options.out) if options.out else tempfile.TemporaryDirectory(prefix="samerun-parity-") as folder:
        planned, reference, floor = _plan(options, Path(folder), environment, say)
        all_cases = {case.name: case for case in (reference, *planned.values(), floor) if isinstance(case, RunCase)}
        command = ["samerun", "parity", *argv]
        stopped, failed = cases.run(list(all_cases.values()), environment, say=say, command=command, logged=True)
        if stopped is not None:
            return stopped
        if reference.name in failed:
            print_text(f"{reference.name}: {_failure(reference, failed)}")
            return 1
        first = run_of(reference, _REFERENCE, steps=options.steps)

        def compared(case: RunCase | str, variant: Variant) -> Comparison | str:
            if isinstance(case, str) or case.name in failed:
                return case if isinstance(case, str) else _failure(case, failed)
            try:
                found = compare(first, run_of(case, variant, steps=options.steps), tolerance=options.tolerance)
            except RunFolderError as error:
                return str(error)
            known = found.compared_steps
            return found if known == options.steps else f"its ledger has the samples of {known} of {options.steps} steps"

        found = {variant: compared(case, variant) for variant, case in planned.items()}
        least = compared(floor, _FLOOR)
    return report(found, least, steps=options.steps)


def _plan(
    options: argparse.Namespace, folder: Path, environment: Mapping[str, str], say: Callable[[str], None]
) -> tuple[dict[Variant, RunCase], RunCase, RunCase | str]:
    """Return the cases that can run, the reference, and the floor or why it cannot run; report the other cases."""
    recipe = recipe_file.load(options.recipe, [*options.overrides, f"train.steps={options.steps}"]).recipe
    planned: dict[Variant, RunCase] = {}
    for variant in itertools.starmap(Variant, itertools.product(options.presets, options.processes, options.accumulation)):
        case = case_of(variant, recipe, options, folder / str(variant), environment)
        if isinstance(case, str):
            say(f"skipped {variant}: {case}")
        else:
            planned[variant] = case
    if not planned:
        raise RecipeError("there is no case to compare with the reference: choose other --presets or --processes")
    reference = case_of(_REFERENCE, recipe, options, folder / "reference", environment)
    if isinstance(reference, str):
        raise RecipeError(f"the reference, {_REFERENCE}, cannot run: {reference}")
    folder.mkdir(parents=True, exist_ok=True)
    return planned, reference, planned.get(_FLOOR) or case_of(_FLOOR, recipe, options, folder / "noise-floor", environment)


def case_of(
    variant: Variant, recipe: Recipe, options: argparse.Namespace, run_dir: Path, environment: Mapping[str, str]
) -> RunCase | str:
    """Return the run of a variant, or a sentence why it cannot run. Raises PresetError if there is no such preset."""
    file = preset.load(variant.preset)
    size = recipe.train.global_batch_size
    try:
        ranks = variant.processes // file.degrees(Topology(processes_per_node=variant.processes)).processes_per_rank
    except TopologyError as error:
        return str(error)
    if size % (parts := ranks * variant.accumulation):
        return f"{size} samples (train.global_batch_size) cannot be divided by {parts}"
    each = "--processes-per-node" if detect.find(environment) else "--processes"
    argv = ["--run-dir", str(run_dir), "--recipe", options.recipe, "--preset", variant.preset, "--trackers", "none"]
    argv += ["--nodes", "1", each, str(variant.processes), *options.overrides, f"train.steps={options.steps}"]
    argv += [f"train.max_micro_batch={size // parts}", "train.skip_steps=null", "train.evaluate_every_epochs=0"]
    argv.append("log.every_steps=1")
    case = RunCase(str(variant) if run_dir.name == str(variant) else f"{run_dir.name} ({variant})", run_dir, argv)
    return "; ".join(cases.problems(case, environment)) or case


def quick_batch(name_or_path: str, overrides: Sequence[str]) -> int:
    """Return the size of the global batch for --quick. Raises RecipeError if the recipe's cannot be halved."""
    recipe = recipe_file.load(name_or_path, overrides).recipe
    size, group_size = recipe.train.global_batch_size, int(recipe.sections.group_size)
    small = 2 * group_size * max(1, _QUICK_SAMPLES // 2 // group_size)
    if size < small and size % (2 * group_size):
        raise RecipeError(f"train.global_batch_size is {size}: --quick needs a multiple of {2 * group_size}, to compare halves")
    return min(size, small)


def run_of(case: RunCase, variant: Variant, *, steps: int) -> PastRun:
    """Return a finished run. Raises RunFolderError if it is not what was asked for, or if a step is missing."""
    run = past_run.read(case.run_dir)
    if run.complaints:
        raise RunFolderError("\n".join(run.complaints))
    ran = {key: run.about.get(key) for key in ("preset", "world_size", "accumulation")}
    asked = {"preset": Path(variant.preset).stem, "world_size": variant.processes, "accumulation": variant.accumulation}
    if ran != asked:
        raise RunFolderError(f"{case.run_dir} is a run with {ran}, where {asked} was requested")
    logged = [line["step"] for line in run.metrics if isinstance(line.get("loss"), float)]
    if run.result.get("steps") != steps or logged != list(range(1, steps + 1)):
        raise RunFolderError(f"{case.run_dir} has losses of {len(logged)} steps, where steps 1 to {steps} were requested")
    return run


def _failure(case: RunCase, failed: Mapping[str, int]) -> str:
    """Return the exit code of a failed case, and the end of its output."""
    lines = case.log.read_text(errors="replace").splitlines()
    return "\n".join([f"exit code {failed[case.name]}, after these last lines:", *lines[-_TAIL_LINES:]])


def report(found: Mapping[Variant, Comparison | str], floor: Comparison | str, *, steps: int) -> int:
    """Print how the cases differ from the reference, and why if that is known; return the exit code."""
    parted = {variant: one for variant, one in found.items() if isinstance(one, Comparison) and not one.is_same}
    rows = []
    for variant, one in found.items():
        row: Row = {f"compared with {_REFERENCE}, {steps} steps": str(variant)}
        row |= {"largest loss difference": None, "at step": None, "run": "failed"}
        if isinstance(one, Comparison):
            row |= {"largest loss difference": one.losses.largest, "at step": one.losses.largest_at_step}
            row["run"] = "the same" if one.is_same else "different"
        rows.append(row)
    write(rows)
    for variant, one in found.items():
        if isinstance(one, str) or variant in parted:
            print_text(f"{variant}: {one}")
    if isinstance(floor, str):
        print_text(f"noise floor: unknown (one process compared with itself, two micro-batches per step): {floor}")
    else:
        least = floor.losses.largest
        print_text(f"noise floor: {least:.1e} (one process compared with itself, two micro-batches per step)")
        explained: dict[bool, list[str]] = {True: [], False: []}
        for variant, one in parted.items():
            if variant != _FLOOR:
                is_near = one.is_fed_the_same and not one.learnt and one.losses.largest <= _NEAR_FLOOR * least
                explained[is_near].append(str(variant))
        for is_near, variants in explained.items():
            if variants:
                print_text(_EXPLANATIONS[is_near].format(", ".join(variants)))
    return 0 if not parted and not any(isinstance(one, str) for one in found.values()) else 1


def _parser() -> Parser:
    parser = Parser("parity", "Run a recipe for a few steps under several presets and numbers of processes, one after the "
        "other. Compare losses, learning rates and samples with one process on the CPU, step by step.",
        usage="%(prog)s [options] [key=value ...]")  # fmt: skip
    add = parser.add_argument
    add_recipe(parser, "recipe values for all cases")
    add("--quick", action="store_true", help="check a task's rules in about a minute: 3 small steps on the CPU with 1 process, "
        "1 process with gradient accumulation, and 2 processes; of the other options only --recipe, --tolerance and --out "
        "apply")  # fmt: skip
    add_presets(parser)
    add("--processes", type=numbers, default=[1, 2], metavar="N,...", help="numbers of processes (default: 1,2)")
    parser.take_also("--processes", "--num_processes")
    add("--accumulation", type=numbers, default=[1], metavar="N,...",
        help="gradient accumulation: forward passes per step, such as 1,2 (default: 1)")  # fmt: skip
    add("--steps", type=positive, default=20, metavar="N", help="optimizer steps to compare (default: 20)")
    add("--tolerance", type=tolerance, metavar="NUMBER",
        help="largest relative difference between losses (default: 1e-5 in the first 20 steps, then 1e-4)")  # fmt: skip
    add("--out", metavar="PATH", help="new folder for the run folders and the output of all cases (default: they are deleted)")
    return parser
