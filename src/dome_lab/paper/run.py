"""A run: everything that decides its numbers, as one flat value.

Two runs with equal fields have equal rows, so a run on disk is found again by its
fields alone, and figures that need the same run share it.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches

Value = str | int | float | bool | list[float] | None  # a list is a spectrum

PLAIN, FILTERED = "plain", "filtered"
OPTIMIZERS = ("sgd", "ema", "adam")
REMOVES = (
    "nothing",
    "span",
    "rest",
    "uncoded",
    "hessian",
    "random",
    "preconditioned",
)
SAMPLE_NORMS = ("normalised", "clipped")
TRACKERS = ("power", "svd")
LAYOUTS = ("global", "layerwise")
COMPRESSORS = (
    "gaussian",
    "hadamard",
    "randomk",
    "randomk+feedback",
    "topk+feedback",
    "signsgd+feedback",
    "terngrad",
    "qsgd",
    "powersgd+feedback",
)
BASES = ("public", "released", "private")
STREAMS = ("split", "permuted")
SPLITS = TEST, VALIDATION = "test", "validation"

_CHOICES = {
    "optimizer": OPTIMIZERS,
    "removes": REMOVES,
    "tracker": TRACKERS,
    "layout": LAYOUTS,
    "compressor": COMPRESSORS,
    "basis": (None, *BASES),
    "stream": (None, *STREAMS),
    "split": SPLITS,
    "sample_norms": (None, *SAMPLE_NORMS),
}
_AT_LEAST = {
    "seed": 0,
    "batch_size": 1,
    "epochs": 1,
    "momentum": 0,
    "num_train": 1,
    "num_test": 1,
    "num_classes": 2,
    "rank": 1,
    "rate": 1,
    "update_every": 1,
    "oversample": 0,
    "direction_rank": 1,
    "epsilon": 0,
    "max_grad_norm": 0,
    "penalty": 0,
    "strength": 0,
    "public_every": 0,
    "pretrain": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run.

    Attributes:
        task: What to learn, a key of ``dome_lab.paper.tasks.TASKS``.
        model: The network, a key of ``dome_lab.paper.models.MODELS``.
        seed: Of initial weights, sample order, sketch noise and first basis.
        batch_size: Samples a step; a short last batch is left out.
        epochs: Passes over the training samples.
        optimizer: "sgd", "adam", or "ema": momentum as a bias-corrected average, the
            paper's Algorithm 1 (``arms.py``).
        lr: Learning rate.
        momentum: Of "sgd" and "ema".
        num_train: Take this many training samples, the same for every seed; None: all.
        num_test: Take this many test samples; None: all.
        num_classes: Take the first classes only; None: all.
        rank: Directions tracked; None trains without a tracker.
        removes: What becomes of the tracked span: "nothing" is taken out (the tracker
            watches), the "span" is (DOME: g − U Uᵀ g goes on), the "rest" is (U Uᵀ g
            goes on), or the span goes on "uncoded", as K exact numbers beside the
            compressed rest. Or instead of a tracked span the leading K eigenvectors of
            the "hessian" are taken out, computed anew on every update; or K "random"
            ones; or those of the gradients that Adam makes of them, "preconditioned".
        rate: How many times fewer bits are sent; None does not compress.
        compressor: What compresses, with the largest messages that the rate allows.
        tracker: "power" or "svd".
        forget: Weight of the newest batch; None averages all.
        update_every: Steps from one update of the basis to the next.
        layout: "global" or "layerwise".
        oversample: Directions tracked beyond those removed.
        epsilon: What private training may cost (``private.py``); None: not private.
        basis: Where private training has its directions from.
        max_grad_norm: To which private training clips samples.
        stream: How a task is made into several, one after the other
            (``continual.py``): "split" by classes, or pixels "permuted".
        penalty: Strength of elastic weight consolidation; None does without.
        split: What accuracy is measured on: "test" samples, or as many for
            "validation", which are training samples of the data set that this run does
            not train on. What is chosen by them is judged by the others.
        strength: How much of the span is taken out, in [0, 1].
        public_every: In private training one training sample of so many is public, and
            not among the private ones; 0: none is.
        pretrain: Epochs that private training begins with on the public samples,
            without noise.
        sample_norms: Without a rank: samples are summed up "normalised" to one norm, or
            "clipped" to the median norm.
        direction_rank: Rank of every direction in each weight matrix; None: as it is.
        paced: Whether each epoch is followed by one of the same training without a
            tracker, whose seconds are told beside: their ratio holds on any machine.
    """

    task: str
    model: str
    seed: int
    batch_size: int
    epochs: int
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    num_train: int | None = None
    num_test: int | None = None
    num_classes: int | None = None
    rank: int | None = None
    removes: str = "span"
    rate: float | None = None
    compressor: str = "gaussian"
    tracker: str = "power"
    forget: float | None = None
    update_every: int = 1
    layout: str = "global"
    oversample: int = 0
    epsilon: float | None = None
    basis: str | None = None
    max_grad_norm: float | None = None
    stream: str | None = None
    penalty: float | None = None
    split: str = "test"
    strength: float = 1.0
    sample_norms: str | None = None
    public_every: int = 10
    pretrain: int = 0
    direction_rank: int | None = None
    paced: bool = False

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            check_name(name, getattr(self, name), known)
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            # Asked this way round, NaN is refused too.
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be a positive number, got {self.lr}")
        if self.forget is not None and not 0 < self.forget < 1:
            raise ValueError(f"forget must lie between 0 and 1, got {self.forget}")
        if self.momentum and (self.optimizer == "adam" or self.momentum >= 1):
            raise ValueError(
                f"momentum is sgd's or ema's and lies in [0, 1), got {self.momentum} "
                f"with {self.optimizer}"
            )
        if self.num_train is not None:
            check_batch_size(self.batch_size, self.num_train, self.task)
        if self.rank is None and self.removes not in ("nothing", "span"):
            raise ValueError(f"removes={self.removes!r} needs a rank: set one")
        self._check_controls()

    def _check_controls(self) -> None:
        if self.removes == "preconditioned" and self.optimizer != "adam":
            raise ValueError(
                f"removes='preconditioned' is of adam's, got {self.optimizer}"
            )
        if self.strength > 1:
            raise ValueError(f"strength must lie in [0, 1], got {self.strength}")
        if self.sample_norms is not None and self.rank is not None:
            raise ValueError(
                f"sample_norms={self.sample_norms!r} needs no rank: leave it out"
            )

        if not self.public_every and (self.pretrain or self.basis == "public"):
            raise ValueError(
                "public_every=0 leaves no public samples: do without pretrain and "
                "basis='public'"
            )

    @property
    def arm(self) -> str:
        """Which side of a comparison the run is on: "plain" or "filtered"."""
        watches = self.rank is None or self.removes == "nothing"
        return PLAIN if watches else FILTERED

    def columns(self) -> dict[str, Value]:
        """What every row of this run begins with: all fields, and the arm."""
        return asdict(self) | {"arm": self.arm}

    def __str__(self) -> str:
        what = [f"{self.model} on {self.task}"]
        if self.rank is None:
            what.append("no tracker")
        else:
            what.append(f"rank {self.rank} removes {self.removes}")
        if self.direction_rank is not None:
            what.append(f"directions of rank {self.direction_rank}")
        if self.rate is not None:
            what.append(f"{self.compressor} at rate {self.rate:,.0f}")
        if self.epsilon is not None:
            what.append(f"epsilon {self.epsilon:g}, basis {self.basis}")
            what += [f"{self.pretrain} public epochs before"] * bool(self.pretrain)
        if self.stream is not None:
            what.append(f"{self.stream}, penalty {self.penalty}")
        return ", ".join([*what, f"batch {self.batch_size}", f"seed {self.seed}"])


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Settings of a figure that needs no more.

    Attributes:
        run: A run of it.
        num_seeds: How many seeds.
        paced_epochs: Epochs of one more run that tells what the filter costs; 0: there
            is none.
    """

    run: Run
    num_seeds: int = 5
    paced_epochs: int = 0


def check_name(what: str, name: str | None, known: Sequence[str | None]) -> None:
    """Refuse a name that is not among those known, with the nearest that is."""
    if name not in known:
        names = [one for one in known if one is not None]
        near = get_close_matches(str(name), names, n=1)
        hint = f", did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"no {what} {name!r}{hint} There are: {', '.join(names)}")


def check_batch_size(batch_size: int, num_samples: int, task: str) -> None:
    """Refuse a batch that the training samples cannot fill."""
    if batch_size > num_samples:
        raise ValueError(
            f"batch_size {batch_size} is more than the {num_samples} training "
            f"samples of {task}: choose a smaller one"
        )
