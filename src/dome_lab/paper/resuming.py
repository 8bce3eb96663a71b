"""A run that goes on where it stopped: its state after the last whole epoch, on disk.

The state lies beside the file of rows that the run will be added to, under a name made
from the run, until the run is over. It holds tensors and numbers only.
"""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dome.files import whole_file
from dome_lab.paper.rows import Row
from dome_lab.paper.run import Run
from dome_lab.paper.training import Training

NAME_LENGTH = 12


class StateFile:
    """The state of one run on disk.

    Args:
        out: The file of rows.
        run: The run.
    """

    def __init__(self, out: Path, run: Run) -> None:
        told = json.dumps(run.columns(), sort_keys=True)
        digest = hashlib.sha256(told.encode()).hexdigest()[:NAME_LENGTH]
        self.path = out.with_name(f"{out.name}.{digest}.state")
        self.rows: list[Row] = []
        self.note = ""
        self._state: dict[str, Any] | None = None
        self._read()

    def restore(self, training: Training) -> None:
        """Put a training behind the last epoch that was kept, if there is one."""
        if self._state is not None:
            training.load_state_dict(self._state)
            self._state = None

    def keep(self, training: Training, row: Row) -> None:
        """Write the state after an epoch, whole or not at all."""
        self.rows.append(row)
        state = {
            "made_with": _made_with(),
            "rows": json.dumps(self.rows),
            "training": training.state_dict(),
        }
        with whole_file(self.path) as file:
            torch.save(state, file)  # type: ignore[arg-type] # write() is enough

    def remove(self) -> None:
        """The run is stored: its state is not needed any more."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        """Of a state that does not fit, say why; the run then begins anew."""
        if not self.path.exists():
            return
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            rows, made_with = json.loads(state["rows"]), state["made_with"]
        except Exception as error:  # noqa: BLE001 - whatever a damaged file makes of it
            self.note = f"cannot be read ({type(error).__name__})"
            return
        if made_with != _made_with():
            self.note = f"was made with {made_with}, not {_made_with()}"
            return
        self.rows, self._state = rows, state["training"]


def _made_with() -> str:
    """What the last digits depend on."""
    return (
        f"dome {version('dome-torch')}, torch {version('torch')}, "
        f"{torch.get_num_threads()} threads"
    )
