"""The demo: what the filter does under ever harsher compression, in two minutes.

ResNet-8 on scikit-learn's digits, Adam, a Gaussian sketch of the gradient at three
rates, with and without the filter, three seeds. Nothing is downloaded. Cost: about
100 s on 2 CPU cores.

The settings come from trials, most of them with one seed. The 8x8 images are enlarged
to 16x16: at 8x8 the filter takes 20 to 40 % of the norm, and lowers the training loss
under compression but not clearly the test error; at 16x16 it takes half of the norm, on
MNIST's 28x28 over four fifths, and the gain grows with it. Ranks 20, 32 and 64 gained
about the same; the learning rate is the paper's.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path

from torch.optim import Adam

from dome.paper.models.resnet8 import resnet8
from dome.paper.rows import Row, append_rows, dome_version, resume_rows
from dome.paper.tasks.digits import digits
from dome.paper.tasks.task import Task
from dome.paper.train import RUN_KEY, Run, train
from dome.paper.workers import available_cores, run_all

LEARNING_RATE = 1e-3
IMAGE_SIZE = 16
ROWS_FILE = "rows.jsonl"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the demo; the defaults take under two minutes on two cores."""

    rank: int = 32
    rates: tuple[float | None, ...] = (None, 100.0, 1000.0)
    seeds: int = 3
    epochs: int = 10
    batch_size: int = 32


QUICK = Config(rank=4, seeds=2, epochs=1, batch_size=128)


def planned_runs(config: Config) -> list[Run]:
    """Every run, the longer filtered ones first so that all cores end together."""
    return [
        Run(
            seed=seed,
            rank=rank,
            rate=rate,
            epochs=config.epochs,
            batch_size=config.batch_size,
        )
        for rank, seed, rate in product(
            (config.rank, None), range(config.seeds), config.rates
        )
    ]


def epoch_cost(run: Run) -> int:
    """What an epoch costs against one without the filter, roughly: for time left."""
    return 1 if run.rank is None else 3


def compute_run(run: Run) -> Iterator[Row]:
    """One run, a row an epoch."""
    adam = partial(Adam, lr=LEARNING_RATE)
    return train(_digits(), partial(resnet8, in_channels=1), adam, run)


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is and what is left to do.

    Attributes:
        path: The file of rows.
        rows: The rows of finished runs.
        missing: The runs to compute.
        discarded: Rows of other settings were found, and removed.
    """

    path: Path
    rows: list[Row]
    missing: list[Run]
    discarded: bool


def prepare(config: Config, folder: Path, *, fresh: bool = False) -> Plan:
    """Make the folder ready, and find out which runs it already has.

    Args:
        config: Settings; rows made with other ones are not used.
        folder: Where the rows are kept; made if it is not there.
        fresh: Forget the rows that are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ROWS_FILE
    if fresh:
        path.unlink(missing_ok=True)
    settings = asdict(config) | {
        "learning_rate": LEARNING_RATE,
        "image_size": IMAGE_SIZE,
        "dome": dome_version(),
    }
    found = resume_rows(path, settings, RUN_KEY, config.epochs)
    done = {tuple(row[column] for column in RUN_KEY) for row in found or []}
    missing = [r for r in planned_runs(config) if (r.seed, r.arm, r.rate) not in done]
    return Plan(path, found or [], missing, discarded=found is None)


def compute(plan: Plan) -> Iterator[tuple[Run, Row | None]]:
    """Compute the missing runs and store each when it is over.

    Yields:
        A run and its newest row; None in place of a row when the run is stored.
    """
    pending: dict[Run, list[Row]] = {run: [] for run in plan.missing}
    for run, row in run_all(compute_run, plan.missing, available_cores()):
        if row is None:
            append_rows(plan.path, pending.pop(run))
        else:
            pending[run].append(row)
        yield run, row


@cache
def _digits() -> Task:
    return digits(size=IMAGE_SIZE)
