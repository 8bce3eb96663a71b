"""What a report is made of: files of rows, with what is noted beside them.

Rows of ``dome train``, ``dome demo`` and ``dome reproduce`` say which run they are of.
Rows that do not, such as those of a loop of one's own, are one run a file, or one for
each value of a column ``run``; ``step`` or ``epoch`` tells when they were taken. Files
whose names differ in a seed alone, as plain-0.csv and plain-1.csv, are seeds of one
run.
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from dome_lab.paper.claims import FAILS, HOLDS, NOT_EVIDENCE, UNDECIDED, Claim
from dome_lab.paper.demo import ROWS_FILE
from dome_lab.paper.figures import short_name
from dome_lab.paper.reproduce import CLAIMS_FILE
from dome_lab.paper.rows import (
    NUM_ROWS,
    TRAINING,
    Key,
    Row,
    broken_notes,
    finished_runs,
    key_of,
    meta_path,
    parse,
)
from dome_lab.paper.run import VALIDATION, Value
from dome_lab.report import claims as claims_markdown
from dome_lab.report.labels import FILTERED, MADE_BY, RUN, is_plain

# What others call the columns that arms are compared by; the first one there counts.
NAMES = {
    "test_accuracy": ("accuracy", "val_accuracy", "acc"),
    "train_loss": ("loss",),
    "test_loss": ("val_loss", "eval_loss"),
    "total_bytes": ("total_bytes_sent", "bytes"),
}


def csv_rows(path: Path) -> list[Row]:
    """The rows of a CSV file: numbers and truth values as such, empty cells as None."""
    text = path.read_text(encoding="utf-8-sig")
    return [
        {name: _value(cell) for name, cell in row.items() if name is not None}
        for row in csv.DictReader(io.StringIO(text))
    ]


def renamed(row: Row) -> Row:
    """A row with our names for what arms are compared by."""
    row = dict(row)
    for ours, theirs in NAMES.items():
        found = [name for name in theirs if name in row]
        if ours not in row and found:
            row[ours] = row.pop(found[0])
    return row


def as_shares(rows: Sequence[Row]) -> list[Row]:
    """Rows whose accuracy is a share: where one is above 1 all are per cent."""
    there = [
        v for row in rows if isinstance(v := row.get("test_accuracy"), int | float)
    ]
    if not any(value > 1 for value in there):
        return list(rows)
    return [
        row | {"test_accuracy": v / 100}
        if isinstance(v := row.get("test_accuracy"), int | float)
        else row
        for row in rows
    ]


def timed(rows: Sequence[Row]) -> list[Row]:
    """Rows of a run whose ``elapsed`` is counted from its first one.

    It is the recorder's, which may have recorded other runs before; in a run that was
    resumed it begins at zero again.
    """
    found, total, last = [], 0.0, None
    for row in rows:
        now = row.get("elapsed")
        if isinstance(now, int | float):
            if last is not None:
                total += now - last if now >= last else now
            last = now
        known = {} if last is None else {"elapsed": total}
        found.append({**row, **known})
    return found


def is_baseline(name: str, rows: Sequence[Row], baseline: str | None) -> bool:
    """Whether a run is the arm without a filter."""
    if baseline is not None:
        return name == baseline
    return all(row.get(FILTERED) is False for row in rows)


def _value(cell: str | None) -> Value:
    if not cell:
        return None
    if cell in ("True", "False"):
        return cell == "True"
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


SEED = "seed"
_CHOSEN = {"lr": "learning rate"}
_SEEDED = re.compile(r"(.+?)[-_. ]?(seed)?[-_. ]?(\d+)")


def arm_and_seed(name: str, noted: Value) -> tuple[str, int]:
    """The arm and the seed of a run, by its name and by what a column says.

    A number at the end of a name is the seed if it is called so, or if the column is
    the same: it may be a rank as well.
    """
    found = _SEEDED.fullmatch(name)
    if found and (found[2] or found[3] == str(noted)):
        return found[1], int(found[3])
    return name, noted if isinstance(noted, int) else 0


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: a seed of some settings.

    Attributes:
        settings: All that decides its numbers beside the seed.
        seed: The seed, 0 if nobody noted it.
        rows: Its rows, in order.
        known: Whether it is a run of the experiments, whose columns mean what they say.
    """

    settings: dict[str, object]
    seed: int
    rows: list[Row]
    known: bool


@dataclass(frozen=True, slots=True)
class Section:
    """Runs that are shown side by side.

    Attributes:
        name: A heading.
        caption: What they are, in a line; may be empty.
        trials: The runs.
        facts: What is noted beside the rows.
        claims: Verdicts that rest on them.
        files: What was read, in words.
        notes: What a reader should know about the rows.
    """

    name: str
    caption: str
    trials: list[Trial]
    facts: Mapping[str, object] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    files: Sequence[str] = ()
    notes: Sequence[str] = ()


def without_chosen(section: Section) -> Section:
    """The section without what was chosen for each arm, so that arms are compared.

    What that is, is noted next to the rows, and told instead of them. Where runs were
    judged on validation samples, the learning rate was, and those runs are left out.
    """
    judged = [t for t in section.trials if t.settings.get("split") != VALIDATION]
    chosen = section.facts.get("chosen")
    if judged and len(judged) < len(section.trials):
        chosen = ["lr"]
        facts = {**section.facts, "chosen": chosen}
        section = replace(section, trials=judged, facts=facts)
    if not chosen:
        return section
    if not isinstance(chosen, list) or not all(isinstance(c, str) for c in chosen):
        note = f"chosen, noted beside the rows, is no list of columns: {chosen!r}."
        return replace(section, notes=[*section.notes, f"{note} It is not used."])
    trials = [
        replace(t, settings={k: v for k, v in t.settings.items() if k not in chosen})
        for t in section.trials
    ]
    words = " and ".join(_CHOSEN.get(name, str(name)) for name in chosen)
    note = f"Each arm has its own {words}, chosen on other seeds."
    return replace(section, trials=trials, notes=[*section.notes, note])


def known_trials(found: Mapping[Key, list[Row]]) -> list[Trial]:
    """Finished runs as a report takes them."""
    trials = []
    for (made_by, run), rows in found.items():
        settings: dict[str, object] = asdict(run)
        seed = settings.pop(SEED)
        if made_by != TRAINING:
            settings[MADE_BY] = made_by
        told = _along(list(rows), settings)
        trials.append(Trial(settings, int(str(seed)), told, known=True))
    return trials


def _along(rows: list[Row], settings: Mapping[str, object]) -> list[Row]:
    """Rows with the seconds and bytes so far, in the columns of a loop of one's own.

    A tracker that only watches takes time that training does not. Bytes are in those
    of an epoch without compression: how long the gradient is, is not in the rows.
    """
    watched = is_plain(settings) and settings.get("rank") is not None
    seconds = [row.get("processor_seconds") for row in rows]
    smaller = [row.get("times_fewer_bits") for row in rows]
    more: list[Row] = [{} for _ in rows]
    if not watched and all(isinstance(s, float) for s in seconds):
        for row, total in zip(more, accumulate(seconds), strict=True):
            row["elapsed"] = total
    if "rate" in settings and "times_fewer_bits" in rows[0]:
        shares = [1 / s if isinstance(s, float) else 1.0 for s in smaller]
        for row, total in zip(more, accumulate(shares), strict=True):
            row["epochs_of_bytes"] = total
    return [{**row, **added} for row, added in zip(rows, more, strict=True)]


def noted_beside(rows_path: Path) -> list[Path]:
    """The files next to rows that are read with them."""
    return [meta_path(rows_path), rows_path.with_name(CLAIMS_FILE)]


def read_facts(rows_path: Path) -> dict[str, object]:
    """What is noted beside rows: settings and provenance; nothing if it is not there.

    A file that cannot be read is refused.
    """
    path = meta_path(rows_path)
    if not path.exists():
        return {}
    facts = _json(path)
    if not isinstance(facts, dict):
        raise ValueError(f"{path} is not a JSON object: move it away, or make it again")
    return facts


def read_claims(folder: Path) -> list[Claim]:
    """The verdicts in a folder; none if there is no file of them."""
    path = folder / CLAIMS_FILE
    if not path.exists():
        return []
    try:
        claims = claims_markdown.read_claims(path)
    except (TypeError, ValueError):
        raise ValueError(
            f"{path} is not a list of claims: move it away, or make it again"
        ) from None
    for claim in claims:
        if claim.verdict not in (HOLDS, FAILS, UNDECIDED, NOT_EVIDENCE):
            raise ValueError(f"{path}: no verdict is called {claim.verdict!r}")
    return claims


def read_source(path: Path, baseline: str | None = None) -> Section:
    """The section of one file; lines that cannot be read are noted.

    Args:
        path: JSON lines, or CSV of a loop of one's own.
        baseline: The run without a filter, where its rows do not say so.
    """
    content = path.read_bytes()
    if path.suffix == ".csv":
        rows, broken = csv_rows(path), []
    else:
        _check_rows(path)
        broken = broken_notes(path)
        rows = [row for line in content.splitlines(True) if (row := _row(line))]
    trials, notes = _trials(rows, path.stem, baseline)
    if not trials:
        raise ValueError(f"{path} has no finished run: finish one, or name other rows")
    facts = read_facts(path)
    name = path.resolve().parent.name if path.name == ROWS_FILE else path.stem
    figure = short_name(str(facts.get("figure", name)))
    mine = [c for c in read_claims(path.parent) if short_name(c.figure) == figure]
    digest = hashlib.sha256(content).hexdigest()[:12]
    return Section(
        str(facts.get("figure", name)),
        str(facts.get("caption", "")),
        trials,
        facts,
        mine,
        [f"{path.name}: {len(rows):,} rows, SHA-256 {digest}…"],
        [*broken, *(f"{path.name}: {note}." for note in notes)],
    )


def _check_rows(path: Path) -> None:
    """Refuse a file that has no rows at all, by what its first line is."""
    lines = [line for line in path.read_bytes().splitlines(True) if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty: there are no rows to show")
    if any(_row(line) is not None for line in lines):
        return
    try:
        json.loads(lines[0])
    except ValueError:
        raise ValueError(
            f"{path}, line 1: not JSON; a report is made of files of rows (JSON "
            "lines), or of folders with such files"
        ) from None
    raise ValueError(f"{path}, line 1: a row is a JSON object")


def _row(line: bytes) -> Row | None:
    """A row, also of a loop that does not end its last line."""
    return parse(line if line.endswith(b"\n") else line + b"\n")


def _trials(
    rows: Sequence[Row], name: str, baseline: str | None
) -> tuple[list[Trial], list[str]]:
    """The runs among rows, and what is to be said about rows that are in none."""
    described = [row for row in rows if NUM_ROWS in row and key_of(row) is not None]
    loose = [row for row in rows if NUM_ROWS not in row or key_of(row) is None]
    if described:
        finished = finished_runs(described)
        notes, num_lost = [], len(described) - sum(map(len, finished.values()))
        if num_lost:
            notes.append(f"{num_lost} rows of runs that are not finished were left out")
        if loose:
            notes.append(
                f"{len(loose)} rows that are not of dome were left out: keep them in a "
                "file of their own"
            )
        return known_trials(finished), notes
    found: dict[tuple[str, int], list[Row]] = {}
    for row in as_shares(list(map(renamed, loose))):
        key = arm_and_seed(str(row.get(RUN, name)), row.get(SEED))
        found.setdefault(key, []).append(row)
    return [
        Trial(
            {RUN: run, FILTERED: not is_baseline(run, mine, baseline)},
            seed,
            timed(mine),
            known=False,
        )
        for (run, seed), mine in found.items()
    ], []


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(
            f"{path} is not JSON: move it away, or make it again"
        ) from None
