"""Figures from nothing: which runs are missing, computing them, drawing, judging.

    plan = make_plan({"fig03_...": module}, "cpu", folder)
    for event in compute(plan, num_workers=2): ...
    for figure in plan.figures: conclude(figure, plan.found)

Files, in the folder of a scale: FIGURE.jsonl (rows), FIGURE.meta.json (what made them),
FIGURE.png, FIGURE.pdf, and claims.json. Rows are found in the files of all figures, so
figures that need the same run share it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from dome_lab.paper.claims import Claim, not_evidence, write_claims
from dome_lab.paper.device import device_name
from dome_lab.paper.drawing import save_picture
from dome_lab.paper.figures import FigureModule, runs_so_far, short_name
from dome_lab.paper.jobs import Event, Job, compute_jobs
from dome_lab.paper.lock import PATIENCE, locked
from dome_lab.paper.rows import Key, Row, mend, read_runs, record_session, seconds_of
from dome_lab.paper.run import Run
from dome_lab.paper.train import load_run_task
from dome_lab.paper.workers import run_all

CLAIMS_FILE = "claims.json"
PICTURES = ("png", "pdf")
SMOKE = "smoke"  # the scale that only shows that everything runs
FEWEST_SEEDS = 3  # that an interval is worth anything with


@dataclass(frozen=True, slots=True)
class Parts:
    """How much of a figure can be drawn and judged.

    A module whose questions do not need each other's runs has ``parts(config)``, a
    configuration for each; any other figure is one part. A part is ready with fewer
    seeds than it asks for, if ``FEWEST_SEEDS`` have all their runs.

    Attributes:
        jobs: The runs of the parts that are ready.
        num_ready: How many these are,
        num_all: of how many.
        lacks_seeds: Whether one of them has fewer seeds than it asks for.
    """

    jobs: tuple[Job, ...]
    num_ready: int
    num_all: int
    lacks_seeds: bool = False

    def __str__(self) -> str:
        return f"{self.num_ready} of {self.num_all}"

    @property
    def notes(self) -> list[str]:
        """What a reader is to be told of what is missing."""
        notes = []
        if self.num_ready < self.num_all:
            notes.append(
                f"{self} parts are computed; the others are neither drawn nor judged."
            )
        if self.lacks_seeds:
            notes.append("Some seeds are not computed: it is drawn and judged without.")
        return notes


@dataclass(frozen=True, slots=True)
class PlannedFigure:
    """A figure at a scale.

    Attributes:
        name: Its full name.
        module: Its module; MAX_JOBS there, a number or one a scale, says how many of
            its runs the memory holds at once.
        scale: Name of the scale.
        folder: Where its files go.
        jobs: All its runs that could be told when it was planned, whether they are
            there already or not.
    """

    name: str
    module: FigureModule
    scale: str
    folder: Path
    jobs: tuple[Job, ...]

    @property
    def rows_path(self) -> Path:
        """The file of its rows."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def max_jobs(self) -> int | None:
        """How many of its runs may be computed at a time; None: any number."""
        limit: int | Mapping[str, int] | None = getattr(self.module, "MAX_JOBS", None)
        return limit.get(self.scale) if isinstance(limit, Mapping) else limit

    def num_missing(self, found: Mapping[Key, list[Row]]) -> int:
        """How many of its runs are not there."""
        return sum(job.key not in found for job in self.all_jobs(found))

    def all_jobs(self, found: Mapping[Key, list[Row]]) -> tuple[Job, ...]:
        """Its runs as far as the rows that are there can tell."""
        return _jobs(self.name, self.module, self.module.SCALES[self.scale], found)

    def parts(self, found: Mapping[Key, list[Row]]) -> Parts:
        """Which of its parts have all their runs, or those of enough seeds."""
        config = self.module.SCALES[self.scale]
        whole = [config]
        split = getattr(self.module, "parts", lambda _: whole)
        all_jobs = [
            _jobs(self.name, self.module, part, found) for part in split(config)
        ]
        # Which runs are to come, stages alone know: there a part is whole or nothing.
        fewest = None if hasattr(self.module, "later_runs") else FEWEST_SEEDS
        ready = [
            (jobs, mine)
            for jobs in all_jobs
            if (mine := _whole_seeds(jobs, found, fewest))
        ]
        return Parts(
            tuple(dict.fromkeys(chain(*(mine for _, mine in ready)))),
            len(ready),
            len(all_jobs),
            any(len(mine) < len(jobs) for jobs, mine in ready),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is and what is left to do.

    Attributes:
        figures: The figures wanted.
        found: The rows of every finished run; ``compute`` adds to it.
        missing: The runs to compute, each once, figure by figure, as far as the rows
            that were there could tell.
    """

    figures: tuple[PlannedFigure, ...]
    found: dict[Key, list[Row]]
    missing: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What came of a figure.

    Attributes:
        name: The figure.
        claims: Its claims, judged.
        pictures: The files it was drawn to.
        seconds: What its runs took, together.
        parts: How much of it this is.
    """

    name: str
    claims: list[Claim]
    pictures: list[Path]
    seconds: float
    parts: Parts


@dataclass(frozen=True, slots=True)
class Samples:
    """What runs learn from, and the largest batch that they make of it."""

    run: Run

    def __str__(self) -> str:
        return self.run.task


def make_plan(modules: Mapping[str, FigureModule], scale: str, folder: Path) -> Plan:
    """Make the files of these figures ready, and find out which runs are missing.

    Args:
        modules: The modules of the figures wanted, by full name.
        scale: Key of their ``SCALES``.
        folder: Where the files of this scale are; made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, patience=PATIENCE):
        for name in modules:
            mend(folder / f"{name}.jsonl")
        found = read_runs(sorted(folder.glob("*.jsonl")))
    figures = tuple(
        PlannedFigure(
            name,
            module,
            scale,
            folder,
            _jobs(name, module, module.SCALES[scale], found),
        )
        for name, module in modules.items()
    )
    missing: dict[Key, Job] = {}
    for figure in figures:
        jobs = list(figure.jobs)
        if not hasattr(figure.module, "later_runs"):
            jobs.sort(key=lambda job: job.run.seed)  # what is stopped has whole seeds
        for job in jobs:
            if job.key not in found:
                missing.setdefault(job.key, job)
    return Plan(figures, found, tuple(missing.values()))


def read_samples(plan: Plan) -> Iterator[Samples]:
    """Read what the missing runs train on, so that nothing is found lacking later.

    It happens in a process of its own, whose memory is given back.

    Yields:
        What was read, and is decoded for the runs to come.
    """
    largest: dict[Run, int] = {}
    for run in (job.run for job in plan.missing):
        samples = Run(
            task=run.task,
            model="",
            seed=0,
            batch_size=1,
            epochs=1,
            num_train=run.num_train,
            num_test=run.num_test,
            num_classes=run.num_classes,
            split=run.split,
        )
        largest[samples] = max(run.batch_size, largest.get(samples, 1))
    jobs = [Samples(replace(run, batch_size=size)) for run, size in largest.items()]
    for done, number in run_all(_num_samples, jobs, num_workers=1):
        if number is not None:
            yield done


def compute(plan: Plan, num_workers: int) -> Iterator[Event]:
    """Compute the missing runs, and store each when it is over.

    Args:
        plan: What to compute; ``plan.found`` grows.
        num_workers: Number of processes.
    """
    busy = {job.figure for job in plan.missing}
    for figure in plan.figures:
        if figure.name in busy:
            with locked(figure.folder, patience=PATIENCE):
                record_session(figure.rows_path, _facts(figure), device_name())
    paths = {figure.name: figure.rows_path for figure in plan.figures}
    limits = {f.name: f.max_jobs for f in plan.figures if f.max_jobs is not None}
    staged = [f for f in plan.figures if hasattr(f.module, "later_runs")]
    known = {job.key for job in plan.missing}

    def more() -> list[Job]:
        asked = (job for f in staged for job in f.all_jobs(plan.found))
        new = {j.key: j for j in asked if j.key not in plan.found.keys() | known}
        known.update(new)
        return list(new.values())

    for event in compute_jobs(
        plan.missing, paths, num_workers, limits, more if staged else None
    ):
        if event.stored:
            plan.found[event.job.key] = list(event.stored)
        yield event


def conclude(figure: PlannedFigure, found: Mapping[Key, list[Row]]) -> Conclusion:
    """Draw those parts of a figure whose runs are all there, and judge their claims."""
    parts = figure.parts(found)
    if not parts.num_ready:
        missing = figure.num_missing(found)
        raise ValueError(f"{figure.name} lacks {missing} runs: compute them first")
    rows = [row for job in parts.jobs for row in found[job.key]]
    picture = figure.module.draw(rows)
    claims = figure.module.judge(rows)
    if figure.scale == SMOKE:
        claims = [not_evidence(claim) for claim in claims]
    seconds = seconds_of(rows)
    pictures = [figure.folder / f"{figure.name}.{kind}" for kind in PICTURES]
    with locked(figure.folder, patience=PATIENCE):
        for path in pictures:
            save_picture(picture, path)
        _update_claims(figure.folder / CLAIMS_FILE, figure, claims)
        if figure.rows_path.exists():
            facts = _facts(figure) | {"seconds": round(seconds, 1), "parts": str(parts)}
            record_session(figure.rows_path, facts)
    return Conclusion(figure.name, claims, pictures, seconds, parts)


def _jobs(
    name: str,
    module: FigureModule,
    config: Any,  # noqa: ANN401 (the module's own)
    found: Mapping[Key, list[Row]],
) -> tuple[Job, ...]:
    """The runs of a configuration, with those that finished ones call for."""

    def rows_of(run: Run) -> list[Row] | None:
        return found.get(Job(name, run, module.compute_run).key)

    runs = runs_so_far(module, config, rows_of)
    return tuple(Job(name, run, module.compute_run) for run in runs)


def _whole_seeds(
    jobs: Sequence[Job], found: Mapping[Key, list[Row]], fewest: int | None
) -> list[Job]:
    """The jobs of the seeds that have all their runs; none if these are too few."""
    lacking = {job.run.seed for job in jobs if job.key not in found}
    whole = [job for job in jobs if job.run.seed not in lacking]
    too_few = fewest is None or len({job.run.seed for job in whole}) < fewest
    return [] if lacking and too_few else whole


def _update_claims(path: Path, figure: PlannedFigure, claims: list[Claim]) -> None:
    """Put a figure's claims among those of the others, in the figures' order."""
    own = {figure.name, short_name(figure.name)}
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    others = [Claim(**claim) for claim in before if claim["figure"] not in own]
    write_claims(path, sorted([*others, *claims], key=_papers_first))


def _papers_first(claim: Claim) -> tuple[bool, str]:
    return claim.figure.startswith("ext"), claim.figure


def _facts(figure: PlannedFigure) -> dict[str, object]:
    caption = (figure.module.__doc__ or figure.name).strip().splitlines()[0]
    return {
        "figure": figure.name,
        "caption": caption,
        "scale": figure.scale,
        "config": asdict(figure.module.SCALES[figure.scale]),
    }


def _num_samples(samples: Samples) -> Iterator[int]:
    yield len(load_run_task(samples.run).train_x)
