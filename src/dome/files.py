"""Bytes on disk: all of them, or the file as it was before.

A system call may write less than it was given and call that a success: so it does where
a disk fills. What is written here is counted, and waited for until the disk has it.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DiskFullError(OSError):
    """There was no room for a file; what had been there is there, and whole."""


def append_bytes(path: Path, content: bytes) -> None:
    """Add to the end of a file all of the content, or nothing of it.

    The writer of a file is alone: what another one adds at the same moment could be cut
    off again with what did not fit.
    """
    with _told(path), _opened(path, os.O_APPEND) as handle:
        _add(handle, content, sync=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: into a neighbour, which is then renamed."""
    with whole_file(path) as file:
        file.write(content)


class Checked:
    """A file to write to, whose first error is remembered.

    What writes through C++, as ``torch.save``, tells of a full disk in other words.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        """Write all of it."""
        try:
            _write_all(self._handle, content)
        except OSError as error:
            self.error = error
            raise
        return len(content)

    def flush(self) -> None:
        """Files have it; here every byte has been written already."""


@contextmanager
def whole_file(path: Path) -> Iterator[Checked]:
    """A file that takes the place of another when the block ends without an error."""
    temporary = temporary_of(path)
    with _told(path):
        with _opened(temporary, os.O_TRUNC) as handle:
            file = Checked(handle)
            try:
                yield file
                os.fsync(handle)
            except BaseException:
                with suppress(OSError):  # the reason that counts is the first
                    temporary.unlink()
                if file.error is not None:
                    raise file.error from None
                raise
        temporary.replace(path)
        _sync_folder(path.parent)


def temporary_of(path: Path) -> Path:
    """The neighbour that a file is written to before it is renamed."""
    return path.with_name(path.name + ".tmp")


class Appender:
    """A file that is added to again and again; every time all, or nothing.

    The system has what was added when ``append`` returns, the disk some time later: to
    wait for it after every step would cost more than the step.

    Args:
        path: The file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666
        )

    def append(self, content: bytes) -> None:
        """Add the content."""
        handle = self._handle
        if handle is None:
            raise ValueError(f"{self._path} was closed: open it again to add to it")
        with _told(self._path):
            _add(handle, content, sync=False)

    def close(self) -> None:
        """Close the file. Can be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


@contextmanager
def _opened(path: Path, how: int) -> Iterator[int]:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


def _add(handle: int, content: bytes, *, sync: bool) -> None:
    """To the end; if that fails for any reason, undo it and pass the reason on."""
    before = os.fstat(handle).st_size
    try:
        _write_all(handle, content)
        if sync:
            os.fsync(handle)
    except BaseException:
        with suppress(OSError):
            os.ftruncate(handle, before)
        raise


def _write_all(handle: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(handle, left) :]


def _sync_folder(folder: Path) -> None:
    """Have the disk remember a new name; not every system can open a folder."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise DiskFullError(
            f"disk full ({error.strerror}): {path} is as it was before; free some "
            "space and try again"
        ) from error
