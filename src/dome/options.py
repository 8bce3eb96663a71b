"""The options of every filter: in one process, over workers, private.

All are checked here, once, before anything is hooked or allocated.
"""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, SupportsFloat, TypedDict

import torch
from torch import Tensor, nn

from dome.parameters import LAYOUTS, Layout
from dome.samples import (
    KINDS,
    SampleSource,
    Use,
    declared,
    source_for,
)
from dome.trackers import TRACKERS, Tracker
from dome.trackers.basis import check_storage
from dome.trackers.low_rank import LowRankPower
from dome.trackers.protocol import missing_members
from dome.trackers.samples import check_forget, check_whole

LOSS_REDUCTIONS = ("mean", "sum")
DIRECTION_DTYPES = (torch.float32, torch.float64)

Downstream = Callable[[Tensor], Tensor]
TrackerFactory = Callable[..., Tracker]


class Options(TypedDict, total=False):
    """The options that a filter has in one process and on workers, all by keyword.

    Attributes:
        tracker: "power" (the paper's), "svd", or a function (dim, rank) -> tracker.
        layout: "global", one basis for all parameters, or "layerwise", one per layer.
        update_every: Take samples on every n-th step only.
        oversample: Track this many directions more than are removed.
        strength: Multiplies the removed part, in [0, 1]; or a function of the step.
        warmup: Number of first steps that only watch.
        forget: None averages all batches (the paper); a number in (0, 1) is the weight
            of the newest batch.
        after: What the filtered gradient (D,) goes through: a function, or several in
            order.
        loss_reduction: How the loss sums up samples: "mean" or "sum".
        generator: Source of the initial basis; without one a fixed seed is used.
        basis_dtype: Storage of the basis: torch.float32, float64 or bfloat16; the
            parameters' own precision (at least float32) if not given.
        direction_rank: Store every direction, in each weight matrix, as a product of
            two thin matrices of this rank, and take samples as inputs and output
            gradients: for models whose basis (D, K) or rows (B, D) do not fit.
        batch_dim: The dimension of the model's input along which samples lie, if not 0.
        samples_in: Which inputs of the model hold samples, by their names in
            ``forward()``: "x", or "batch['ids']" inside a nested one; all others hold
            none. Needed if the sizes of the inputs leave it open.
        allow_mixing: Capture parameters that are used after samples were combined. A
            sample's row is then its share of the batch loss.
        ignore_penalty: Skip the check that samples add up to the gradient. Needed for
            penalties in the loss other than L1 and L2.
    """

    tracker: str | TrackerFactory
    layout: str
    update_every: int
    oversample: int
    strength: float | Callable[[int], float]
    warmup: int
    forget: float | None
    after: Downstream | Sequence[Downstream] | None
    loss_reduction: str
    generator: torch.Generator | None
    basis_dtype: torch.dtype | None
    direction_rank: int | None
    batch_dim: int | None
    samples_in: str | Sequence[str] | None
    allow_mixing: bool
    ignore_penalty: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """What a filter does, apart from the model it does it to.

    Attributes:
        rank: Number of directions K; with ``layout="layerwise"`` the number for each
            layer (at most its size), or a dictionary from layer names to numbers, where
            layers not named are left alone.

    The others are those of ``Options``, and ``samples``, ``stream`` and ``scaler`` as
    in ``GradientFilter``.
    """

    rank: int | Mapping[str, int]
    tracker: str | TrackerFactory = "power"
    layout: str = "global"
    samples: str = "per_sample"
    update_every: int = 1
    oversample: int = 0
    strength: float | Callable[[int], float] = 1.0
    warmup: int = 0
    forget: float | None = None
    after: Downstream | Sequence[Downstream] | None = ()
    loss_reduction: str = "mean"
    generator: torch.Generator | None = None
    basis_dtype: torch.dtype | None = None
    direction_rank: int | None = None
    stream: bool = False
    batch_dim: int | None = None
    samples_in: str | Sequence[str] | None = None
    allow_mixing: bool = False
    ignore_penalty: bool = False
    scaler: torch.amp.GradScaler | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_kinds()
        _check_stages(self.after)
        if callable(self.strength):
            _check_schedule(self.strength)
        else:
            _check_strength(self.strength)
        self._check_samples_in()
        self._check_direction_rank()
        self._check_stream()
        if callable(self.tracker):
            if self.oversample or self.forget is not None:
                raise ValueError(
                    "oversample and forget belong to the named trackers: "
                    "set them in your own tracker's constructor"
                )
        elif not _is_among(self.tracker, TRACKERS):
            raise ValueError(
                f"tracker must be one of {tuple(TRACKERS)} or a function (dim, rank) "
                f"-> tracker, got {self.tracker!r}"
            )

    def _check_kinds(self) -> None:
        for name, known in CHOICES.items():
            if not _is_among(getattr(self, name), known):
                raise ValueError(
                    f"{name} must be one of {tuple(known)}, got {getattr(self, name)!r}"
                )
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"{name} must be True or False, got {getattr(self, name)!r}"
                )
        generator, scaler = self.generator, self.scaler
        if not (generator is None or isinstance(generator, torch.Generator)):
            raise ValueError(
                f"generator must be a torch.Generator, got {generator!r}: give "
                f"torch.Generator().manual_seed(...)"
            )
        # By what it is asked: other libraries have scalers of their own.
        if not (scaler is None or hasattr(scaler, "get_scale")):
            raise ValueError(
                f"scaler must be the torch.amp.GradScaler in use, got {scaler!r}"
            )

    def _check_numbers(self) -> None:
        if isinstance(self.rank, Mapping):
            check_whole(**{f"rank of {name!r}": k for name, k in self.rank.items()})
        else:
            check_whole(rank=self.rank)
        for name in ("direction_rank", "batch_dim"):
            if getattr(self, name) is not None:
                check_whole(**{name: getattr(self, name)})
        for name, least in {"update_every": 1, "oversample": 0, "warmup": 0}.items():
            check_whole(**{name: getattr(self, name)})
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} must be at least {least}, got {getattr(self, name)}"
                )
        check_forget(self.forget)
        if self.basis_dtype is not None:
            check_storage(self.basis_dtype)

    def _check_samples_in(self) -> None:
        if declared(self.samples_in) and self.samples != "per_sample":
            raise ValueError(
                f'samples_in needs samples="per_sample", got {self.samples!r}, which '
                f"does not look at the model's inputs: leave samples_in out"
            )

    def _check_direction_rank(self) -> None:
        if self.direction_rank is None:
            return
        if self.direction_rank < 1:
            raise ValueError(
                f"direction_rank must be at least 1, got {self.direction_rank}"
            )
        if self.tracker != "power":
            raise ValueError(
                'direction_rank works with tracker="power" only, got '
                f"tracker={self.tracker!r}: leave one of the two out"
            )
        if self.basis_dtype not in (None, *DIRECTION_DTYPES):
            raise ValueError(
                f"with direction_rank, basis_dtype must be one of {DIRECTION_DTYPES}, "
                f"got {self.basis_dtype}: thin products are small in any type"
            )

    def _check_stream(self) -> None:
        if not self.stream:
            return
        if self.samples != "per_sample":
            raise ValueError(
                f'stream=True needs samples="per_sample", got {self.samples!r}: '
                f"micro-batches have no rows to drop, leave stream out"
            )
        if self.layout != "layerwise":
            raise ValueError(
                f'stream=True needs layout="layerwise", got {self.layout!r}: choose '
                f"it, or leave stream out; for one global basis without rows (B, D), "
                f"use direction_rank=4"
            )
        if self.scaler is not None:
            raise ValueError(
                "stream=True updates bases before a GradScaler can skip the step: "
                "leave one of the two out, or use torch.bfloat16, which needs no "
                "scaler"
            )
        if self.direction_rank is not None:
            raise ValueError(
                "with direction_rank there are no rows to stream: leave stream out"
            )

    @classmethod
    def named(cls, owner: str, options: Mapping[str, Any]) -> "FilterOptions":
        """The options given by keywords to ``owner``; an unknown one is named."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise TypeError(
                    f"{owner} has no option {name!r}: {hint}The options are "
                    f"{', '.join(known)}"
                )
        return cls(**options)

    def described(self) -> dict[str, str]:
        """Every option in words that are the same wherever it is the same."""
        words = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: described(value) for name, value in words.items()} | {
            "after": ", ".join(described(stage) for stage in self.stages) or "nothing"
        }

    @property
    def stages(self) -> tuple[Downstream, ...]:
        """What the filtered gradient goes through, in order."""
        return (self.after,) if callable(self.after) else tuple(self.after or ())

    def takes_samples(self, step: int) -> bool:
        """Whether samples are taken at this step."""
        return step % self.update_every == 0

    def strength_at(self, step: int) -> float:
        """How much of the removed part to remove, 0 for only watching."""
        strength = self.strength
        if callable(strength):
            strength = strength(step)
            _check_strength(strength)
        return 0.0 if step < self.warmup else strength

    def sample_scale(self, num_rows: int) -> float:
        """What turns captured rows into gradients of single samples."""
        # The rows add up to the batch gradient; a mean loss divided each by their
        # number.
        scale = float(num_rows) if self.loss_reduction == "mean" else 1.0
        return scale if self.scaler is None else scale / self.scaler.get_scale()

    def source_for(
        self, model: nn.Module, layout: Layout, use: Use | None = None
    ) -> SampleSource:
        """Where samples of a model's parameters come from; ``use`` takes a stream."""
        return source_for(
            self.samples,
            model,
            layout,
            batch_dim=self.batch_dim,
            samples_in=declared(self.samples_in),
            allow_mixing=self.allow_mixing,
            ignore_penalty=self.ignore_penalty,
            direction_rank=self.direction_rank,
            use=use,
        )

    def tracker_for(self, dim: int, rank: int, **where: Any) -> Tracker:  # noqa: ANN401
        """A tracker of these options; ``where`` is its dtype, device and shard."""
        if callable(self.tracker):
            where = {name: where[name] for name in ("shard",) if name in where}
            made = self.tracker(dim, rank, **where)
            missing = missing_members(made)
            if missing:
                raise ValueError(
                    f"tracker={self.tracker!r} made a {type(made).__name__} without "
                    f"{', '.join(missing)}: dome.testing.check_tracker shows what a "
                    "tracker needs"
                )
            return made
        where["dtype"] = self.basis_dtype or where["dtype"]
        return TRACKERS[self.tracker](
            dim,
            rank,
            oversample=self.oversample,
            forget=self.forget,
            generator=self.generator,
            **where,
        )

    def directions_for(
        self,
        shapes: Sequence[torch.Size],
        rank: int,
        **where: Any,  # noqa: ANN401
    ) -> LowRankPower:
        """A tracker of directions of low rank, of parameters of these shapes."""
        where["dtype"] = self.basis_dtype or where["dtype"]
        return LowRankPower(
            shapes,
            rank,
            self.direction_rank or 1,
            oversample=self.oversample,
            forget=self.forget,
            generator=self.generator,
            **where,
        )


CHOICES: dict[str, Collection[str]] = {
    "layout": LAYOUTS,
    "samples": KINDS,
    "loss_reduction": LOSS_REDUCTIONS,
}
FLAGS = ("stream", "allow_mixing", "ignore_penalty")


def described(value: object) -> str:
    """A value in words, without its address: that is another in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _is_among(value: object, known: Collection[str]) -> bool:
    return isinstance(value, str) and value in known


def _check_stages(after: object) -> None:
    """Refuse an ``after`` that could not be called at the first step."""
    stages = after if isinstance(after, list | tuple) else (after,)
    for stage in () if after is None else stages:
        if isinstance(stage, type):
            raise ValueError(
                f"after got the class {stage.__name__}: pass an instance, such as "
                f"{stage.__name__}(...)"
            )
        if not callable(stage):
            raise ValueError(
                f"after must be a function of the filtered gradient (D,), or a list of "
                f"them, got {after!r}"
            )


def _check_schedule(strength: Callable[[int], float]) -> None:
    """Refuse a function that cannot be called with a step."""
    try:
        inspect.signature(strength).bind(0)
    except TypeError as error:
        raise ValueError(
            f"strength must be a number or a function of the step alone, got "
            f"{strength!r}: {error}"
        ) from error
    except ValueError:
        return  # written in C: it does not tell what it takes


def _check_strength(strength: object) -> None:
    if not isinstance(strength, SupportsFloat) or not 0 <= float(strength) <= 1:
        raise ValueError(
            f"strength must lie between 0 (remove nothing) and 1, or be a function of "
            f"the step that returns such a number, got {strength!r}"
        )


def signature_of(*, leading: Sequence[str], more: Sequence[str]) -> inspect.Signature:
    """What ``help()`` shows of a filter that takes these options by keyword.

    Args:
        leading: Arguments in front of the options, without defaults.
        more: Keywords behind them, None by default.
    """
    kinds = inspect.Parameter
    ours = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in leading]
    options = [
        kinds(field.name, kinds.KEYWORD_ONLY, default=field.default)
        for field in fields(FilterOptions)
        if field.name not in leading
    ]
    rest = [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in more]
    return inspect.Signature([*ours, *options, *rest])
