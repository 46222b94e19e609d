"""`samerun COMMAND ...`: the one command. Each subcommand is imported only when it is called, so `--help` is at once.

A mistake of the user ends the program with one sentence on stderr and the exit code of its error (`app/errors.py`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from app.errors import SamerunError

if TYPE_CHECKING:
    from app.topology import Topology
    from launch.preset import Preset


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in _COMMANDS:
        _parser().parse_args(arguments or ["--help"])  # ends the program: with the help, or naming what is not a command
    try:
        return _COMMANDS[arguments[0]][0](arguments[1:])
    except SamerunError as error:
        _say(f"{type(error).__name__}: {error}")
        return error.exit_code


def _launch(argv: list[str]) -> int:
    """Check the run as far as it can be without torch, then become the `accelerate launch` that runs it."""
    from launch.command import accelerate_argv

    options, passed_on = _launch_parser().parse_known_args(argv)
    preset, topology = _choose(options.preset, options.processes)
    app_args = ["--recipe", options.recipe]
    app_args += ["--run-dir", options.run_dir] if options.run_dir else []
    command = accelerate_argv(topology, preset, [*app_args, *passed_on], mixed_precision=options.mixed_precision)
    _check_recipe(options.recipe, [word for word in passed_on if "=" in word and not word.startswith("-")], topology)
    if not options.dry_run:
        _say(shlex.join(command))
        # Becoming the launcher, not starting it, makes its signals and its exit code this program's.
        os.execvp(command[0], command)  # noqa: S606 - a shell would stand between
    sys.stdout.write(shlex.join(command) + "\n")
    return 0


def _choose(preset_name: str | None, processes: int | None) -> tuple[Preset, Topology]:
    """Return what was asked for, filled up with what this machine and the number of processes suggest."""
    from launch import local, preset

    chosen = preset.load(preset_name) if preset_name else None
    if chosen and chosen.is_single_process and processes is None:
        topology = local.find(os.environ, processes=1, origin=f"preset {chosen.name}")
    else:
        topology = local.find(os.environ, processes=processes)
    why = "--preset"
    if chosen is None:
        single = "single_gpu" if local.count_accelerators(os.environ)[0] else "cpu"
        chosen = preset.load("multi_gpu" if topology.world_size > 1 else single)
        why = "chosen for this number of processes; --preset says otherwise"
    _say(f"preset {chosen.name} ({why}), {topology.described('processes_per_node')}")
    return chosen, topology


def _check_recipe(name_or_path: str, overrides: list[str], topology: Topology) -> None:
    """Refuse now what every process would refuse after its slow imports, and say how the batch is divided."""
    from app import recipe_file
    from app.batching import BatchPlan

    recipe = recipe_file.load(name_or_path, overrides).recipe
    plan = BatchPlan.fit(
        global_batch_size=recipe.train.global_batch_size,
        world_size=topology.world_size,
        max_micro_batch=recipe.train.max_micro_batch,
        even=recipe.augment.mixes_pairs,
    )
    _say(
        f"global batch {plan.global_batch_size} = "
        f"micro-batch {plan.micro_batch} x accumulation {plan.accumulation} x {plan.world_size} processes"
    )


def _parity(argv: list[str]) -> int:
    from app import parity

    return parity.main(argv)


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "launch": (_launch, "train a recipe on this machine"),
    "parity": (_parity, "show that presets and numbers of processes give the same run"),
}


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:8}  {text}" for name, (_, text) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="samerun",
        description="One Accelerate training loop, the same run on any machine.",
        epilog=f"commands:\n{commands}\n\n`samerun COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help="what to do")
    return parser


def _launch_parser() -> argparse.ArgumentParser:
    from launch.preset import PRECISIONS

    parser = argparse.ArgumentParser(
        prog="samerun launch",
        usage="%(prog)s [options] [app.train options] [key=value ...]",
        description="Train a recipe on this machine: check it, print the `accelerate launch` command, and become it.",
        epilog="Other options and key=value go to app.train; `python -m app.train --help` lists them and all recipe keys.",
        allow_abbrev=False,
    )
    parser.add_argument("--preset", help="name of a shipped preset, or path of an Accelerate config file (default: multi_gpu "
                        "for more than one process, else single_gpu, or cpu where there is no accelerator)")  # fmt: skip
    parser.add_argument("--processes", type=int, help="number of processes (default: one per accelerator, at least one)")
    parser.add_argument("--recipe", default="digits", help="name of a shipped recipe, or path of a YAML file (default: digits)")
    parser.add_argument("--run-dir", help="folder for all that the run writes (default: runs/<recipe>-<time>)")
    parser.add_argument("--mixed-precision", choices=PRECISIONS, help="instead of the preset's, which is fp32 in those shipped")
    parser.add_argument("--dry-run", action="store_true", help="check all, print the command, and stop")
    return parser


def _say(text: str) -> None:
    """Speak on stderr: stdout is for what was asked for."""
    sys.stderr.write(f"samerun: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
