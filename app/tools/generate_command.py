"""A tool: `samerun generate` (app/tasks/causal_lm/generate.py), with `--best` from a run's best checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from app import options
from app.tasks.causal_lm import generate


def main(argv: Sequence[str]) -> int:
    """Run `samerun generate` with these arguments and return its exit code. Raises SamerunError."""
    parser = generate.parser()
    options.add_best(parser)
    arguments = parser.parse_all(argv)
    if not arguments.best:
        return generate.run(arguments, arguments.folder)
    from app import export  # here and below: the help need not wait for it
    from app.checkpoints.step_folders import Reader, choose_best

    reader = Reader(choose_best(arguments.folder))
    with tempfile.TemporaryDirectory(prefix="samerun-") as aside:  # a folder of transformers, for as long as it is needed
        export.export(reader, Path(aside), key=reader.finished_key())
        return generate.run(arguments, Path(aside))
