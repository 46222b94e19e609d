"""What other libraries say in every start and nobody can act upon, left out where they say it. What is an error is never.

Facts: torch 2.14, deepspeed 0.19.8. Each is named by its words, so that all else they say is heard.
"""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


def set_up(*, on_cpu: bool) -> None:
    """Leave out what is known here; to be called before DeepSpeed is imported, which Accelerate does under any preset."""
    # FSDP2 itself calls what torch has given new names, at every unit of every step.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if on_cpu:
        _leave_out("DeepSpeed", "Setting accelerator to CPU")
        _leave_out("torch.utils.cpp_extension", "No CUDA runtime is found")


@contextmanager
def without_success() -> Iterator[None]:
    """In the block, leave out what DeepSpeed prints of an operator that it has found."""
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            yield
    finally:
        sys.stdout.writelines(line for line in said.getvalue().splitlines(keepends=True) if "built successfully" not in line)


def _leave_out(logger: str, words: str) -> None:
    logging.getLogger(logger).addFilter(lambda record: words not in record.getMessage())
