"""Two arms on a few digits.

For the tests of what computes figures: in a file of its own, because the processes
that compute runs import it by name.
"""

from dataclasses import dataclass

from matplotlib.figure import Figure

from dome_lab.paper.claims import HOLDS, Claim
from dome_lab.paper.run import Run
from dome_lab.paper.train import compute_run

__all__ = ["SCALES", "Config", "compute_run", "draw", "judge", "runs"]

NAME = "fig90_tiny"


@dataclass(frozen=True, kw_only=True)
class Config:
    num_seeds: int = 2
    epochs: int = 2
    rates: tuple[float | None, ...] = (None,)


SCALES = {
    "smoke": Config(),
    "cpu": Config(num_seeds=1, rates=(None, 9.0)),
    "paper": Config(num_seeds=1),
}


def runs(config):
    return [
        Run(
            task="digits",
            model="resnet8",
            seed=seed,
            batch_size=16,
            epochs=config.epochs,
            num_train=40,
            num_test=20,
            rank=rank,
            rate=rate,
        )
        for rate in config.rates
        for rank in (2, None)
        for seed in range(config.num_seeds)
    ]


def draw(rows):
    figure = Figure()
    figure.subplots().plot([row["train_loss"] for row in rows])
    return figure


def judge(rows):
    number = {"rows": float(len(rows))}
    return [Claim("fig90", "has rows", "There are rows.", HOLDS, number, "Counted.")]
