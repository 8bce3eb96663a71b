"""Who is missing when workers wait in vain: each leaves word, and says where it lives.

A worker that does not come to a step is known by the store. One that dies inside a step
came to it: its process is looked at where that is possible, and else the others, who
all give up and say so in the store, wait a little for word from it.
"""

import os
import socket
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from dome.torch_private import default_store

GRACE = 5.0  # seconds in which those who gave up, too, will have said so
_numbers = count()  # of groups of workers made in this process: the same on all


class RollCall:
    """What a worker knows of where the others are.

    Args:
        rank: This worker's.
        size: How many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._others = rank, [p for p in range(size) if p != rank]
        self.places: list[str] = [""] * size  # of all workers, once they have met
        self._arrivals, self._steps, self._at = 0, 0, ""
        # torchrun may keep one store over restarts: each life has names of its own.
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"dome/{life}/{next(_numbers)}"

    def arrive(self, at: str | None = None) -> None:
        """Leave word that this worker has come somewhere; to the next step if None."""
        self._arrivals += 1
        self._steps += at is None
        self._at = f"step {self._steps}" if at is None else at
        self._say("came")

    def missing(self) -> str:
        """Say that this worker gives up, and who is the reason for it, in words."""
        try:
            self._say("gave up")
            return self._told(*self._suspects())
        except RuntimeError:
            gone = [p for p in self._others if is_gone(self.places[p])]
            if gone:
                return self._told([], gone)
            return "and the store that knows who arrived does not answer either"

    def _suspects(self) -> tuple[list[int], list[int]]:
        """Who did not come; if all did, who has neither gone on nor given up."""
        deadline = time.monotonic() + GRACE
        while True:
            late = [p for p in self._others if self._last(p, "came") < self._arrivals]
            silent = [p for p in self._others if self._last(p, "gave up") == 0]
            found = late or silent
            gone = [p for p in found if is_gone(self.places[p])]
            if gone or len(late) == 1 or not found or time.monotonic() > deadline:
                found = gone or found
                return (found, []) if late else ([], found)
            time.sleep(0.05)  # the others may only be slow

    def _told(self, late: list[int], silent: list[int]) -> str:
        names = " and ".join(f"rank {p}" for p in late or silent) or "all"
        if late:
            said = f"{names} did not come to {self._at}"
        else:
            said = f"all ranks came to {self._at}, and {names} broke off in it"
        places = [self.places[p] for p in late or silent]
        seen = [f"{p.partition(' in ')[0]} has ended" for p in places if is_gone(p)]
        return f"{said} ({', '.join(seen)})" if seen else said

    def _say(self, what: str) -> None:
        default_store().set(self._name(self._rank, what), str(self._arrivals))

    def _last(self, worker: int, what: str) -> int:
        """At which of its arrivals a worker said something last; 0 for never."""
        store, name = default_store(), self._name(worker, what)
        return int(store.get(name)) if store.check([name]) else 0

    def _name(self, worker: int, what: str) -> str:
        return f"{self._prefix}/{worker}/{what}"


def own_place() -> str:
    """This process: its number, its machine, and the name space of its number."""
    namespace = ""
    with suppress(OSError):  # no Linux
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"process {os.getpid()} on {socket.gethostname()} in {namespace}"


def is_gone(place: str) -> bool:
    """Whether a process is seen to have ended; False where it cannot be looked at."""
    number, _, where = place.removeprefix("process ").partition(" ")
    here = own_place().removeprefix("process ").partition(" ")[2]
    if where != here or os.name != "posix":
        return False
    with suppress(OSError):  # no Linux, or none of it left
        about = Path(f"/proc/{number}/stat").read_text()
        return about.rpartition(")")[2].split()[0] in "ZX"  # dead, and not buried
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
