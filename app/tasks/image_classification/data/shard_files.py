"""Which files hold a split: by its name, or by a pattern as WebDataset's users write it.

In a folder, the split `train` is one file (`train.tar`) or a numbered set of them (`train-000000.tar` and so on,
`train-00000-of-00004.tfrecord`), with anything before that (`imagenet-train-000000.tar`), or all such files of a sub-folder
`train`. `train-{000000..000146}.tar` and `*-train-*.tar` are patterns. Shards follow one another by their numbers.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path

from app.data.data_files import check_complete, numbered_sets
from app.environment.topology import listed
from app.errors import DataError
from app.files.other_libraries import extra
from app.tasks.image_classification.data.split_names import NoSplitError


def find_shards(folder: Path, split: str, *, key: str, suffixes: Sequence[str]) -> list[Path]:
    """Return the files that hold a split, in order, none of a numbered set missing.

    `split` is its name, or a pattern, and `key` the recipe's key that says it. `suffixes` are what names of such files end with
    (".tar"); "" only for those that say `-of-`. Raises NoSplitError if there are none, DataError if one of a set is missing, or
    there is more than one set.
    """
    is_pattern = any(sign in split for sign in "*?[{")
    try:
        if is_pattern:
            found = [file for pattern in _expanded(split) for file in _matching(folder, pattern)]
        elif (folder / split).is_dir():
            found = [file for file in (folder / split).iterdir() if _is_shard(file.name, "", suffixes)]
        elif (folder / split).is_file():
            found = [folder / split]
        else:
            found = [file for file in folder.iterdir() if _is_shard(file.name, split, suffixes)]
    except OSError as error:
        raise DataError(f"data.path={folder} cannot be read ({error.strerror}); correct data.path") from error
    if not found:
        likely = f"{split}{suffixes[0]}, {split}-000000{suffixes[0]} and so on, and a sub-folder {split}"
        there = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
        raise NoSplitError(
            f"{folder} contains no files for {key}={split}: looked for {split if is_pattern else likely}, "
            f"found {listed(there, 5) or 'nothing'}; correct data.path or {key}"
        )
    if is_pattern:
        return found
    return _one_set(found, f"{key}={split}", starts_at_0=(folder / split) not in (found[0].parent, found[0]))


def _expanded(pattern: str) -> list[str]:
    if "{" not in pattern:
        return [pattern]
    with extra("braces in the name of the split"):
        import bracex
    return [str(name) for name in bracex.expand(pattern, limit=0)]


def _matching(folder: Path, pattern: str) -> list[Path]:
    if any(sign in pattern for sign in "*?["):
        found = sorted(folder.glob(pattern))
        check_complete(
            found,
            f"the pattern {pattern}",
            remedy="exclude their numbers from the pattern",
            wanted=lambda file: fnmatch.fnmatch(str(file), str(folder / pattern)),
            gaps_from_0=False,
        )
        return found
    if not (folder / pattern).is_file():
        raise DataError(f"{folder / pattern} is missing; copy it here, or exclude its number from the pattern")
    return [folder / pattern]


def _is_shard(name: str, split: str, suffixes: Sequence[str]) -> bool:
    """Return whether a file's name is that of a shard of the split; of any, if that is ""."""
    suffix = f"(?i:{'|'.join(re.escape(suffix) for suffix in suffixes if suffix)})"
    stem = rf"(?!\.)(.+[-_.])?{re.escape(split)}" if split else r"(?!\.).*?"
    forms = [rf"{stem}([-_]?\d+(-of-\d+)?)?{suffix}"]
    if "" in suffixes:
        forms.append(rf"{stem}{suffix}?-\d+-of-\d+")
    return any(re.fullmatch(form, name) for form in forms)


def _one_set(files: Sequence[Path], what: str, *, starts_at_0: bool) -> list[Path]:
    """Return the files in the order of their numbers. Raises DataError if they are not one set, or some are missing."""
    sets = numbered_sets(files)
    totals = sorted({shards.total or 0 for shards in sets})
    if len(totals) > 1 and 0 not in totals:
        raise DataError(f"{files[0].parent} contains sets of {listed(totals, 5)} shards for {what}; keep one of them")
    if len(files) > 1 and (len(sets) != 1 or len(sets[0].files) != len(files)):
        names = [min(shards.files.values()).name for shards in sets]
        unnumbered = {file.name for file in files}.difference(file.name for shards in sets for file in shards.files.values())
        raise DataError(
            f"{what} could be any of {listed([*names, *sorted(unnumbered)], 5)} in {files[0].parent}; choose one with a pattern"
        )
    check_complete(files, what, remedy="choose the shards to read with a pattern", gaps_from_0=starts_at_0)
    return [file for _, file in sorted(sets[0].files.items())] if sets else list(files)
