"""The demo: what the filter does under ever harsher compression, in two minutes.

ResNet-8 on scikit-learn's digits, Adam, a Gaussian sketch of the gradient at three
rates, with and without the filter, three seeds. Nothing is downloaded. Cost: about
100 s on 2 CPU cores.

Each arm has, at each rate, the learning rate that is best for it on validation images
with other seeds (``benchmarks/demo_rates.py``, rows in docs/results/trials), so that
what the filter gains is none of the learning rate's doing. The other settings come from
trials, most of them with one seed. The 8x8 images are enlarged to 16x16: at 8x8 the
filter takes 20 to 40 % of the norm, at 16x16 half of it, on MNIST's 28x28 over four
fifths, and the gain grows with it. Ranks 20, 32 and 64 gained about the same.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from dome_lab.paper.device import device_name
from dome_lab.paper.jobs import Event, Job, compute_jobs
from dome_lab.paper.rows import (
    Key,
    Row,
    check_own,
    has_ours,
    is_noted,
    mend,
    meta_path,
    read_runs,
    record_session,
)
from dome_lab.paper.run import Run
from dome_lab.paper.train import compute_run

NAME = "demo"
Rates = dict[float | None, float]  # learning rates by compression rate
PLAIN_RATES: Rates = {None: 3e-3, 100.0: 1e-2, 1000.0: 1e-3}
FILTERED_RATES: Rates = {None: 3e-4, 100.0: 3e-3, 1000.0: 1e-2}
CHOSEN = ["lr"]  # columns that differ between arms because they were chosen
ROWS_FILE = "rows.jsonl"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the demo; the defaults take under two minutes on two cores."""

    rank: int = 32
    rates: tuple[float | None, ...] = (None, 100.0, 1000.0)
    seeds: int = 3
    epochs: int = 10
    batch_size: int = 32


QUICK = Config(rank=4, epochs=1, batch_size=128)


def runs(config: Config) -> list[Run]:
    """Every run, the longer filtered ones first so that all cores end together."""
    return [
        Run(
            task="digits",
            model="resnet8",
            seed=seed,
            batch_size=config.batch_size,
            epochs=config.epochs,
            optimizer="adam",
            lr=(PLAIN_RATES if rank is None else FILTERED_RATES)[rate],
            rank=rank,
            rate=rate,
        )
        for rank, seed, rate in product(
            (config.rank, None), range(config.seeds), config.rates
        )
    ]


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is and what is left to do.

    Attributes:
        config: The settings.
        path: The file of rows.
        jobs: All the runs.
        found: The rows of finished runs; ``compute`` adds to it.
    """

    config: Config
    path: Path
    jobs: tuple[Job, ...]
    found: dict[Key, list[Row]]

    @property
    def missing(self) -> list[Job]:
        """The runs to compute."""
        return [job for job in self.jobs if job.key not in self.found]

    @property
    def rows(self) -> list[Row]:
        """The rows of the runs that are there, no others'."""
        return [row for job in self.jobs for row in self.found.get(job.key, [])]


def prepare(config: Config, folder: Path, *, fresh: bool = False) -> Plan:
    """Make the folder ready, and find out which runs it already has.

    Args:
        config: Settings; rows of other ones are left where they are.
        folder: Where the rows are kept; made if it is not there.
        fresh: Forget the rows that are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ROWS_FILE
    check_own(meta_path(path), is_noted)
    if fresh:
        check_own(path, has_ours)
        path.unlink(missing_ok=True)
    mend(path)
    jobs = tuple(Job(NAME, run, compute_run) for run in runs(config))
    return Plan(config, path, jobs, read_runs([path]))


def compute(plan: Plan, num_workers: int) -> Iterator[Event]:
    """Compute the missing runs and store each when it is over."""
    facts = {"settings": asdict(plan.config), "chosen": CHOSEN}
    record_session(plan.path, facts, device_name())
    for event in compute_jobs(plan.missing, {NAME: plan.path}, num_workers):
        if event.stored:
            plan.found[event.job.key] = list(event.stored)
        yield event
