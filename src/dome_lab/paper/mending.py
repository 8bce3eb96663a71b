"""A file of rows before more are added to it: whole runs, or an error with the line.

The end that a killed process left is cut off: its run is computed again. A line in the
middle that is not a row was not written by us, and is refused by its number. Rows of
others are left where they are.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from dome_lab.paper.rows import NUM_ROWS, Row, key_of, num_whole, parse, same_run

MOST_TOLD = 5  # numbers of lines
_EMPTY = b"\0 \t\r\n"  # a crashed disk may leave zeros for what was not written
_FIRST = b'{"task": '  # how a row of ours begins


def mend(path: Path) -> None:
    """Leave whole runs in a file; ``ValueError`` if a line in the middle is broken.

    Nobody else may be writing to it. A file that has no row of ours is refused, unless
    it is the beginning of the first one.
    """
    content = path.read_bytes() if path.exists() else b""
    lines = content.splitlines(keepends=True)
    rows = _without_torn_end(lines)
    if not _has_ours(content, rows):
        raise ValueError(
            f"{path} has no rows in it that dome wrote: move it away, or name another"
        )
    num_kept = len(rows) - _num_torn(rows)
    if broken := _broken(lines, rows):
        gone = sorted({*broken, *_lacking(rows[:num_kept])})
        raise ValueError(
            f"{path}, {_listed(broken)} cannot be read: delete {_listed(gone)} "
            f"(whose runs are then computed again), or move the file away"
        )
    if (end := sum(map(len, lines[:num_kept]))) < len(content):
        os.truncate(path, end)


def broken_notes(path: Path) -> list[str]:
    """What cannot be read in a file that is only looked at, in words; none if all can.

    The end that a killed process left, or that is being written, is not counted.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    broken = _broken(lines, _without_torn_end(lines))
    if not broken:
        return []
    return [f"{path.name}, {_listed(broken)} cannot be read; the rest is used."]


def _without_torn_end(lines: Sequence[bytes]) -> list[Row | None]:
    rows = [parse(line) for line in lines]
    while rows and rows[-1] is None and _is_torn(lines[len(rows) - 1]):
        rows.pop()
    return rows


def _is_torn(line: bytes) -> bool:
    """Whether a write that was stopped may have left this at the end of a file."""
    return not line.endswith(b"\n") or not line.strip(_EMPTY)


def _is_first(content: bytes) -> bool:
    """Whether these are the first bytes of a row of ours, or of nothing."""
    start = content.strip(_EMPTY)
    return start.startswith(_FIRST) or _FIRST.startswith(start)


def has_ours(content: bytes) -> bool:
    """Whether a file has a row of ours, or the beginning of the first one."""
    return _has_ours(content, [parse(line) for line in content.splitlines(True)])


def _has_ours(content: bytes, rows: Sequence[Row | None]) -> bool:
    return any(map(_is_ours, rows)) or _is_first(content)


def _is_ours(row: Row | None) -> bool:
    return row is not None and NUM_ROWS in row and key_of(row) is not None


def _broken(lines: Sequence[bytes], rows: Sequence[Row | None]) -> list[int]:
    """Numbers of the lines that are no rows, from 1 on."""
    pairs = enumerate(zip(lines, rows, strict=False), start=1)
    return [n for n, (line, row) in pairs if row is None and line.strip()]


def _lacking(rows: Sequence[Row | None]) -> list[int]:
    """Numbers of the rows of ours whose run is not all there."""
    places = [place for place, row in enumerate(rows) if row is not None]
    there = [row for row in rows if row is not None]
    found, start = [], 0
    while start < len(there):
        number = num_whole(there, start)
        if _is_ours(there[start]) and not number:
            found.append(places[start] + 1)
        start += number or 1
    return found


def _num_torn(rows: Sequence[Row | None]) -> int:
    """How many rows at the end are the beginning of a run that is not all there."""
    alike: list[Row] = []
    for row in reversed(rows):
        if row is None or not same_run([row, *alike[:1]]):
            break
        alike.append(row)
    number = alike[0].get(NUM_ROWS) if alike else None
    return len(alike) % number if isinstance(number, int) and number > 0 else 0


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:MOST_TOLD]))
    if len(numbers) > MOST_TOLD:
        shown += f" and {len(numbers) - MOST_TOLD} more"
    return f"line{'s' if len(numbers) > 1 else ''} {shown}"
