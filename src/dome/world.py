"""What differs between one process and several workers: a ``World``.

Letters: G (B, D) samples, g (D,) a gradient, U (D, K) a basis. ``GradientFilter`` is
Algorithm 1; wherever workers have to send something, it calls its world. ``Alone`` is
the world of one process. The others are in ``dome.distributed``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from dome.diagnostics import FilterStats
from dome.masks import Masks
from dome.options import Downstream, FilterOptions
from dome.parameters import Block, Layout
from dome.samples import SampleSource, Use
from dome.trackers import Tracker
from dome.trackers.blocks import Blockwise, Samples, ranks_of

State = dict[str, Tensor]


class Attached(Protocol):
    """Something with hooks on a model."""

    def detach(self) -> None:
        """Remove every hook."""


class World(Protocol):
    """This process among its workers, and what each of them holds.

    Workers call every method but ``stats`` together, in the same order.

    Attributes:
        layout: The parameters that are filtered.
        options: What the filter does.
        source: This worker's own samples.
        tracker: The part of the basis that is held here.
        masks: Which entries of ``.grad`` are held at zero.
        attached: What is detached at the end.
    """

    layout: Layout
    options: FilterOptions
    source: SampleSource
    tracker: Blockwise
    masks: Masks
    attached: Sequence[Attached]

    def meet(self, step: int, own: Samples | None) -> tuple[Samples | None, float]:
        """Begin a step: exchange samples.

        Args:
            step: Steps taken so far.
            own: This worker's samples.

        Returns:
            The samples of all workers in the columns held here, None for none, and the
            factor that makes each the gradient of a single sample.
        """

    def gradient(self) -> Tensor | dict[int, Tensor]:
        """The average gradient over workers, or the part of it that is held here.

        Or a dictionary of what is in ``.grad``, by first column, which may be filtered
        in place.
        """

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Add up small tensors over the parts of the gradient."""

    def zeros(self, g: Tensor, norm: Tensor) -> Tensor | None:
        """The entries of g that a mask on the gradient holds at zero; None for none.

        Args:
            g: What ``gradient`` returned.
            norm: Of all of it.
        """

    def put_(self, filtered: Tensor) -> None:
        """End a step: write the filtered gradient into ``.grad``, through ``after``."""

    def stats(self, base: FilterStats) -> FilterStats:
        """The record of a step, with what was sent."""

    def state(self, whole: bool, only: int | None) -> State | None:
        """The state of trackers and masks; None on workers that do not receive it.

        Args:
            whole: As in one process; else it may be split over workers.
            only: The worker that receives it; None for all.
        """

    def held(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The part of a whole or split state that is held here."""


class Alone:
    """The world of one process, which holds everything.

    Args:
        model: The model that is trained.
        layout: Its parameters that are filtered.
        options: What the filter does.
        use: Takes the samples of a layer during ``backward()``, with ``stream``.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        options: FilterOptions,
        use: Use | None = None,
    ) -> None:
        self.layout, self.options = layout, options
        self._stages = options.stages
        # Of the bases: the model may be converted to another later.
        self._dtype = options.basis_dtype or layout.dtype
        self.tracker = make_tracker(layout, options)
        self.source = options.source_for(model, layout, use if options.stream else None)
        self.masks = Masks(layout)
        self.attached: Sequence[Attached] = (self.source, self.masks)

    def meet(self, step: int, own: Samples | None) -> tuple[Samples | None, float]:
        """The samples of this process are all there are."""
        del step
        return own, 0.0 if own is None else self.options.sample_scale(len(own))

    def gradient(self) -> Tensor | dict[int, Tensor]:
        """What ``backward()`` left in ``.grad``."""
        if self.options.direction_rank is not None and not self._stages:
            grads = self.layout.dense_grads(self._dtype)
            if grads is not None:
                return grads
        return self.layout.gather()

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """As they are."""
        return sums

    def zeros(self, g: Tensor, norm: Tensor) -> Tensor | None:
        """The entries of g that a mask holds at zero."""
        return self.masks.find({0: g}, norm)

    def put_(self, filtered: Tensor) -> None:
        """Write the filtered gradient into ``.grad``, through ``after``."""
        if self._stages:
            filtered = pass_through(self._stages, filtered)
        self.layout.scatter_(filtered)

    def stats(self, base: FilterStats) -> FilterStats:
        """As it is."""
        return base

    def state(self, whole: bool, only: int | None) -> State | None:
        """The state of trackers and masks."""
        del whole, only
        return self.tracker.state_dict() | self.masks.state_dict()

    def held(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """All of it."""
        return state


Where = tuple[slice, dict[str, Any]]


def everything(block: Block) -> Where:
    """A block whose columns are all held here."""
    return slice(block.start, block.stop), {}


def all_of(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A state that a worker holds as it is: trackers take their rows themselves."""
    return state


def make_tracker(
    layout: Layout,
    options: FilterOptions,
    place: Callable[[Block], Where] = everything,
) -> Blockwise:
    """A tracker for each block that is filtered.

    Args:
        layout: The parameters and their blocks.
        options: Which trackers, and with what ranks.
        place: Finds the columns of a block among those held here; with what makes its
            tracker one of several: ``shard`` or ``total``.
    """
    ranks = ranks_of(layout.blocks, options.rank)
    columns: list[slice] = []
    trackers: dict[str, Tracker] = {}
    for block in layout.blocks:
        if block.name in ranks:
            here, where = place(block)
            where |= {"dtype": layout.dtype, "device": layout.device}
            rank = ranks[block.name]
            if options.direction_rank is None:
                made = options.tracker_for(block.dim, rank, **where)
            else:
                made = options.directions_for(layout.shapes(block), rank, **where)
            columns.append(here)
            trackers[block.name] = made
    return Blockwise(trackers, columns)


def pass_through(stages: Sequence[Downstream], gradient: Tensor) -> Tensor:
    """What becomes of a filtered gradient (D,) behind the filter."""
    shape = gradient.shape
    for stage in stages:
        gradient = stage(gradient)
        if gradient.shape != shape:
            raise ValueError(
                f"{stage!r} in after returned shape {tuple(gradient.shape)} for a "
                f"gradient of shape {tuple(shape)}"
            )
    return gradient
