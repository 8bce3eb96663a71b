"""A run that resumes where it stopped: its state after the last whole epoch, on disk.

The state is a file of tensors and numbers under a name made from the run. It is written
whole or not at all, and removed when the run is over. Only the code that wrote it, by
commit and versions, may read it. The rows are then, bit for bit, those of a run that
was not stopped.
"""

import hashlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dome.files import temporary_of, whole_file
from dome_lab.paper.rows import Key, Row, commit
from dome_lab.paper.training import Training

NAME_LENGTH = 12


class StateFile:
    """The state of one run on disk.

    Attributes:
        path: The file.
        rows: Of the epochs that the state is behind.
        note: Why the file cannot be used; empty if it can, or if there is none.

    Args:
        path: The file, of this run only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.note = ""
        self._state: dict[str, Any] | None = None
        self._made_with = _made_with()
        self._read()

    def restore(self, training: Training) -> None:
        """Put a training behind the last epoch that was kept, if there is one."""
        if self._state is not None:
            training.load_state_dict(self._state)
            self._state = None

    def keep(self, training: Training, row: Row | None = None) -> None:
        """Write the state after an epoch, whole or not at all."""
        self.rows += [] if row is None else [row]
        state = {
            "made_with": self._made_with,
            "rows": json.dumps(self.rows),
            "training": training.state_dict(),
        }
        with whole_file(self.path) as file:
            torch.save(state, file)  # type: ignore[arg-type] # write() is enough

    def remove(self) -> None:
        """The run is stored: its state is not needed any more."""
        self.path.unlink(missing_ok=True)
        temporary_of(self.path).unlink(missing_ok=True)  # of a process killed then

    def _read(self) -> None:
        if not self.path.exists():
            return
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            rows, made_with = json.loads(state["rows"]), state["made_with"]
        except Exception as error:  # noqa: BLE001 - whatever a damaged file makes of it
            self.note = f"cannot be read ({type(error).__name__})"
            return
        if made_with != self._made_with:
            self.note = f"was made with {made_with}, not {self._made_with}"
            return
        self.rows, self._state = rows, state["training"]


def digest_of(key: Key) -> str:
    """A short name of a run and of what computes it."""
    made_by, run = key
    told = json.dumps([made_by, run.columns()], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:NAME_LENGTH]


def _made_with() -> str:
    """What the last digits depend on."""
    return f"{_code()}, {torch.get_num_threads()} threads"


@cache
def _code() -> str:
    versions = f"dome {version('dome-torch')}, torch {version('torch')}"
    return f"commit {commit()}, {versions}"
