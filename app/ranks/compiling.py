"""torch.compile, if `dynamo_backend` of the preset or the command line asks for it. What cannot be compiled runs uncompiled.

torch would end the run with the compiler's traceback. Compiling is for speed alone, so it is one sentence instead.
"""

from __future__ import annotations

import logging

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend

from app.ranks.sample_dropout import SampleDropout


def survive_failures(accelerator: Accelerator) -> None:
    """See to it that a model, or a part of it, that cannot be compiled is run uncompiled, and said to be once."""
    if accelerator.state.dynamo_plugin.backend == DynamoBackend.NO:
        return
    import torch._dynamo  # takes a second, which only those who compile have to spend
    import torch._functorch.config

    torch._dynamo.config.suppress_errors = True
    # The backward pass is compiled with the forward pass: later, in the first step, a failure would end the run (torch 2.14).
    torch._functorch.config.force_non_lazy_backward_lowering = True
    # It counts its calls: traced, it would be compiled anew for every layer and pass, and that ends after eight times.
    SampleDropout.forward = torch.compiler.disable(SampleDropout.forward)  # type: ignore[method-assign]
    # Where torch says what it has suppressed, at length (torch 2.15).
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_Sentence().of)


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside what torch.compile has put around it, whose class would take a second to import."""
    inner: torch.nn.Module = getattr(model, "_orig_mod", model)
    return inner


class _Sentence:
    def __init__(self) -> None:
        self._is_said = False

    def of(self, record: logging.LogRecord) -> bool:
        """Make the first report of a failure one sentence, and drop the others."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        if self._is_said:
            return False
        self._is_said = True
        why = next(iter(str(error).splitlines()), "")
        record.msg = (
            f"torch.compile failed ({type(error).__name__}: {why}); what it could not compile runs uncompiled, with the same "
            "results. Fix the cause, or leave dynamo_backend out of preset and command line."
        )
        record.args, record.exc_info = (), None
        return True
