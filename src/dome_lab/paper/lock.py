"""One writer a folder: a lock file that says who holds it.

The system gives the lock back when its process ends, however that ends, so a file that
is left over does not count. Where another machine wrote it, over a network's disk, that
cannot be known: it is believed, and told how to go on.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows: there the file alone counts
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".dome.lock"
PAUSE = 0.05


class LockedError(RuntimeError):
    """Somebody else is at work in a folder."""


@contextmanager
def locked(
    folder: Path, name: str = LOCK_FILE, *, patience: float = 0.0
) -> Iterator[None]:
    """Hold a folder's lock, or say who does.

    Args:
        folder: Exists.
        name: Of the lock file.
        patience: Seconds to wait for it.
    """
    path, end = folder / name, time.monotonic() + patience
    while True:
        try:
            handle = _taken(path)
            break
        except LockedError:
            if time.monotonic() >= end:
                raise
        time.sleep(PAUSE)
    try:
        with suppress(OSError):  # on a full disk it is held all the same
            os.write(handle, _about_us())
        yield
    finally:
        # Before it is closed: what another process then finds is not this file.
        path.unlink(missing_ok=True)
        os.close(handle)


def _taken(path: Path) -> int:
    """A handle on the lock file, which is empty and ours."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _claim(handle, path)
        except BaseException:
            os.close(handle)
            raise
        if _is_still(handle, path):
            return handle
        os.close(handle)  # its holder took it away between our two calls


def _claim(handle: int, path: Path) -> None:
    there = _read(handle)
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(_words(path, there)) from None
        there = _read(handle)
    host = there.get("host")
    if host is not None and (fcntl is None or host != socket.gethostname()):
        raise LockedError(
            f"{_words(path, there)}; if that process is gone, delete {path}"
        )
    os.ftruncate(handle, 0)


def _is_still(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _read(handle: int) -> dict[str, object]:
    """Who wrote the file; nothing if nobody did, or half of it is there."""
    try:
        about = json.loads(os.pread(handle, 1000, 0))
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}


def _about_us() -> bytes:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    return (json.dumps(about) + "\n").encode()


def _words(path: Path, about: dict[str, object]) -> str:
    who = "another process"
    if about:
        who = (
            f"process {about.get('pid')} on {about.get('host')}, since "
            f"{about.get('since')}"
        )
    return f"{path.parent} is in use by {who}: wait for it, or give another folder"
