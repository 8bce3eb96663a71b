"""The filter between ``backward()`` and ``optimizer.step()``: Algorithm 1 of the paper.

Shapes: G (B, D) gradient samples, g (D,) the batch gradient, U (D, K) the basis. At
every step the samples of the batch turn the basis, then g − U Uᵀ g takes the place of
g.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dome import state as states
from dome.diagnostics import FilterStats, collect_stats
from dome.hooking import Hooked
from dome.masks import Masks
from dome.newcomers import Newcomers
from dome.numerics.arithmetic import own_arithmetic
from dome.numerics.factors import FactorBatch
from dome.numerics.shard import Shard, Total, alone
from dome.options import Downstream, FilterOptions, signature_of
from dome.parameters import Block, Layout, selected
from dome.samples import declared
from dome.samples.protocol import gives_factors
from dome.torch_private import norms_of
from dome.trackers import Tracker
from dome.trackers.blockwise import Blockwise, ranks_of

RANGE = (1e-12, 1e12)  # of norms whose squares float32 can add up


class GradientFilter(Hooked):
    """Removes the leading directions of the per-sample covariance from the gradient.

    Call ``step()`` between ``backward()`` and ``optimizer.step()``, or let
    ``dome.attach`` do it. Use as a context manager to detach at the end.

    Args:
        model: The model that is trained; it is neither wrapped nor changed.
        rank: Number of directions K; with ``layout="layerwise"`` the number for each
            layer, or a dictionary from layer names to numbers.
        parameters: Filter only those of the model's parameters that are among these:
            tensors, names, or patterns of names such as "encoder.*".
        **options: Those of ``dome.options.FilterOptions``: tracker, layout, samples,
            update_every, oversample, strength, warmup, forget, after, loss_reduction,
            generator, basis_dtype, direction_rank, stream, batch_dim, samples_in,
            allow_mixing, ignore_penalty, scaler.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int | Mapping[str, int],
        *,
        parameters: Iterable[Tensor | str] | None = None,
        **options: Any,  # noqa: ANN401 (FilterOptions names and checks them)
    ) -> None:
        super().__init__()
        self._options = FilterOptions.named("GradientFilter", {"rank": rank} | options)
        only, patterns = selected(model, parameters)
        self._layout = Layout(model, self._options.layout, only=only)
        # Who gives tensors has chosen once and for all.
        self._newcomers = None
        if only is None or patterns:
            self._newcomers = Newcomers(model, model.parameters(), patterns)
        # Of the bases: the model may be converted to another later.
        self._dtype = self._options.basis_dtype or self._layout.dtype
        self._tracker = make_tracker(self._layout, self._options)
        self._source = self._options.source_for(model, self._layout, self._turn)
        self._masks = Masks(self._layout)
        self._num_steps = 0
        self._observed = False
        self._norms: tuple[Tensor, Tensor] | None = None
        self._seconds = self._streaming = 0.0

    __signature__ = signature_of(leading=("model", "rank"), more=("parameters",))

    @own_arithmetic
    def step(self) -> None:
        """Take the samples of this step, turn the basis, filter ``.grad`` in place."""
        start, step = time.perf_counter(), self._num_steps
        if self._newcomers is not None:
            self._newcomers.check()
        # Algorithm 1, line by line; its line 8 is what backward() left in .grad.
        G = None
        if self._options.takes_samples(step):
            G = self._take(due=not self._observed)  # 5
        if G is not None:
            self._tracker.update(G, self._options.sample_scale(len(G)))  # 6
            del G
        self._filter(self._options.strength_at(step))  # 9
        self._num_steps, self._observed = step + 1, False
        self._source.arm(self._options.takes_samples(step + 1))
        self._seconds = time.perf_counter() - start + self._streaming
        self._streaming = 0.0

    @own_arithmetic
    def _turn(self, name: str, rows: Tensor) -> None:
        """With ``stream``, line 6 for one layer, while backward() goes on."""
        start = time.perf_counter()
        self._tracker.update_block(name, rows, self._options.sample_scale(len(rows)))
        self._streaming += time.perf_counter() - start

    def watch(
        self,
        *inputs: object,
        samples_in: str | Sequence[str] | None = None,
        **named: object,
    ) -> AbstractContextManager[None]:
        """Capture what is computed inside, as a call of the model with these inputs.

        For a step that calls parts of the model one by one, or a method of it, instead
        of ``model(...)``. Calls of the model inside belong to it.

        Args:
            *inputs: What the step starts from. The first tensor inside tells the
                number of samples.
            samples_in: Which inputs hold samples: by name, or "inputs[0]" for those
                without one. If not given, those that the filter was attached with.
            **named: The same by name.
        """
        return self._source.watch(inputs, named, declared(samples_in))

    def paused(self) -> AbstractContextManager[None]:
        """Let forward passes inside go by: their gradients are no sample's.

        For a term of the loss with derivatives of its own, such as a gradient penalty.
        """
        return self._source.paused()

    def expect_backward(self, loss: Tensor) -> None:
        """Announce that ``loss.backward()`` follows.

        Needed with ``samples="microbatch"`` only, and only where the loss was computed
        without calling the model itself.
        """
        self._source.expect(loss)

    @own_arithmetic
    def observe(self, grads: Tensor) -> None:
        """Turn the basis towards gradient samples of your own, shape (B, D)."""
        if grads.dim() != 2 or grads.shape[1] != self._layout.dim:
            raise ValueError(
                f"samples must have shape (B, {self._layout.dim}), one gradient per "
                f"row, got {tuple(grads.shape)}"
            )
        if self._streaming:
            raise RuntimeError(
                "observe() comes after backward(), whose samples stream=True has used: "
                "call it before, or leave stream out"
            )
        self._tracker.update(grads)
        self._observed = True  # so that a step without samples is no error

    @own_arithmetic
    def filter_(self) -> None:
        """Filter ``.grad`` with the basis as it is, without counting a step."""
        self._filter(self._options.strength_at(self._num_steps))

    @own_arithmetic
    def project_out(self, grads: Tensor) -> Tensor:
        """Gradient samples (B, D) without their part in the tracked span."""
        filtered = grads.clone()
        for columns, tracker in self._tracker:
            if tracker.effective_rank > 0:
                U = tracker.basis.to(grads)
                filtered[:, columns] -= (grads[:, columns] @ U) @ U.T
        return filtered

    def detach(self) -> None:
        """Remove every hook from the model and the optimizer. Can be called twice."""
        self._source.detach()
        self._masks.detach()
        super().detach()

    @property
    def trackers(self) -> dict[str, Tracker]:
        """The tracker of each block: "all", or one per layer by the layer's name."""
        return dict(self._tracker.by_name)

    @property
    def stats(self) -> FilterStats:
        """What the last step did. Computed when asked for."""
        trackers = list(self.trackers.values())
        return collect_stats(trackers, self._num_steps, self._norms, self._seconds)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit: a flat dictionary of tensors."""
        state = states.shapes_of(self._layout) | self._tracker.state_dict()
        state |= self._masks.state_dict()
        state["num_steps"] = torch.tensor(self._num_steps)
        return state | states.stages(self._options.stages)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state; one of another model, layout or rank is refused."""
        states.check_model(self._layout, state)
        self._tracker.check_state(state)
        self._masks.check_state(state)
        num_steps = states.count_in(state, "num_steps")
        # Whatever is refused is refused before anything is changed.
        states.load_stages(self._options.stages, state)
        self._tracker.load_state_dict(state)
        self._masks.load_state_dict(state)
        self._num_steps = num_steps
        self._source.discard()
        self._source.arm(self._options.takes_samples(self._num_steps))

    def _take(self, due: bool) -> Tensor | FactorBatch | None:
        """The samples of this step: rows, or what they are products of."""
        if self._options.direction_rank is not None and gives_factors(self._source):
            return self._source.take_factors(due)
        return self._source.take(due)

    def _filter(self, strength: float) -> None:
        """Algorithm 1, line 9, and what comes behind the filter, into ``.grad``."""
        if self._options.direction_rank is not None and not self._options.stages:
            grads = self._layout.dense_grads(self._dtype)
            if grads is not None:
                self._norms = remove_(self._tracker, grads, strength, self._masks)
                return
        filtered = g = self._layout.gather()
        norm = norm_of(g)
        held = self._masks.find({0: g}, norm)
        if strength:
            # A gradient that is not finite would spread to every parameter through
            # U Uᵀ g: it stays as it is, for the user to see.
            projected = self._tracker.project_out(g, strength)
            filtered = torch.where(is_finite(g), projected, g)
            if held is not None:
                filtered.masked_fill_(held, 0)
        self._norms = norm, norm_of(filtered)
        passed = pass_through(self._options.stages, filtered)
        if passed is not g:
            self._layout.scatter_(passed)


def is_finite(vector: Tensor) -> Tensor:
    """Whether all numbers are, on their device: a fifth of ``isfinite().all()``."""
    return torch.stack(torch.aminmax(vector)).isfinite().all()


def norm_of(vector: Tensor) -> Tensor:
    """‖v‖ in float64: squares of float32 numbers overflow long before they do."""
    return torch.linalg.vector_norm(vector, dtype=torch.float64)


def remove_(
    tracker: Blockwise, grads: Mapping[int, Tensor], strength: float, masks: Masks
) -> tuple[Tensor, Tensor]:
    """Filter gradients in place, without a copy; their norm before and after.

    Args:
        tracker: Of directions of low rank.
        grads: By their first column in the flat gradient.
        strength: Multiplies what is removed.
        masks: Tell which entries stay zero.
    """
    before = norm_of_all(list(grads.values()))
    held = masks.find(grads, before)
    if not strength:
        return before, before
    # A gradient that is not finite stays as it is, in all blocks.
    allowed = torch.where(before.isfinite(), strength, 0.0)
    inside = tracker.project_out_(grads, allowed)
    if held is not None:
        for start, g in grads.items():
            g.masked_fill_(held[start : start + g.numel()].view(g.shape), 0)
        return before, norm_of_all(list(grads.values()))
    removed = allowed * (2 - allowed) * inside
    return before, (before.square() - removed).clamp(min=0.0).sqrt()


def norm_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of several tensors as one vector, in float64."""
    if tensors[0].device.type == "cpu":
        # A tenth of the time of a norm in float64, where squares keep in range.
        parts = torch.stack(list(norms_of(tensors)))
        whole = torch.linalg.vector_norm(parts, dtype=torch.float64)
        if RANGE[0] < whole < RANGE[1]:
            return whole
    return torch.linalg.vector_norm(torch.stack([norm_of(t) for t in tensors]))


def make_tracker(
    layout: Layout,
    options: FilterOptions,
    place: Callable[[Block], tuple[slice, Shard]] | None = None,
    total: Total = alone,
) -> Blockwise:
    """A tracker for each block that is filtered.

    Args:
        layout: The parameters and their blocks.
        options: Which trackers, and with what ranks.
        place: For each block, which of the columns held here are its own, and which of
            its rows these are, if other workers hold the others.
        total: Adds up tensors over workers that have other samples, and the same
            directions of low rank.
    """
    ranks = ranks_of(layout.blocks, options.rank)
    columns: list[slice] = []
    trackers: dict[str, Tracker] = {}
    for block in layout.blocks:
        if block.name in ranks:
            here, rank = slice(block.start, block.stop), ranks[block.name]
            where: dict[str, Any] = {"dtype": layout.dtype, "device": layout.device}
            if place is not None:
                here, where["shard"] = place(block)
            if options.direction_rank is None:
                made = options.tracker_for(block.dim, rank, **where)
            else:
                where["total"] = total
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
