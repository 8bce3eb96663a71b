"""What becomes of rows that are not whole, before more are added to their file.

The end of a file that a killed process left is cut off: its run is computed again. A
line in the middle that is not a row was not written by us: it goes, as it was, into a
side file with its number, and so do the rows of a run that lacks some. After that a
file has whole runs, and rows of others, which are left where they are.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dome.files import append_bytes, write_bytes
from dome_lab.paper.rows import NUM_ROWS, Row, key_of, num_whole, parse, same_run

SIDE = ".broken"
MOST_TOLD = 5  # numbers of lines
_EMPTY = b"\0 \t\r\n"  # a crashed disk may leave zeros for what was not written
_FIRST = b'{"task": '  # how a row of ours begins


@dataclass(frozen=True, slots=True)
class Damage:
    """What was found in a file of rows.

    Attributes:
        path: The file.
        broken: Numbers of the lines that are no rows, from 1 on.
        lacking: Numbers of the rows whose run is not all there.
        is_kept: Whether these lines were put into the side file.
    """

    path: Path
    broken: tuple[int, ...] = ()
    lacking: tuple[int, ...] = ()
    is_kept: bool = True

    @property
    def notes(self) -> list[str]:
        """The same for a reader, a sentence each; none if nothing is broken."""
        kept = f", kept in {side_path(self.path).name}" if self.is_kept else ""
        told = []
        if self.broken:
            told.append(f"{_lines(self.broken)} cannot be read{kept}; the rest is used")
        if self.lacking:
            told.append(f"{_lines(self.lacking)}: of a run that lacks rows{kept}")
        return [f"{self.path.name}, {one}." for one in told]


def side_path(path: Path) -> Path:
    """Where the broken lines of a file are kept."""
    return path.with_name(path.name + SIDE)


def mend(path: Path) -> Damage:
    """Leave whole runs in a file, and tell what was not.

    Nobody else may be writing to it. A file that has no row at all is not ours, and is
    refused, unless it is the beginning of the first one.
    """
    content = path.read_bytes() if path.exists() else b""
    lines = content.splitlines(keepends=True)
    rows = _without_torn_end(lines)
    if not any(rows) and not _is_first(content):
        raise ValueError(f"{path} has no rows in it: move it away, or name another")
    num_kept = len(rows) - _num_torn(rows)
    damage = _damage(path, lines, rows[:num_kept])
    if damage.broken or damage.lacking:
        _set_aside(damage, lines, num_kept)
    elif (end := sum(map(len, lines[:num_kept]))) < len(content):
        os.truncate(path, end)
    return damage


def found_damage(path: Path) -> Damage:
    """What cannot be read, of a file that is not to be touched."""
    lines = path.read_bytes().splitlines(keepends=True)
    rows = _without_torn_end(lines)
    return replace(_damage(path, lines, rows), lacking=(), is_kept=False)


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


def _damage(path: Path, lines: Sequence[bytes], rows: Sequence[Row | None]) -> Damage:
    places = [place for place, row in enumerate(rows) if row is not None]
    there = [row for row in rows if row is not None]
    broken = [
        place + 1
        for place, row in enumerate(rows)
        if row is None and lines[place].strip()
    ]
    lacking, start = [], 0
    while start < len(there):
        number = num_whole(there, start)
        ours = NUM_ROWS in there[start] and key_of(there[start]) is not None
        if ours and not number:
            lacking.append(places[start] + 1)
        start += number or 1
    return Damage(path, tuple(broken), tuple(lacking))


def _set_aside(damage: Damage, lines: Sequence[bytes], num_kept: int) -> None:
    """Into the side file first: a line is in two places for a moment, never in none."""
    gone = sorted({*damage.broken, *damage.lacking})
    aside = [
        {"line": number, "was": lines[number - 1].decode(errors="backslashreplace")}
        for number in gone
    ]
    text = "".join(json.dumps(one) + "\n" for one in aside)
    append_bytes(side_path(damage.path), text.encode())
    kept = [line for n, line in enumerate(lines[:num_kept], start=1) if n not in gone]
    write_bytes(damage.path, b"".join(line for line in kept if line.strip()))


def _num_torn(rows: Sequence[Row | None]) -> int:
    """How many rows at the end are the beginning of a run that is not all there."""
    alike: list[Row] = []
    for row in reversed(rows):
        if row is None or not same_run([row, *alike[:1]]):
            break
        alike.append(row)
    number = alike[0].get(NUM_ROWS) if alike else None
    return len(alike) % number if isinstance(number, int) and number > 0 else 0


def _lines(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:MOST_TOLD]))
    if len(numbers) > MOST_TOLD:
        shown += f" and {len(numbers) - MOST_TOLD} more"
    return f"line{'s' if len(numbers) > 1 else ''} {shown}"
