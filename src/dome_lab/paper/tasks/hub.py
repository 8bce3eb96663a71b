"""Decoded data sets on disk, so that they are decoded once and then read.

In ``DOME_CACHE``, else ``~/.cache/dome``. Files are written whole or not at all, carry
checksums, and can be deleted at any time.
"""

import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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


DATA_VARIABLE = "DOME_DATA"

Rows = Any  # datasets.Dataset, whose import takes half a second and waits for its use


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A data set on the Hub, and what in it is used.

    Attributes:
        name: As on the Hub, owner/name.
        inputs: The column of images or texts.
        labels: The column of classes.
        train: The split to train on.
        test: The split to test on.
    """

    name: str
    inputs: str
    labels: str
    train: str = "train"
    test: str = "test"


def data_folder(data_dir: Path | None) -> Path | None:
    """The folder of data sets: the argument, else ``DOME_DATA``, else None: the Hub."""
    if data_dir is not None:
        return data_dir
    variable = os.environ.get(DATA_VARIABLE)
    return Path(variable).expanduser() if variable else None


def load_splits(source: Source, folder: Path | None) -> tuple[Rows, Rows]:
    """Training and test rows, with their columns checked, nothing decoded yet.

    Args:
        source: What to load.
        folder: The folder of data sets; None takes the Hub.
    """
    where = source.name if folder is None else str(_local(source, folder))
    splits = _load(where, local=folder is not None)
    for split in (source.train, source.test):
        if split not in splits:
            raise ValueError(
                f"{where} has no split {split!r}, only {_listed(splits)}: "
                f"arrange it as {source.name} is on the Hub"
            )
        rows = splits[split]
        for column in (source.inputs, source.labels):
            if column not in rows.column_names:
                raise ValueError(
                    f"{where}, split {split!r}, has no column {column!r}, only "
                    f"{_listed(rows.column_names)}: arrange it as {source.name} is "
                    "on the Hub"
                )
        if not len(rows):
            raise ValueError(f"{where}, split {split!r}, has no rows")
    return splits[source.train], splits[source.test]


def _local(source: Source, folder: Path) -> Path:
    path = folder / source.name
    for needed in (folder, path):
        if not needed.is_dir():
            raise ValueError(
                f"no folder {needed}: give a folder that holds {source.name} with "
                f"--data-dir or {DATA_VARIABLE}, or neither to download from the Hub"
            )
    return path


def _load(where: str, *, local: bool) -> Rows:
    import datasets

    try:
        with _quiet():
            return datasets.load_dataset(where)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        way_out = (
            "put the data set's files there as they are on the Hub"
            if local
            else f"with no way to the Hub, give a folder that holds {where} with "
            f"--data-dir or {DATA_VARIABLE}"
        )
        raise ValueError(f"cannot load {where}: {cause}; {way_out}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no warnings of the two libraries; both as before after."""
    import datasets
    import huggingface_hub.utils as hub

    bars: list[Any] = [
        library
        for library in (datasets, cast(Any, hub))
        if not library.are_progress_bars_disabled()
    ]
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for library in bars:
        library.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for library in bars:
            library.enable_progress_bars()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _listed(names: Any) -> str:  # noqa: ANN401 - any iterable of names
    return ", ".join(repr(name) for name in names)
