"""Whatever the `datasets` library opens: folders it saved, parquet, arrow and image files, data sets of the hub.

Opening never touches the network: what the hub has is downloaded beforehand by `download_hub`, into the library's cache.
`datasets` is imported when it is needed: that takes 0.8 s.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from app.data.data_files import NotRead, check_columns, check_complete, walk
from app.errors import DataError, RecipeError
from app.files import other_libraries
from app.tasks.image_classification.data.framing import Framing
from app.tasks.image_classification.data.kept import stamps
from app.tasks.image_classification.data.left_out import LeftOut, reading
from app.tasks.image_classification.data.pictures import PictureSource
from app.tasks.image_classification.data.rows import RowReader, read_labels
from app.tasks.image_classification.data.source import FINGERPRINT_SAMPLES, Data, Source, fingerprint, first_line, spread
from app.tasks.image_classification.data.split_names import NoSplitError, each_split
from app.tasks.image_classification.sections import Sections

BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
"""The name that the library has for the reader of a single file, by suffix."""


def open_hub(recipe: Sections) -> Data:
    """Open the splits, from the library's cache if they are the hub's.

    Encoded images become RGB, unless all that are sampled are grayscale or data.color says otherwise; arrays keep their
    channels. Without data.image_size every image must have the size of the first.
    """
    data = recipe.data
    _check_files(recipe)
    names = _names(recipe)
    splits = _load(recipe, names)
    where = [f"the {name} split of {data.path}" for name in names.values()]
    for rows, name in zip(splits, where, strict=True):
        _check_columns(rows, recipe, name)
    classes, labels = read_labels(splits, data.label_column, where)
    left_out, readers = LeftOut(data), []
    for split, rows, targets, name in zip(names.values(), splits, labels, where, strict=True):
        reader = RowReader.of(rows, data.image_column, targets, where=name)
        readers.append(reader.without(split, left_out.numbered(split, len(targets))))
    left_out.check_found()
    train_reader = readers[0]
    is_gray = reading(train_reader.is_gray, train_reader.name)
    sampled = spread(len(train_reader.labels), FINGERPRINT_SAMPLES)
    if train_reader.encoded and (data.color == "gray" or (data.color == "auto" and all(is_gray(index) for index in sampled))):
        readers = [replace(reader, channels=1) for reader in readers]
    opened = {
        split: _open_split(reader, classes, readers[0], Framing.of(recipe, training=split == "train"), _pins(recipe))
        for split, reader in zip(names, readers, strict=True)
    }
    return Data(opened["train"], opened.get("validation"), opened.get("test"))


def _check_files(recipe: Sections) -> None:
    """Raise DataError if the library would read a part of the files: of a numbered set, or of columns of one name."""
    path = _path(recipe)
    files = [path] if path.is_file() else []
    if path.is_dir():
        files = [path / folder.name / name for folder in walk(path, "", NotRead()) for name in folder.files]
        check_complete(files, remedy="keep only complete sets in this folder")
    for file in {(file.parent, file.suffix): file for file in files}.values():
        check_columns(file, (recipe.data.image_column, recipe.data.label_column))


def download_hub(recipe: Sections) -> None:
    """Download a data set of the hub into the library's cache, unless data.path is a file or a folder.

    The library sees to it that processes take turns. Raises RecipeError without data.path, DataError where it cannot.
    """
    path = _path(recipe)
    if path.exists():
        return
    from datasets.exceptions import DatasetsError

    why = other_libraries.why()
    try:
        with other_libraries.datasets_offline() if why else nullcontext():
            other_libraries.data_set(str(path), recipe.data.hub_config, revision=recipe.data.hub_revision)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"data.path={path} is not a file or folder here, and cannot be downloaded from the hub: "
            f"{why or first_line(error)}. Without a network, copy the files here and set data.path to them"
        ) from error


def _path(recipe: Sections) -> Path:
    if recipe.data.path is None:
        raise RecipeError("data.source=huggingface needs data.path: a file, a folder, or the name of a data set on the hub")
    return Path(recipe.data.path)


def _names(recipe: Sections) -> dict[str, str]:
    """Return the names of the splits that the recipe asks for, or that are there under a usual name; training comes first."""
    path = _path(recipe)
    _refuse_for_files(recipe, path)
    data, there = recipe.data, set(_saved_splits(path)) or set(_load(recipe, None))

    def named(name: str, _key: str) -> str:
        if name in (data.train_split, data.validation_split, data.test_split) or name in there:
            return name  # one that the recipe names and that is not there is refused by what loads it
        raise NoSplitError(name)

    found = vars(each_split(data, named))
    return {split: name for split, name in found.items() if isinstance(name, str)}


def _load(recipe: Sections, names: dict[str, str] | None) -> Any:
    """Return the splits of these names as `datasets.Dataset`, in a list; None: all that there are, by name."""
    from datasets.exceptions import DatasetsError

    path = _path(recipe)
    try:
        with other_libraries.datasets_offline():
            return _load_saved(path, names) if names and _saved_splits(path) else _load_files(recipe, path, names)
    except ConnectionError as error:
        raise DataError(
            f"data.path={path} is not a file or folder here, nor a data set in the cache of the datasets "
            "library; correct the path, or set data.download=true to download it from the hub"
        ) from error
    except (OSError, ValueError, DatasetsError) as error:
        asked = ", ".join(f"data.{split}_split={name}" for split, name in (names or {}).items())
        with_names = f" with {asked}" if asked else ""
        raise DataError(f"data.path={path} cannot be opened{with_names}: {first_line(error)}") from error


def _saved_splits(path: Path) -> list[str]:
    """Return the names of the splits that save_to_disk wrote; "." is the folder itself, a Dataset without splits."""
    return sorted(str(state.parent.relative_to(path)) for state in (*path.glob("state.json"), *path.glob("*/state.json")))


def _load_saved(path: Path, names: dict[str, str]) -> list[Any]:
    saved = _saved_splits(path)
    if saved == ["."]:
        raise DataError(
            f"data.path={path} is a single Dataset without splits; save a DatasetDict with a split {names['train']}"
        )
    for split, name in names.items():
        if name not in saved:
            raise DataError(f"data.{split}_split={name}: {path} has the splits {', '.join(saved)}; use one of these")
    try:
        return [other_libraries.saved_data_set(path / name) for name in names.values()]
    except IndexError as error:  # what version 5.2 makes of a split that was empty when it was saved
        raise DataError(f"data.path={path}: one of the splits {' and '.join(names.values())} has no samples") from error


def _refuse_for_files(recipe: Sections, path: Path) -> None:
    """Raise RecipeError for a configuration or a revision of what has none."""
    data = recipe.data
    if data.hub_config is not None and (path.is_file() or _saved_splits(path)):
        what = "a file" if path.is_file() else "a folder that save_to_disk wrote"
        raise RecipeError(
            f"data.hub_config={data.hub_config}: {path} is {what}, which has no configurations; remove data.hub_config"
        )
    if data.hub_revision is not None and path.exists():
        raise RecipeError(
            f"data.hub_revision={data.hub_revision}: {path} is a local path, and only data sets on the hub "
            "have revisions; remove data.hub_revision"
        )


def _load_files(recipe: Sections, path: Path, names: dict[str, str] | None) -> Any:
    splits = None if names is None else list(names.values())

    if path.is_file():
        if path.suffix.lower() not in BUILDERS:
            raise DataError(
                f"data.path={path} is a file of an unknown kind ({', '.join(BUILDERS)}); use one of these, or a folder"
            )
        return other_libraries.data_set(BUILDERS[path.suffix.lower()], data_files=str(path), split=splits)
    if recipe.data.hub_revision is not None:
        return _load_pinned(recipe, names)
    return other_libraries.data_set(str(path.absolute() if path.exists() else path), recipe.data.hub_config, split=splits)


def _load_pinned(recipe: Sections, names: dict[str, str] | None) -> Any:
    """Return the splits of a commit, as `_load` does, from the library's cache. Raises DataError if it is not there.

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
        raise DataError(
            f"{of}{config} is not in the cache of the datasets library; correct it, or set data.download=true "
            "to download it from the hub"
        )
    if len(found) > 1:
        configs = ", ".join(folder.parent.parent.name for folder in found)
        raise DataError(f"{of} has several configurations: set data.hub_config to one of {configs}")
    config, version, commit = found[0].parts[-3:]
    builder = Cache(repo_id=name, dataset_name=last, config_name=config, version=version, hash=commit)
    return builder.as_dataset() if names is None else [builder.as_dataset(split=split) for split in names.values()]


def _check_columns(rows: Any, recipe: Sections, where: str) -> None:
    named = {"data.image_column": recipe.data.image_column, "data.label_column": recipe.data.label_column}
    for key, column in named.items():
        if column not in rows.column_names:
            raise DataError(f"{key}={column}: {where} has the columns {', '.join(rows.column_names)}; use one of these")


def _pins(recipe: Sections) -> list[np.ndarray]:
    """What of the recipe tells the data from others of the same name, for the fingerprint; nothing where it says nothing."""
    said = (recipe.data.hub_config, recipe.data.hub_revision)
    return [np.frombuffer(repr(said).encode(), np.uint8)] if any(said) else []


def _open_split(
    reader: RowReader, classes: tuple[str, ...], train_reader: RowReader, framing: Framing, pins: list[np.ndarray]
) -> Source:
    first = reading(lambda index: next(iter(train_reader([index])))[0], train_reader.name)(0)
    channels, height, width = first.shape
    size = len(reader.labels)
    return PictureSource(
        read=reader,
        size=size,
        where=reader.where,
        classes=classes,
        channels=channels,
        image_size=framing.size_of((height, width)),
        framing=framing,
        fingerprint=fingerprint(classes, size, reading(reader.content, reader.name), listing=[reader.labels, *pins]),
        made_of=("huggingface", *stamps(Path(file["filename"]) for file in reader.rows.cache_files)),
    )
