"""What a finished run makes of new inputs: `python -m app.predict RUN FILES... [--top 3] [--json]`.

Pictures are brought to the size of the training images as in the evaluation: shorter side resized, centre cropped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from app.checkpoints import model_file
from app.errors import SamerunError, leave_with
from app.options.values import positive


def main(argv: list[str] | None = None) -> None:
    """Print the most likely classes of each picture; ends the process with the error's exit code if that fails."""
    parser = argparse.ArgumentParser(prog="python -m app.predict", description="Classify pictures with a finished run.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("files", type=Path, nargs="+", metavar="file", help="picture in any format that Pillow reads")
    parser.add_argument("--top", type=positive, default=3, help="how many classes to show for each picture (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    arguments = parser.parse_args(argv)
    try:
        task, model, _ = model_file.load(arguments.run)
        with torch.no_grad():
            found = task.predict(model, arguments.files, top=arguments.top)
    except SamerunError as error:
        leave_with(error, rank=0)
    width = max(len(str(file)) for file in arguments.files)
    for file, prediction in zip(arguments.files, found, strict=True):
        if arguments.json:
            sys.stdout.write(json.dumps({"file": str(file), **prediction}) + "\n")
            continue
        pairs = zip(prediction["classes"], prediction["probabilities"], strict=True)
        likely = "  ".join(f"{name} {probability:.3f}" for name, probability in pairs)
        sys.stdout.write(f"{file!s:{width}}  {likely}\n")


if __name__ == "__main__":
    main()
