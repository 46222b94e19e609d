"""What is wrong with weights that enter a model: names that are missing, left over, of another shape or contradictory.

`train.init_from`, `samerun evaluate`, `generate` and `predict` all say it with these words, whoever has compared the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

_MOST_NAMED = 8
_OLD_BUFFERS = ("attn.masked_bias", "attention.masked_bias")
"""How constants end that older versions of transformers stored, and that no network has any more."""


def differences(
    missing: Iterable[str], left_over: Iterable[str], shapes: Iterable[tuple[str, Any, Any]] = (), ties: Iterable[str] = ()
) -> dict[str, str]:
    """Return a phrase for each name that cannot be taken; those of the file and those of the model by turns.

    `shapes` has names with their shape in the file and in the model, `ties` names of tied tensors whose values are another's.
    """
    ours = {name: f"{name} is not in the file" for name in missing}
    ours |= {name: f"{name} is {tuple(there)} in the file and {tuple(here)} in the model" for name, there, here in shapes}
    ours |= {name: f"{name} is tied to another tensor, of which the file has other values" for name in ties}
    theirs = {name: f"{name} is not in the model" for name in left_over}
    turns = zip_longest(ours.items(), theirs.items())
    return dict(named for pair in turns for named in pair if named is not None)


def unneeded(model: Any, left_over: Iterable[str]) -> set[str]:
    """Return the names, among those that a model has not, of buffers that it computes itself, or that no network has now."""
    kept = model.state_dict(keep_vars=True)
    computed = {_end(name) for name, _ in model.named_buffers(remove_duplicate=False) if name not in kept}
    # The patterns are transformers' own, which from_pretrained goes by.
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ends = {*computed, *_OLD_BUFFERS}
    return {name for name in left_over if _end(name) in ends or any(re.search(pattern, name) for pattern in patterns)}


def _end(name: str) -> str:
    """The last two parts: the same buffer once was in each layer, and now is in the model."""
    return ".".join(name.split(".")[-2:])


def of_transformers(model: Any, told: Mapping[str, Any]) -> dict[str, str]:
    """Return them for a model that transformers has loaded, from what it has told (`output_loading_info`)."""
    # Where a file has both of two tied tensors, with different values, transformers has separated them (from 5.0 on).
    has_ties = hasattr(model, "get_expanded_tied_weights_keys")
    ties = model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys if has_ties else ()
    missing, left_over, shapes = (told[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    return differences(sorted(missing), sorted({*left_over} - unneeded(model, left_over)), sorted(shapes), sorted(ties))


def listed(phrases: Iterable[str], between: str = "; ") -> str:
    """Return the first phrases, and how many more there are."""
    every = list(phrases)
    more = f"{between.replace(',', '')}and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return between.join(every[:_MOST_NAMED]) + more
