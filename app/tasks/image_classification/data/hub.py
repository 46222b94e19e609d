"""Whatever the `datasets` library opens: folders it saved, parquet, arrow and image files, data sets of the hub.

Opening never touches the network: what the hub has is downloaded beforehand by `download_hub`, into the library's cache.
`datasets` is imported when it is needed: that takes 0.8 s.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.data.data_files import NotRead, check_columns, check_complete, walk
from app.errors import DataError, RecipeError
from app.files import other_libraries
from app.tasks.image_classification.data.arrays import stamps
from app.tasks.image_classification.data.decoding import content_of, is_gray, opened, pixels_of
from app.tasks.image_classification.data.images import (
    Data,
    Images,
    Stored,
    completed,
    first_line,
    numbers_up_to,
    spread,
    without_left_out,
)
from app.tasks.image_classification.data.splits import NoSplitError, Splits, data_path, each_split
from app.tasks.image_classification.sections import Sections

BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
"""The name that the library has for the reader of a single file, by suffix."""


def open_hub(recipe: Sections) -> Data:
    """Open the splits, from the library's cache if they are the hub's.

    Encoded images become RGB, unless all that are sampled are grayscale or data.color is another; arrays keep their
    channels. Without data.image_size every image must have the size of the first.
    """
    data = recipe.data
    columns = {"data.image_column": data.image_column, "data.label_column": data.label_column}
    _check_files(recipe)
    names = _names(recipe)
    rows = dict(zip(names.there, _load(recipe, names.there), strict=True))
    where = {split: f"the {name} split of {data.path}" for split, name in names.there.items()}
    for split, table in rows.items():
        for key, column in columns.items():
            if column not in table.column_names:
                found = ", ".join(table.column_names)
                raise DataError(f"{key}={column}: {where[split]} has the columns {found}; use one of these")
    classes, labels = read_labels(rows, data.label_column, where)

    def opened_split(split: str, name: str) -> Images:
        return Images(
            read=_reader(rows[split], data.image_column, where[split]),
            size=len(labels[split]),
            labels=labels[split],
            where=where[split],
            prefix=f"{name}/",
            made_of=("huggingface", *stamps(Path(file["filename"]) for file in rows[split].cache_files)),
        )

    splits = without_left_out(names.changed(opened_split), data)
    first = next(iter(splits.there.values()))
    sampled = spread(len(first))
    gray = data.color == "gray" or (data.color == "auto" and all(first.required(index, _is_gray) for index in sampled))
    said = (data.hub_config, data.hub_revision)  # they tell the data from others of the same name
    listing = [np.frombuffer(repr(said).encode(), np.uint8)] if any(said) else []
    return completed(splits, recipe, classes=classes, channels=1 if gray else 3, listing=listing)


def _reader(rows: Any, column: str, where: str) -> functools.partial[Iterator[Stored]]:
    """Return what reads a column of a `datasets.Dataset`. Raises DataError if it holds neither image files nor arrays."""
    import datasets

    feature = rows.features[column]
    rows = rows.select_columns([column])
    if isinstance(feature, datasets.Image):
        return functools.partial(_read_files, rows.cast_column(column, datasets.Image(decode=False)), where)
    if not isinstance(feature, datasets.Value):
        return functools.partial(_read_arrays, rows.with_format("numpy"), where)
    if feature.dtype not in ("binary", "large_binary"):
        raise DataError(f"data.image_column={column}: {where} holds {feature.dtype} in that column, not images; use another")
    return functools.partial(_read_files, rows, where)


def _values(rows: Any, places: Sequence[int]) -> list[Any]:
    (values,) = rows[list(places)].values()
    return list(values)


def _read_files(rows: Any, where: str, places: Sequence[int]) -> Iterator[Stored]:
    for place, value in zip(places, _values(rows, places), strict=True):
        name = f"sample {place} of {where}"
        if value is None:
            raise DataError(f"{name} has no image; remove it")
        if isinstance(value, bytes) or value["bytes"] is not None:
            yield Stored(value if isinstance(value, bytes) else value["bytes"], name)
        else:
            yield Stored(content_of(Path(value["path"]), f" ({name})"), f"{value['path']} ({name})")


def _read_arrays(rows: Any, where: str, places: Sequence[int]) -> Iterator[Stored]:
    for place, value in zip(places, _values(rows, places), strict=True):
        # A row without an image makes floats of all that are read with it.
        (alone,) = [value] if np.asarray(value).dtype.kind in "iu" else _values(rows, [place])
        name = f"sample {place} of {where}"
        yield Stored(pixels_of(alone, name=name), name)


def _is_gray(stored: Stored) -> bool:
    """Return True for a grayscale image file; one that cannot be read, which `decode` reports, is not."""
    if not isinstance(stored.value, bytes):
        return False
    try:
        with opened(stored.value, stored.name) as image:
            return is_gray(image)
    except DataError:
        return False


def _check_files(recipe: Sections) -> None:
    """Raise DataError if the library would read a part of the files: of a numbered set, or of columns of one name."""
    path = data_path(recipe)
    files = [path] if path.is_file() else []
    if path.is_dir():
        files = [path / folder.name / name for folder in walk(path, "", NotRead()) for name in folder.files]
        check_complete(files, remedy="keep only complete sets in this folder")
    for file in {(file.parent, file.suffix): file for file in files}.values():
        check_columns(file, (recipe.data.image_column, recipe.data.label_column))


def download_hub(recipe: Sections) -> None:
    """Download a data set of the hub into the library's cache, unless data.path is a file or a folder.

    The library makes processes take turns. Raises RecipeError without data.path, DataError where it cannot.
    """
    path = data_path(recipe)
    if path.exists():
        return
    from datasets.exceptions import DatasetsError

    try:
        other_libraries.data_set(str(path), recipe.data.hub_config, revision=recipe.data.hub_revision)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"data.path={path} is not a file or folder here, and cannot be downloaded from the hub: "
            f"{first_line(error)}. Without a network, copy the files here and set data.path to them"
        ) from error


def _names(recipe: Sections) -> Splits[str]:
    """Return the names of the splits that the recipe names, or that exist under a usual name."""
    data, path = recipe.data, data_path(recipe)
    saved = _saved_splits(path)
    if data.hub_config is not None and (path.is_file() or saved):
        what = "a file" if path.is_file() else "a folder that save_to_disk wrote"
        raise RecipeError(
            f"data.hub_config={data.hub_config}: {path} is {what}, which has no configurations; remove data.hub_config"
        )
    if data.hub_revision is not None and path.exists():
        raise RecipeError(
            f"data.hub_revision={data.hub_revision}: {path} is a local path, and only data sets on the hub "
            "have revisions; remove data.hub_revision"
        )
    # A name in the recipe that does not exist is refused when it is loaded.
    there = {data.train_split, data.validation_split, data.test_split, *(saved or _load(recipe, None))}

    def named(name: str, _key: str) -> str:
        if name not in there:
            raise NoSplitError(name)
        return name

    return each_split(data, named)


def _load(recipe: Sections, names: dict[str, str] | None) -> Any:
    """Return the splits of these names as `datasets.Dataset`, in a list; None: all splits, by name."""
    from datasets.exceptions import DatasetsError

    path = data_path(recipe)
    try:
        with other_libraries.datasets_offline():
            return _load_saved(path, names) if names and _saved_splits(path) else _load_files(recipe, path, names)
    except ConnectionError as error:
        nowhere = f"data.path={path} is not a file or folder here, nor a data set in the cache of the datasets library"
        raise DataError(f"{nowhere}; correct the path, or set data.download=true to download it from the hub") from error
    except (OSError, ValueError, DatasetsError) as error:
        asked = "".join(f", data.{split}_split={name}" for split, name in (names or {}).items())
        raise DataError(f"data.path={path}{asked} cannot be opened: {first_line(error)}") from error


def _saved_splits(path: Path) -> list[str]:
    """Return the names of the splits that save_to_disk wrote; "." is the folder itself, a Dataset without splits."""
    return sorted(str(state.parent.relative_to(path)) for state in (*path.glob("state.json"), *path.glob("*/state.json")))


def _load_saved(path: Path, names: dict[str, str]) -> list[Any]:
    saved = _saved_splits(path)
    if saved == ["."]:
        raise DataError(f"data.path={path} is a Dataset without splits; save a DatasetDict with a split {names['train']}")
    for split, name in names.items():
        if name not in saved:
            raise DataError(f"data.{split}_split={name}: {path} has the splits {', '.join(saved)}; use one of these")
    try:
        return [other_libraries.saved_data_set(path / name) for name in names.values()]
    except IndexError as error:  # what version 5.2 makes of a split that was empty when it was saved
        raise DataError(f"data.path={path}: one of the splits {' and '.join(names.values())} has no samples") from error


def _load_files(recipe: Sections, path: Path, names: dict[str, str] | None) -> Any:
    splits = None if names is None else list(names.values())
    if path.is_file():
        if path.suffix.lower() not in BUILDERS:
            raise DataError(f"data.path={path} is a file of an unknown kind; use {', '.join(BUILDERS)}, or a folder")
        return other_libraries.data_set(BUILDERS[path.suffix.lower()], data_files=str(path), split=splits)
    if recipe.data.hub_revision is not None:
        builder = _pinned(recipe)
        return builder.as_dataset() if splits is None else [builder.as_dataset(split=split) for split in splits]
    return other_libraries.data_set(str(path.absolute() if path.exists() else path), recipe.data.hub_config, split=splits)


def _pinned(recipe: Sections) -> Any:
    """Return the builder of a commit, from the library's cache. Raises DataError if it is not there.

    Off the network `load_dataset` ignores `revision` and takes what was cached last (`packaged_modules/cache/cache.py` of
    version 5.2). The cache has a folder for each: OWNER___NAME/CONFIGURATION/VERSION/COMMIT.
    """
    import datasets
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.cache.cache import Cache

    data, name = recipe.data, str(recipe.data.path)
    owner, slash, last = name.rpartition("/")
    place = Path(datasets.config.HF_DATASETS_CACHE, f"{owner}{'___' if slash else ''}{camelcase_to_snakecase(last)}")
    found = sorted(place.glob(f"{data.hub_config or '*'}/*/{data.hub_revision}"))
    of = f"data.path={name} with data.hub_revision={data.hub_revision}"
    if not found:
        config = f" and data.hub_config={data.hub_config}" if data.hub_config else ""
        raise DataError(f"{of}{config} is not in the cache of the datasets library; correct it, or set data.download=true")
    if len(found) > 1:
        configs = ", ".join(folder.parent.parent.name for folder in found)
        raise DataError(f"{of} has several configurations: set data.hub_config to one of {configs}")
    config, version, commit = found[0].parts[-3:]
    return Cache(repo_id=name, dataset_name=last, config_name=config, version=version, hash=commit)


def read_labels(rows: Mapping[str, Any], column: str, where: Mapping[str, str]) -> tuple[Sequence[str], dict[str, np.ndarray]]:
    """Return the class names, and the labels of each split (int64 [N]), of which the first is for training.

    The classes are those of a ClassLabel column; else, of the training split, the sorted different strings, or 0 up to the
    largest integer. `rows` are `datasets.Dataset`s, and `where` their names in errors. Raises DataError if a label is missing,
    or the column holds something else.
    """
    columns = {split: _column(table, column, where[split]) for split, table in rows.items()}
    classes = {split: getattr(table.features[column], "names", None) for split, table in rows.items()}
    first = next(iter(rows))
    names = classes[first]
    for split, other in classes.items():
        if other != names:
            problem = f"data.label_column={column}: {where[first]} has the classes {names}, {where[split]} has {other}"
            raise DataError(f"{problem}; make them the same")
    if names is None and columns[first].dtype.kind == "O":
        names = sorted(set(columns[first].tolist()))
        numbers = {name: number for number, name in enumerate(names)}
        for split, labels in columns.items():
            unknown = next((index for index, label in enumerate(labels.tolist()) if label not in numbers), None)
            if unknown is not None:
                known = f"{', '.join(map(repr, names[:20]))}{' ...' if len(names) > 20 else ''}"
                label = f"sample {unknown} of {where[split]} has label {labels[unknown]!r}"
                raise DataError(f"{label}, which no training sample has; the labels are {known}")
            columns[split] = np.array([numbers[label] for label in labels.tolist()])
    elif names is None:
        names = numbers_up_to(int(columns[first].max(initial=0)), f"data.label_column={column}: {where[first]}")
    return names, {split: labels.astype(np.int64) for split, labels in columns.items()}


def _column(rows: Any, column: str, where: str) -> np.ndarray:
    """Return a column of integers, or of strings (as objects), none of them missing."""
    values = rows.select_columns([column]).with_format("arrow")[:].column(column)
    if values.null_count:
        index = values.is_null().to_pylist().index(True)
        raise DataError(
            f"sample {index} of {where} has no label ({values.null_count} of {len(values)} have none); remove these samples"
        )
    if not str(values.type).startswith(("int", "uint", "string", "large_string")):
        problem = f"data.label_column={column}: {where} holds {values.type} in that column"
        raise DataError(f"{problem}; labels must be ClassLabel, integers or strings")
    return np.asarray(values.to_numpy())
