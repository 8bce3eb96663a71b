"""``Recorder``: what the filter did, step by step, for other programs to read.

recorder = dome.Recorder("run.csv")        # or run.jsonl, or any function of a record
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
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from torch import Tensor

from dome.files import Appender

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = int | float | bool | None
Record = dict[str, Value]

FILTERED = "filtered"  # the column that says no in a loop without a filter


class HasStats(Protocol):
    """A ``GradientFilter``, a private filter, or anything else with ``.stats``."""

    @property
    def stats(self) -> "DataclassInstance":
        """What the last step did: a dataclass of numbers."""


class _Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Writes ``.stats`` of a filter, and other numbers, after steps of any loop.

    A file that is there is added to, so that a resumed run continues in it; the system
    has every record when ``record`` returns. A disk that is full is an error, and the
    records before it are whole. ``elapsed`` is the seconds since the recorder was made,
    by which ``dome report`` compares runs.

    Args:
        to: A file that ends in .csv or .jsonl; or a function, which is called with each
            record: a dictionary of the numbers that are finite, by name.
        every: Record every n-th step only, beginning with the first; ``.stats`` is not
            computed on the others.
    """

    def __init__(
        self, to: str | Path | Callable[[Record], object], *, every: int = 1
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._every, self._num_calls = every, 0
        self._start = time.perf_counter()
        self._sink: _Sink = _Function(to) if callable(to) else _file(Path(to))

    def record(self, grad_filter: HasStats | None, **more: float | Tensor) -> None:
        """Write what the last step did.

        Args:
            grad_filter: Whose ``.stats`` to write; None in a loop without a filter,
                which ``dome report`` then takes as the baseline.
            more: Other numbers of the step, such as its loss.
        """
        due = self._num_calls % self._every == 0
        self._num_calls += 1
        if not due:
            return
        own: Record = {"step": self._num_calls, FILTERED: False}
        if grad_filter is not None:
            own = _flat(asdict(grad_filter.stats))
        own["elapsed"] = time.perf_counter() - self._start
        if both := own.keys() & more.keys():
            raise ValueError(f"{sorted(both)} are recorded anyway: use other names")
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
        self._ends_whole = _ends_in_a_row(path)
        self._file = Appender(path)

    def write(self, record: Record) -> None:
        storable = {k: None if _is_lost(v) else v for k, v in record.items()}
        line = json.dumps(storable, allow_nan=False) + "\n"
        self._file.append((line if self._ends_whole else "\n" + line).encode())
        self._ends_whole = True

    def close(self) -> None:
        self._file.close()


class _Function:
    """A call a record; what is not a number is left out."""

    def __init__(self, function: Callable[[Record], object]) -> None:
        self._function = function

    def write(self, record: Record) -> None:
        self._function({k: v for k, v in record.items() if not _is_lost(v)})

    def close(self) -> None:
        """Whoever gave the function closes what it writes to."""


def _file(path: Path) -> _Sink:
    kinds: dict[str, Callable[[Path], _Sink]] = {".csv": _Csv, ".jsonl": _Jsonl}
    if path.suffix not in kinds or path.is_dir():
        raise ValueError(
            f"{path}: give a file that ends in .csv or .jsonl, or a function of a "
            f"record (for TensorBoard, one that calls add_scalar)"
        )
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}: make it first")
    return kinds[path.suffix](path)


def _header(path: Path) -> list[str] | None:
    """The columns of a file that is there already."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


def _ends_in_a_row(path: Path) -> bool:
    """Whether a file may be added to as it is; refused if it has no row of ours.

    A process that was killed may have left half a row at the end.
    """
    content = path.read_bytes() if path.exists() else b""
    if content and not any(map(_is_row, content.splitlines())):
        raise ValueError(
            f"{path} has no rows of a Recorder in it: move it away, or name another"
        )
    return not content or content.endswith(b"\n")


def _is_row(line: bytes) -> bool:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and "step" in row


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
