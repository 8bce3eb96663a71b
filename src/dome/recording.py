"""``Recorder``: what the filter did, step by step, for other programs to read.

recorder = dome.Recorder("run.csv")        # or run.jsonl, or a TensorBoard folder
for x, y in loader:
    ...
    optimizer.step()
    recorder.record(grad_filter, loss=loss)
recorder.close()
"""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from dome.diagnostics import FilterStats
from dome.files import Appender

Value = int | float | bool | None
Record = dict[str, Value]

STEP = "step"


class HasStats(Protocol):
    """A ``GradientFilter``, or anything else with ``.stats``."""

    @property
    def stats(self) -> FilterStats:
        """What the last step did."""


class _Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Writes ``.stats`` of a filter, and what else is given, after steps of any loop.

    A file that is there is added to, so that a resumed run goes on in it; the system
    has every record when ``record`` returns, except in TensorBoard's own writer. A disk
    that is full is an error, and the records before it are whole.

    Args:
        path: A file that ends in .csv or .jsonl; a folder, for TensorBoard (which must
            be installed).
        every: Record every n-th step only, beginning with the first; ``.stats`` is not
            computed on the others.
        prefix: What TensorBoard's tags begin with.
    """

    def __init__(
        self, path: str | Path, *, every: int = 1, prefix: str = "dome"
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._every, self._num_calls = every, 0
        self._sink = _sink(Path(path), prefix)

    def record(self, grad_filter: HasStats, **more: float | Tensor) -> None:
        """Write what the last step did.

        Args:
            grad_filter: Whose ``.stats`` to write.
            more: Other numbers of the step, such as its loss.
        """
        due = self._num_calls % self._every == 0
        self._num_calls += 1
        if due:
            own = _flat(asdict(grad_filter.stats))
            if both := own.keys() & more.keys():
                raise ValueError(f"{sorted(both)} are in the stats: use other names")
            self._sink.write(own | {k: _number(k, v) for k, v in more.items()})

    def close(self) -> None:
        """Close the file. Can be called twice."""
        self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Csv:
    """A line a record; what is not a number is an empty cell."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns = _header(path)
        self._file = Appender(path)

    def write(self, record: Record) -> None:
        lines = []
        columns = list(record) if self._columns is None else self._columns
        if self._columns is None:
            lines.append(columns)
        if set(record) != set(columns):
            differ = sorted(set(record) ^ set(columns))
            raise ValueError(
                f"{self._path} has the columns {columns}, and {differ} differ: "
                f"give the same numbers at every step, or write to another file"
            )
        values = (record[column] for column in columns)
        lines.append(["" if _is_lost(v) else repr(v) for v in values])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines)
        self._file.append(text.getvalue().encode())
        self._columns = columns  # only now: the header may not have fitted

    def close(self) -> None:
        self._file.close()


class _Jsonl:
    """An object a line; what is not a number is null."""

    def __init__(self, path: Path) -> None:
        self._file = Appender(path)

    def write(self, record: Record) -> None:
        storable = {k: None if _is_lost(v) else v for k, v in record.items()}
        line = json.dumps(storable, allow_nan=False) + "\n"
        self._file.append(line.encode())

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    """A scalar a number; what is not a number is left out."""

    def __init__(self, path: Path, prefix: str) -> None:
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import FileWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{path} is a folder, for TensorBoard, which is not installed: pip "
                f"install 'dome-torch[tensorboard]', or give a file .csv or .jsonl"
            ) from error
        self._writer: Any = FileWriter(str(path))
        self._summary: Any = Summary
        self._prefix = prefix

    def write(self, record: Record) -> None:
        # One event for all numbers: one each, as add_scalar makes, takes longer.
        values = [
            self._summary.Value(tag=f"{self._prefix}/{name}", simple_value=value)
            for name, value in record.items()
            if name != STEP and not _is_lost(value)
        ]
        self._writer.add_summary(self._summary(value=values), record[STEP])

    def close(self) -> None:
        self._writer.close()


def _sink(path: Path, prefix: str) -> _Sink:
    kinds: dict[str, Callable[[Path], _Sink]] = {".csv": _Csv, ".jsonl": _Jsonl}
    if path.suffix in kinds and not path.is_dir():
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}: make it first")
        return kinds[path.suffix](path)
    if path.is_file() or (path.suffix and not path.is_dir()):
        raise ValueError(
            f"{path}: a file must end in .csv or .jsonl, and a folder for TensorBoard "
            f"must not end in {path.suffix!r} or be a file"
        )
    return _TensorBoard(path, prefix)


def _header(path: Path) -> list[str] | None:
    """The columns of a file that is there already."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


def _flat(stats: Mapping[str, Any]) -> Record:
    """Numbers by name; those of a dictionary as "name.key"."""
    flat: Record = {}
    for name, value in stats.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": part for key, part in _flat(value).items()}
        else:
            flat[name] = value
    return flat


def _number(name: str, value: float | Tensor) -> Value:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}: give a single number"
            )
        return value.item()
    return value


def _is_lost(value: Value) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))
