"""Differences between stored weights and a model: names that are missing, left over, of another shape or contradictory.

One wording for `train.init_from`, `samerun evaluate`, `generate` and `predict`, whichever library has compared the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

_MOST_NAMED = 8
_OLD_BUFFERS = ("attn.masked_bias", "attention.masked_bias")
"""Endings of constants that older versions of transformers stored, and that no network has any more."""


def differences(
    missing: Iterable[str], left_over: Iterable[str], shapes: Iterable[tuple[str, Any, Any]] = (), ties: Iterable[str] = ()
) -> dict[str, str]:
    """Return a phrase for each name that does not fit; names of the model and names of the file alternate.

    `shapes` has names with their shape in the file and in the model, `ties` names of tied tensors with different values.
    """
    ours = {name: f"{name} is not in the file" for name in missing}
    ours |= {name: f"{name} is {tuple(there)} in the file and {tuple(here)} in the model" for name, there, here in shapes}
    ours |= {name: f"{name} is tied to another tensor, of which the file has other values" for name in ties}
    theirs = {name: f"{name} is not in the model" for name in left_over}
    turns = zip_longest(ours.items(), theirs.items())
    return dict(named for pair in turns for named in pair if named is not None)


def unneeded(model: Any, left_over: Iterable[str]) -> set[str]:
    """Return the names, of those that the model does not have, of buffers that it computes itself or that no network uses."""

    def end(name: str) -> str:  # the same buffer was in each layer once, and is in the model now
        return ".".join(name.split(".")[-2:])

    saved = model.state_dict(keep_vars=True)
    ends = {*_OLD_BUFFERS, *(end(name) for name, _ in model.named_buffers(remove_duplicate=False) if name not in saved)}
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()  # transformers' own, for from_pretrained
    return {name for name in left_over if end(name) in ends or any(re.search(pattern, name) for pattern in patterns)}


def loading_differences(model: Any, info: Mapping[str, Any]) -> dict[str, str]:
    """Return the differences of a model that transformers has loaded, from its `output_loading_info`."""
    # If a file has both of two tied tensors, with different values, transformers separates them (from 5.0 on).
    has_ties = hasattr(model, "get_expanded_tied_weights_keys")
    ties = model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys if has_ties else ()
    missing, left_over, shapes = (info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    return differences(sorted(missing), sorted({*left_over} - unneeded(model, left_over)), sorted(shapes), sorted(ties))


def joined(phrases: Iterable[str]) -> str:
    """Return the first phrases, and the number of the others."""
    first = list(phrases)
    more = f"; and {len(first) - _MOST_NAMED} more" if len(first) > _MOST_NAMED else ""
    return "; ".join(first[:_MOST_NAMED]) + more
