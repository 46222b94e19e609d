"""Which files hold a split: by its name, or by a pattern as WebDataset's users write it.

In a folder, the split `train` is one file (`train.tar`) or a numbered set of them (`train-000000.tar` and so on,
`train-00000-of-00004.tfrecord`), with anything before that (`imagenet-train-000000.tar`), or all such files of a sub-folder
`train`. `train-{000000..000146}.tar` and `*-train-*.tar` are patterns. Shards follow one another by their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from app.data.extras import extra
from app.errors import DataError
from app.place.topology import listed
from app.tasks.image_classification.data.split_names import NoSplitError

# The last number in a name, and of how many.
_NUMBER = re.compile(r"(\d+)(?:-of-(\d+))?(?=\D*$)")


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
    if not is_pattern:
        found.sort(key=lambda file: _number(file) or (0, 0))
        _check_set(found, f"{key}={split}", starts_at_0=(folder / split) not in (found[0].parent, found[0]))
    return found


def _expanded(pattern: str) -> list[str]:
    if "{" not in pattern:
        return [pattern]
    with extra("braces in the name of the split", "braceexpand"):
        from braceexpand import braceexpand
    return list(braceexpand(pattern))


def _matching(folder: Path, pattern: str) -> list[Path]:
    if any(sign in pattern for sign in "*?["):
        return sorted(folder.glob(pattern))
    if not (folder / pattern).is_file():
        raise DataError(f"{folder / pattern} is missing; copy it here, or exclude its number from the pattern")
    return [folder / pattern]


def _is_shard(name: str, split: str, suffixes: Sequence[str]) -> bool:
    """Return whether a file's name is that of a shard of the split; of any, if that is ""."""
    suffix = f"({'|'.join(re.escape(suffix) for suffix in suffixes if suffix)})"
    stem = rf"(?!\.)(.+[-_.])?{re.escape(split)}" if split else r"(?!\.).*?"
    forms = [rf"{stem}([-_]?\d+(-of-\d+)?)?{suffix}"]
    if "" in suffixes:
        forms.append(rf"{stem}{suffix}?-\d+-of-\d+")
    return any(re.fullmatch(form, name) for form in forms)


def _number(file: Path) -> tuple[int, int] | None:
    """Return the number in a shard's name and the size of its set, 0 if the name does not say; None without a number."""
    match = _NUMBER.search(file.name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def _check_set(files: Sequence[Path], what: str, *, starts_at_0: bool) -> None:
    sets = {_NUMBER.sub("", file.name, count=1): file for file in files}
    numbers = [_number(file) for file in files]
    if len(sets) > 1 or (None in numbers and len(files) > 1):
        raise DataError(
            f"{what} could be any of {listed([file.name for file in sets.values()], 5)} in {files[0].parent}; "
            "choose one with a pattern"
        )
    present = [number[0] for number in numbers if number]
    totals = {number[1] for number in numbers if number}
    if not present:
        return
    if len(totals) > 1:
        raise DataError(
            f"{files[0].parent} contains sets of {listed(sorted(map(str, totals)), 5)} shards for {what}; keep one of them"
        )
    total = totals.pop()
    wanted = range(total) if total else range(0 if starts_at_0 else present[0], present[-1] + 1)
    missing = sorted(set(wanted) - set(present))
    if missing:
        names = [_renumbered(files[0].name, number) for number in missing]
        raise DataError(
            f"{files[0].parent} lacks {len(missing)} of {len(wanted)} shards of {what}: {listed(names, 5)}; "
            "copy them here, or choose the shards to read with a pattern"
        )


def _renumbered(name: str, number: int) -> str:
    """Return the name of the shard with that number, given the name of another."""
    match = _NUMBER.search(name)
    assert match is not None, name
    return f"{name[: match.start(1)]}{number:0{len(match[1])}}{name[match.end(1) :]}"
