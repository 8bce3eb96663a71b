"""Decoded data sets on disk, so that they are decoded once and then read.

In ``DOME_CACHE``, else ``~/.cache/dome``. Files are written whole or not at all, carry
checksums, and can be deleted at any time.
"""

import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CACHE_VARIABLE = "DOME_CACHE"

Arrays = dict[str, NDArray[np.generic]]


def cache_folder() -> Path:
    """Where decoded data sets are kept."""
    variable = os.environ.get(CACHE_VARIABLE)
    return Path(variable).expanduser() if variable else Path.home() / ".cache" / "dome"


def cached(key: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays stored under a key; made and stored if there are none, or damaged.

    Args:
        key: A file name without ending; says all that the arrays depend on.
        make: Computes them.
    """
    path = cache_folder() / f"{key}.npz"
    found = _read(path)
    if found is not None:
        return found
    arrays = make()
    try:
        _write(path, arrays)
    except OSError as error:
        raise ValueError(
            f"cannot keep decoded data in {path.parent}: {error}; set {CACHE_VARIABLE} "
            "to a folder with room"
        ) from error
    return arrays


def _read(path: Path) -> Arrays | None:
    try:
        # Opened here, because numpy leaves a truncated file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    # What a missing, truncated or altered file raises; the zip format has checksums.
    except (OSError, EOFError, ValueError, zipfile.BadZipFile):
        return None


def _write(path: Path, arrays: Arrays) -> None:
    """Into a file of its own, then renamed: others see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
