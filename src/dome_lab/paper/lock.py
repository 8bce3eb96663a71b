"""Lock files, for processes and machines that share a folder.

A lock file holds the process, the host and the time. The system releases the lock when
its process ends, however that ends, so a file that is left over does not count. That is
not known of a process on another machine. Its heartbeat tells: as long as a lock is
held, the time of its file is renewed. Without one for ``STALE`` seconds the lock is
taken over. Ages are told by the clock of the disk, not of either machine.
"""

import json
import math
import os
import socket
import threading
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
PATIENCE = 60.0  # seconds, for a lock that is held for a moment only
BEAT, STALE = 15.0, 180.0  # a network's disk may show times a minute late
SETTLE = 1.0  # until a lock that was taken over is known to be ours


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
        with _beating(handle, path):
            yield
    finally:
        # Before it is closed: what another process then finds is not this file.
        if _names_us(path):
            path.unlink(missing_ok=True)
        os.close(handle)


def _taken(path: Path) -> int:
    """A handle on the lock file, which is empty and ours."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_ours = _claim(handle, path)
        except BaseException:
            os.close(handle)
            raise
        if is_ours and _is_still(handle, path):
            return handle
        os.close(handle)  # its holder took it away between our two calls


def _claim(handle: int, path: Path) -> bool:
    """Write us into the file, or say who holds it; whether nobody did so after us."""
    there = _read(handle)
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(_words(path, there)) from None
        there = _read(handle)
    host = there.get("host")
    is_foreign = host is not None and (fcntl is None or host != socket.gethostname())
    if is_foreign and (age := _age(path)) <= STALE:
        raise LockedError(
            f"{_words(path, there)}; its last sign of life is {max(age, 0):.0f} s old, "
            f"and at {STALE:.0f} s the lock is taken over"
        )
    os.ftruncate(handle, 0)
    with suppress(OSError):  # on a full disk it is held all the same
        os.write(handle, _about_us())
    if not is_foreign:
        return True
    time.sleep(SETTLE)  # another machine may take it over at the same moment
    return _names_us(path)


def _names_us(path: Path) -> bool:
    """Whether the file is ours still, or has nobody in it."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        there = _read(handle)
    finally:
        os.close(handle)
    us: dict[str, object] = {"pid": os.getpid(), "host": socket.gethostname()}
    return us.items() <= (us | there).items()


def _age(path: Path) -> float:
    """Seconds since the last heartbeat, by the clock of the disk."""
    now = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.now")
    now.touch()
    try:
        return now.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
    finally:
        now.unlink(missing_ok=True)


@contextmanager
def _beating(handle: int, path: Path) -> Iterator[None]:
    """Renew the time of the file in the background."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT):
            with suppress(OSError):
                # By the handle: a file of the same name may be another one's.
                os.utime(handle if os.utime in os.supports_fd else path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


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
