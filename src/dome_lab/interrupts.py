"""Ctrl-C, from the first line of the command to its last.

Python's own handler raises ``KeyboardInterrupt`` wherever the program happens to be.
torch imports numpy from C++ while it is imported itself, and clears whatever is raised
in there; in a callback of the garbage collector Python drops the exception: the press
is lost. So there are two ways here:

- While the command starts there is nothing to put in order, and the process ends at
  once, without an exception that could be dropped.
- While it works (``working``) the exception is raised. If it is dropped it is raised
  again, by a timer where Python tells of it, else at the next step (``check``). The
  third press ends the process without more ado; its workers end with it.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
MOST_PRESSES = 3
_WORDS = {False: b"stopped; nothing was begun\n", True: b"stopped\n"}
AGAIN = 0.05  # seconds until a dropped interrupt is raised again

_presses = 0
_is_working = False


def install() -> None:
    """Take over Ctrl-C, unless this process was started not to hear it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # ignored, as a script's background jobs do; or taken over already
    signal.signal(signal.SIGINT, _pressed)
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.signal(signal.SIGALRM, _raise_again)
        before = sys.unraisablehook

        def hook(dropped: "sys.UnraisableHookArgs") -> None:
            if dropped.exc_type is KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, AGAIN)
            else:
                before(dropped)

        sys.unraisablehook = hook


@contextmanager
def working() -> Iterator[None]:
    """From here on there is something to put in order when it is stopped."""
    global _is_working  # noqa: PLW0603 - one process, one keyboard
    before, _is_working = _is_working, True
    try:
        yield
    finally:
        _is_working = before


def is_pending() -> bool:
    """Whether Ctrl-C was pressed and has not arrived."""
    return _presses > 0


def check() -> None:
    """Raise what was pressed and has not arrived; called between steps."""
    if is_pending():
        raise KeyboardInterrupt


def arrived() -> None:
    """The interrupt is being dealt with."""
    global _presses  # noqa: PLW0603 - as above
    _presses = 0


def over() -> None:
    """All is done and told: there is nothing left that Ctrl-C could stop.

    Python hears no signal while it takes itself apart. What is pressed then would look
    like a press that was lost.
    """
    if signal.getsignal(signal.SIGINT) is _pressed:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave() -> NoReturn:
    """End an interrupted process with the code for that.

    Where Python code was run by C code when Ctrl-C was pressed, Python remembers it as
    unhandled, and would in the end kill itself with the signal.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed at the other end
            stream.flush()
    os._exit(INTERRUPTED)


def _pressed(_number: int, _frame: FrameType | None) -> None:
    global _presses  # noqa: PLW0603 - as above
    _presses += 1
    if not _is_working or _presses >= MOST_PRESSES:
        os.write(2, _WORDS[_is_working])
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def _raise_again(_number: int, _frame: FrameType | None) -> None:
    check()
