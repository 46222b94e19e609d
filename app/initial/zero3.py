"""Initial weights under ZeRO-3: all that is known here of DeepSpeed, and of what transformers makes of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def transformers_unaware() -> Iterator[None]:
    """Have transformers build models as it does without ZeRO-3.

    Where Accelerate has told it of a config of ZeRO-3, it builds them under `deepspeed.zero.Init`, with other random numbers
    (transformers 5.23, modeling_utils.py, `get_init_context`).
    """
    known: Any = sys.modules.get("transformers.integrations.deepspeed")
    told = getattr(known, "_hf_deepspeed_config_weak_ref", None)
    if told is None:
        yield
        return
    known.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        known._hf_deepspeed_config_weak_ref = told
