"""Results on disk: flat rows in JSON lines, what made them in a ``.meta.json`` beside.

Every row carries all that its run depends on, so a file needs no index: a run that is
wanted is either in it or not. A run's rows are appended in one piece when the run is
over, each with their number (``of``), so that a job killed at any moment loses the runs
under way and nothing else. Before rows are added the end that a killed process left is
cut off (``mend``). A line in the middle that is not a row is refused by its number.
A command replaces only files that it wrote itself (``check_own``).
"""

import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.metadata import version
from pathlib import Path

from dome.files import append_bytes, write_bytes
from dome_lab.paper.run import Run, Value

PAGE = b"Page written by dome"  # at the end of every report
_DRAWN_BY = b"atplotlib"  # in every PNG and PDF of ours


def check_own(
    path: Path, is_own: Callable[[bytes], bool], *, way_out: str = ""
) -> None:
    """Refuse to replace a file that a command did not write.

    Args:
        path: What is about to be written.
        is_own: Tells by the content of a file.
        way_out: What else the user may do, in words.
    """
    if path.exists() and not is_own(path.read_bytes()):
        raise ValueError(
            f"{path} was not written by dome: move it away, or name another place"
            f"{way_out}"
        )


def check_apart(path: Path, sources: Iterable[Path]) -> None:
    """Refuse to replace what is read, by whatever name."""
    for source in sources:
        if path.exists() and source.exists() and path.samefile(source):
            raise ValueError(
                f"--out {path} is what the page is made of: name another file"
            )


def is_page(content: bytes) -> bool:
    """Whether a file is a report."""
    return PAGE in content


def is_picture(content: bytes) -> bool:
    """Whether a file is a figure that was drawn."""
    return _DRAWN_BY in content


def is_noted(content: bytes) -> bool:
    """Whether a file is what is noted beside rows; a damaged one may be replaced."""
    try:
        facts = json.loads(content)
    except ValueError:
        return True
    return isinstance(facts, dict) and isinstance(facts.get("made_with"), list)


def is_claims(content: bytes) -> bool:
    """Whether a file is a list of verdicts."""
    try:
        claims = json.loads(content)
    except ValueError:
        return False
    return isinstance(claims, list) and all(
        isinstance(claim, dict) and "verdict" in claim for claim in claims
    )


def is_answer(content: bytes) -> bool:
    """Whether a file has the numbers of ``dome bench``."""
    try:
        facts = json.loads(content)
    except ValueError:
        return False
    return isinstance(facts, dict) and {"question", "machine", "rows"} <= facts.keys()


Row = dict[str, Value]
Key = tuple[str, Run]  # what made the rows (a module's name), and of which run

TRAINING = "train"
NUM_ROWS, MADE_BY = "of", "made_by"  # the columns that are added to stored rows

_LARGEST = int(sys.float_info.max)
_DEEPEST = 8  # levels of lists and objects in a row
# Lines that may hold what JSON allows and rows do not: looked at value by value.
_IS_ODD = re.compile(rb"\d{300}|\\u[dD]|\xed|[\[{](?:[^\[{]*[\[{]){8}").search


def read_rows(path: Path) -> list[Row]:
    """The whole rows of a file, in order; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [row for line in lines if (row := parse(line)) is not None]


def append_run(path: Path, rows: Sequence[Row], made_by: str = TRAINING) -> list[Row]:
    """Add all rows of a run or none, and wait until the disk has them.

    Args:
        path: The JSONL file; its folder exists.
        rows: All the rows of one run. NaN and infinity become null, and so does a
            spectrum that has them.
        made_by: Sets apart rows of the same run that are of different kinds.

    Returns:
        The rows as they were stored.
    """
    about: Row = {MADE_BY: made_by, NUM_ROWS: len(rows)}
    stored = [{k: _storable(v) for k, v in (row | about).items()} for row in rows]
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in stored)
    append_bytes(path, text.encode())
    return stored


def finished_runs(rows: Sequence[Row]) -> dict[Key, list[Row]]:
    """The runs of which every row is there; of a run stored twice, the first.

    Rows from before a setting existed get the value that it had then, its default.
    """
    found: dict[Key, list[Row]] = {}
    start = 0
    while start < len(rows):
        key, number = key_of(rows[start]), num_whole(rows, start)
        if key is not None and number:
            block = rows[start : start + number]
            settings = key[1].columns()
            found.setdefault(key, [settings | row for row in block])
        start += number or 1
    return found


def num_whole(rows: Sequence[Row], start: int) -> int:
    """How many rows the whole run has that begins at ``start``; 0 if none does."""
    number = rows[start].get(NUM_ROWS)
    block = rows[start : start + number] if isinstance(number, int) else []
    return len(block) if len(block) == number and same_run(block) else 0


def same_run(rows: Sequence[Row]) -> bool:
    """Whether rows are of one run, and one kind."""
    return all(
        key_of(row) == key_of(rows[0]) and row.get(NUM_ROWS) == rows[0].get(NUM_ROWS)
        for row in rows
    )


def find_run(paths: Iterable[Path], key: Key) -> list[Row] | None:
    """The rows of one run, if this version of the code stored them.

    Only its own lines are parsed: quick enough to ask before every run.
    """
    beginning = json.dumps(key[1].columns())[:-1].encode()
    for path in paths:
        lines = path.read_bytes().splitlines(keepends=True)
        mine = [parse(line) for line in lines if line.startswith(beginning)]
        rows = finished_runs([row for row in mine if row is not None])
        if key in rows:
            return rows[key]
    return None


def read_runs(paths: Iterable[Path]) -> dict[Key, list[Row]]:
    """The finished runs of several files."""
    found: dict[Key, list[Row]] = {}
    for path in paths:
        found = finished_runs(read_rows(path)) | found
    return found


def key_of(row: Row) -> Key | None:
    """Which run a row is of; None if that cannot be told."""
    given = {f.name: row[f.name] for f in fields(Run) if f.name in row}
    needed = {f.name for f in fields(Run) if f.default is MISSING}
    if not needed <= given.keys():
        return None
    try:
        run = Run(**given)  # type: ignore[arg-type]
        hash(run)
    except (TypeError, ValueError):  # a value that no run can have
        return None
    return str(row.get(MADE_BY, TRAINING)), run


def seconds_of(rows: Iterable[Row]) -> float:
    """How long rows took to compute, together."""
    taken = (row.get("seconds") for row in rows)
    return math.fsum(s for s in taken if isinstance(s, int | float))


def meta_path(path: Path) -> Path:
    """Where the settings and the provenance of a row file are."""
    return path.with_suffix(".meta.json")


def record_session(
    path: Path, facts: Mapping[str, object], device: str | None = None
) -> None:
    """Note beside the rows what they are, and what is about to add to them.

    Args:
        path: The JSONL file.
        facts: Settings, replacing those that are noted.
        device: What computes the rows; None if none will be added.
    """
    meta = meta_path(path)
    check_own(meta, is_noted)
    sessions = _sessions(meta)
    newest = None if device is None else provenance(device)
    if newest is not None and newest not in sessions:
        sessions.append(newest)
    noted = dict(facts) | {"made_with": sessions}
    write_text(meta, json.dumps(noted, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_bytes(path, text.encode())


def provenance(device: str = "cpu") -> Row:
    """Versions, commit and machine, as flat values."""
    return {
        "dome": version("dome-torch"),
        "commit": commit(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "cores": os.cpu_count(),
    }


def commit() -> str | None:
    """The commit of the source tree, and if it was changed; None if installed."""
    here = str(Path(__file__).parent)
    describe = [
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty=+changes",
    ]
    command = ["git", "-C", here, *describe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def parse(line: bytes) -> Row | None:
    """A row, or None for a line that is not one, or is not all there."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = line.endswith(b"\n") and isinstance(row, dict)
    return row if whole and (not _IS_ODD(line) or _is_usable(row)) else None


def _is_usable(value: object, depth: int = 0) -> bool:
    """Whether a value fits a float, a page in UTF-8 and a few levels of nesting."""
    if isinstance(value, str):
        return not any(map(_is_surrogate, value))
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return depth < _DEEPEST and all(_is_usable(one, depth + 1) for one in value)
    return True


def _is_surrogate(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"


def _storable(value: Value) -> Value:
    numbers = value if isinstance(value, list) else [value]
    lost = any(isinstance(v, float) and not math.isfinite(v) for v in numbers)
    return None if lost else value


def _sessions(meta: Path) -> list[object]:
    try:
        facts = json.loads(meta.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    sessions = facts.get("made_with") if isinstance(facts, dict) else None
    return sessions if isinstance(sessions, list) else []


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
