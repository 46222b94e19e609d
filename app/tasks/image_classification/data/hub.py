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

from app.data.data_files import NotRead, check_columns, check_complete, first_line, walk
from app.environment.topology import listed
from app.errors import DataError, RecipeError
from app.files import other_libraries
from app.tasks.image_classification.data.arrays import stamps
from app.tasks.image_classification.data.decoding import content_of, is_gray, opened, pixels_of
from app.tasks.image_classification.data.images import (
    Data,
    Images,
    NoSplitError,
    StoredImage,
    completed,
    data_path,
    each_split,
    numbers_up_to,
    same_classes,
    spread,
    without_left_out,
)
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
    rows = dict(zip(names, _load(recipe, names), strict=True))
    where = {split: f"the {name} split of {data.path}" for split, name in names.items()}
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

    splits = without_left_out({split: opened_split(split, name) for split, name in names.items()}, data)
    first = next(iter(splits.values()))
    gray = data.color == "gray"
    if data.color == "auto":
        gray = all(first.required(index, _is_gray) for index in spread(len(first)))
    version = (data.hub_config, data.hub_revision)  # it distinguishes the data from other data of the same name
    listing = [np.frombuffer(repr(version).encode(), np.uint8)] if any(version) else []
    return completed(splits, recipe, classes=classes, channels=1 if gray else 3, listing=listing)


def _reader(rows: Any, column: str, where: str) -> functools.partial[Iterator[StoredImage]]:
    """Return what reads a column of a `datasets.Dataset`. Raises DataError if it holds neither image files nor arrays."""
    import datasets

    feature = rows.features[column]
    rows = rows.select_columns([column])
    if isinstance(feature, datasets.Image):
        rows = rows.cast_column(column, datasets.Image(decode=False))
    elif not isinstance(feature, datasets.Value):
        rows = rows.with_format("numpy")
    elif feature.dtype not in ("binary", "large_binary"):
        raise DataError(f"data.image_column={column}: {where} holds {feature.dtype} in that column, not images; use another")
    return functools.partial(_read, rows, where)


def _read(rows: Any, where: str, places: Sequence[int]) -> Iterator[StoredImage]:
    (values,) = rows[list(places)].values()
    for place, value in zip(places, values, strict=True):
        name = f"sample {place} of {where}"
        path = value.get("path") if isinstance(value, dict) else None
        content = value.get("bytes") if isinstance(value, dict) else value
        if isinstance(content, bytes):
            yield StoredImage(content, name)
        elif content is not None:
            yield StoredImage(pixels_of(content, name=name), name)
        elif path:
            yield StoredImage(content_of(Path(path), f" ({name})"), f"{path} ({name})")
        else:
            why = f": none is in bytes or path of its fields ({', '.join(value)})" if value else ""
            raise DataError(f"{name} has no image{why}; remove it")


def _is_gray(stored: StoredImage) -> bool:
    """Return True for a grayscale image file. Raises DataError."""
    if not isinstance(stored.value, bytes):
        return False
    with opened(stored.value, stored.name) as image:
        return is_gray(image)


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


def _names(recipe: Sections) -> dict[str, str]:
    """Return the names of the splits that the recipe names, or that exist under a usual name."""
    data, path = recipe.data, data_path(recipe)
    saved = _saved_splits(path)
    if saved == ["."]:
        raise DataError(f"data.path={path} is a Dataset without splits; save a DatasetDict with a split {data.train_split}")
    if path.exists() and (data.hub_revision or (data.hub_config and (saved or path.is_file()))):
        raise RecipeError(f"data.path={path} is a local path, which has no data.hub_config or data.hub_revision; remove them")
    there = saved or list(_load(recipe, None))
    in_recipe = {data.train_split, data.validation_split, data.test_split}

    def named(name: str, key: str) -> str:
        # Other names in the recipe, such as train[:90%], are refused when they are loaded.
        if name not in there and (saved or name not in in_recipe):
            raise NoSplitError(f"{key}={name}: {path} has the splits {', '.join(there)}; use one of these")
        return name

    return each_split(data, named)


def _saved_splits(path: Path) -> list[str]:
    """Return the names of the splits that save_to_disk wrote; "." is the folder itself, a Dataset without splits."""
    return sorted(str(state.parent.relative_to(path)) for state in (*path.glob("state.json"), *path.glob("*/state.json")))


def _load(recipe: Sections, names: Mapping[str, str] | None) -> Any:
    """Return the splits of these names as `datasets.Dataset`, in a list; None: all splits, by name."""
    from datasets.exceptions import DatasetsError

    path, config = data_path(recipe), recipe.data.hub_config
    splits = None if names is None else list(names.values())
    try:
        with other_libraries.datasets_offline():
            if splits and _saved_splits(path):
                return [other_libraries.saved_data_set(path / name) for name in splits]
            if path.is_file():
                if path.suffix.lower() not in BUILDERS:
                    raise DataError(f"data.path={path} is a file of an unknown kind; use {', '.join(BUILDERS)}, or a folder")
                return other_libraries.data_set(BUILDERS[path.suffix.lower()], data_files=str(path), split=splits)
            if recipe.data.hub_revision is not None:
                builder = _pinned(recipe)
                return builder.as_dataset() if splits is None else [builder.as_dataset(split=split) for split in splits]
            return other_libraries.data_set(str(path.absolute() if path.exists() else path), config, split=splits)
    except ConnectionError as error:
        nowhere = f"data.path={path} is not a file or folder here, nor a data set in the cache of the datasets library"
        raise DataError(f"{nowhere}; correct the path, or set data.download=true to download it from the hub") from error
    except (OSError, ValueError, IndexError, DatasetsError) as error:  # IndexError: a saved split is empty (version 5.2)
        asked = "".join(f", data.{split}_split={name}" for split, name in (names or {}).items())
        why = "a split has no samples" if isinstance(error, IndexError) else first_line(error)
        raise DataError(f"data.path={path}{asked} cannot be opened: {why}") from error


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
        raise DataError(f"{of} is not in the cache of the datasets library; correct it, or set data.download=true")
    if len(found) > 1:
        configs = ", ".join(folder.parent.parent.name for folder in found)
        raise DataError(f"{of} has several configurations: set data.hub_config to one of {configs}")
    config, version, commit = found[0].parts[-3:]
    return Cache(repo_id=name, dataset_name=last, config_name=config, version=version, hash=commit)


def read_labels(rows: Mapping[str, Any], column: str, where: Mapping[str, str]) -> tuple[Sequence[str], dict[str, np.ndarray]]:
    """Return the class names, and the labels of each split (int64 [N]), of which the first is for training.

    The classes come from a ClassLabel column; else, of the training split, the sorted different strings, or 0 up to the
    largest integer. `rows` are `datasets.Dataset`s, and `where` their names in errors. Raises DataError if a label is missing,
    or the column holds something else.
    """
    columns = {split: _column(table, column, where[split]) for split, table in rows.items()}
    known = {where[split]: tuple(getattr(table.features[column], "names", None) or ()) for split, table in rows.items()}
    first, names = next(iter(rows)), list(same_classes(known))
    if not names and columns[first].dtype.kind == "O":
        names = sorted(set(columns[first].tolist()))
        for split, labels in columns.items():
            if unknown := set(labels.tolist()).difference(names):
                found = f"{where[split]} has the labels {listed(sorted(unknown), 5)}, which no training sample has"
                raise DataError(f"{found}; the labels are {listed(names, 20)}")
            columns[split] = np.searchsorted(np.array(names, object), labels)
    elif not names:
        names = numbers_up_to(int(columns[first].max(initial=0)), f"data.label_column={column}: {where[first]}")
    return names, {split: labels.astype(np.int64) for split, labels in columns.items()}


def _column(rows: Any, column: str, where: str) -> np.ndarray:
    """Return a column of integers, or of strings (as objects), none of them missing."""
    values = rows.select_columns([column]).with_format("arrow")[:].column(column)
    if values.null_count:
        index = values.is_null().to_pylist().index(True)
        raise DataError(f"sample {index} of {where} has no label ({values.null_count} of {len(values)} have none); remove them")
    if not str(values.type).startswith(("int", "uint", "string", "large_string")):
        problem = f"data.label_column={column}: {where} holds {values.type} in that column"
        raise DataError(f"{problem}; labels must be ClassLabel, integers or strings")
    return np.asarray(values.to_numpy())
