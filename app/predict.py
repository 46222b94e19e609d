"""Predicts new inputs with a finished run: `samerun predict RUN FILES... [--top 3] [--json]`.

The task knows what to do with a file. Pictures are brought to the size of the training images as in the evaluation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from app import options
from app.errors import SamerunError, exits_refused, leave_with, printable
from app.options import Parser, positive
from app.runs import run_folder


def main(argv: list[str] | None = None) -> None:
    """Print what the model makes of each file; ends the process with the error's exit code if that fails."""
    parser = Parser("predict", "Predict new inputs with the model of a finished run.")
    parser.add_argument("run", type=run_folder.existing, metavar="RUN", help="run folder")
    parser.add_argument("files", type=Path, nargs="+", metavar="PATH", help="input of the task; for image classification an "
        "image in any format that Pillow reads")  # fmt: skip
    parser.add_argument("--task", metavar="PATH", help="the run's task file, if it was moved (default: where it was)")
    options.add_best(parser)
    options.add_full_traceback(parser)
    parser.add_argument("--top", type=positive, default=3, metavar="N", help="number of answers to show (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table: one object per line")
    try:
        arguments = parser.parse_all(argv)
        import torch  # here: the help need not wait for it

        from app.checkpoints import step_folders, stored_weights

        run = step_folders.choose_best(arguments.run) if arguments.best else arguments.run
        with torch.no_grad(), exits_refused():
            task, model, _ = stored_weights.load(run, arguments.task)
            found = task.predict(model, arguments.files, top=arguments.top)
    except SamerunError as error:
        leave_with(error, rank=0)
    width = max(len(str(file)) for file in arguments.files)
    for file, (words, prediction) in zip(arguments.files, found, strict=True):
        plain = json.dumps({"file": str(file), **prediction})
        sys.stdout.write(plain + "\n" if arguments.json else printable(f"{file!s:{width}}  {words}\n"))


if __name__ == "__main__":
    main()
