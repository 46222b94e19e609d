"""Compressed files, read decompressed: .gz, .bz2, .xz and .zst. The errors of all decompressors become one."""

from __future__ import annotations

import bz2
import functools
import gzip
import lzma
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.data.extras import extra
from app.errors import DataError

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")


def is_compressed(path: Path) -> bool:
    """Return whether the name of a file says that it is compressed."""
    return path.suffix.lower() in SUFFIXES


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file for reading bytes, decompressed. Raises DataError, in the block as well, if it cannot be read to its end."""
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    if path.suffix.lower() == ".zst":
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            with extra(f"{path}: .zst"):
                from backports import zstd
        window = {zstd.DecompressionParameter.window_log_max: 31}  # `zstd --long=31` writes such files
        openers[".zst"] = functools.partial(zstd.open, options=window)
        errors = (*errors, zstd.ZstdError)
    try:
        with openers.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except errors as error:
        raise unreadable(path, error) from error


def unreadable(path: Path | str, error: Exception) -> DataError:
    """Return the error for a file that a decompressor, or another library, cannot read to its end."""
    if isinstance(error, OSError) and error.errno:
        return DataError(f"{path} cannot be read ({error.strerror}); repair or remove it")
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DataError(f"{path} cannot be read to its end ({why}): it is truncated or damaged; replace it")
