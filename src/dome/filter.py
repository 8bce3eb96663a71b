"""The filter between ``backward()`` and ``optimizer.step()``: Algorithm 1 of the paper.

Shapes: G (B, D) gradient samples, g (D,) the batch gradient, U (D, K) the basis. At
every step the samples of the batch turn the basis, then g − U Uᵀ g takes the place of
g.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Self, Unpack

import torch
from torch import Tensor, nn

from dome import state as states
from dome.diagnostics import (
    FilterStats,
    collect_stats,
    warn_of_random_directions,
)
from dome.diagnostics.averages import Averages
from dome.hooking import Hooked, Newcomers
from dome.masks import Masks
from dome.options import FilterOptions, Options, signature_of
from dome.parameters import Layout, selected
from dome.samples import declared
from dome.samples.protocol import is_compact
from dome.torch_private import norms_of, own_arithmetic
from dome.trackers import Tracker
from dome.trackers.blocks import Blockwise, Samples
from dome.world import Alone, World

STEPS_TO_FILL = 20  # with directions that samples determine, before a warning
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
        samples: "per_sample", or "microbatch": the backward passes of one step are the
            samples, which works with every layer.
        stream: Use and drop each layer's samples while backward() runs, so that only
            one layer's rows exist at a time. Needs ``layout="layerwise"`` and takes one
            backward pass per step.
        scaler: The ``torch.amp.GradScaler`` in use, so that its factor is taken out.
        **options: Those of ``dome.options.Options``: tracker, layout, update_every,
            oversample, strength, warmup, forget, after, loss_reduction, generator,
            basis_dtype, direction_rank, batch_dim, samples_in, allow_mixing,
            ignore_penalty.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int | Mapping[str, int],
        *,
        parameters: Iterable[Tensor | str] | str | None = None,
        samples: str = "per_sample",
        stream: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        **options: Unpack[Options],
    ) -> None:
        own = {"rank": rank, "samples": samples, "stream": stream, "scaler": scaler}
        chosen = FilterOptions.named("GradientFilter", {**options, **own})
        only, patterns = selected(model, parameters)
        layout = Layout(model, chosen.layout, only=only)
        # Who gives tensors has chosen once and for all.
        newcomers = None
        if only is None or patterns:
            newcomers = Newcomers(model, model.parameters(), patterns)
        self._begin(Alone(model, layout, chosen, self._turn), newcomers)

    @classmethod
    def in_world(cls, world: World) -> Self:
        """The filter of one of several workers, for ``dome.distributed``."""
        made = cls.__new__(cls)
        made._begin(world, None)
        return made

    def _begin(self, world: World, newcomers: Newcomers | None) -> None:
        super().__init__()
        self._world, self._newcomers = world, newcomers
        self._layout, self._options = world.layout, world.options
        self._source, self._masks = world.source, world.masks
        self._take: Callable[[bool], Samples | None] = self._source.take
        if is_compact(self._source):
            self._take = self._source.take_compact
        self._tracker = world.tracker
        self._num_steps = 0
        self._observed = False
        self._norms: tuple[Tensor, Tensor] | None = None
        self._seconds = self._streaming = 0.0
        self._stats: FilterStats | None = None
        self._averages = Averages()

    __signature__ = signature_of(leading=("model", "rank"), more=("parameters",))

    @own_arithmetic
    def step(self) -> None:
        """Algorithm 1, lines 5 to 9: turn the basis, filter ``.grad`` in place.

        Across workers, all must call it together.
        """
        start, step = time.perf_counter(), self._num_steps
        if self._newcomers is not None:
            self._newcomers.check()
        G = None
        if self._options.takes_samples(step):
            G = self._take(not self._observed)  # 5  g_j
        G, scale = self._world.meet(step, G)  # those of all workers
        num_rows = 0 if G is None else len(G)
        if G is not None:
            self._tracker.update(G, scale)  # 6  U, Λ = UpdateSub(U, Λ, {g_j})
            del G
        strength = self._options.strength_at(step)
        self._filter(strength)  # 8, 9
        self._average(strength, num_rows)
        self._num_steps, self._observed = step + 1, False
        # Other trackers do not fill up what samples leave open.
        fills = self._options.tracker == "power" and strength > 0
        if fills and step + 1 == self._options.warmup + STEPS_TO_FILL:
            warn_of_random_directions(list(self.trackers.values()), STEPS_TO_FILL)
        self._source.arm(self._options.takes_samples(step + 1))
        self._seconds = time.perf_counter() - start + self._streaming
        self._streaming, self._stats = 0.0, None

    def _average(self, strength: float, num_rows: int) -> None:
        """Count the step in what ``.stats`` averages."""
        if self._norms is None:
            return
        # The mean of the samples is g, where all of g is theirs.
        to_mean = 1.0 if self._options.loss_reduction == "mean" else math.nan
        if self._options.loss_reduction == "sum" and num_rows:
            to_mean = 1 / num_rows
        if len(self._tracker.by_name) < len(self._layout.blocks):
            to_mean = math.nan
        self._averages.note(
            list(self._tracker.by_name.values()),
            self._norms,
            self._source.samples_per_row,
            to_mean,
            is_filtered=strength > 0,
        )

    def _filter(self, strength: float) -> None:
        """Algorithm 1, lines 8 and 9, and then ``after``."""
        g = self._world.gradient()  # 8  the mean of the g_j, which backward() made
        if not isinstance(g, Tensor):
            self._norms = remove_(self._tracker, g, strength, self._masks)
            return
        filtered = self._tracker.project_out(g, strength) if strength else g  # 9
        before, after, num_bad = self._world.total(
            norm_of(g).square(), norm_of(filtered).square(), not_finite(g)
        )
        before, after = before.sqrt(), torch.where(num_bad == 0, after, before).sqrt()
        held = self._world.zeros(g, before)
        if strength:
            # A gradient that is not finite would spread to every parameter through
            # U Uᵀ g: it stays as it is, for the user to see.
            filtered = torch.where(num_bad == 0, filtered, g)
            if held is not None:
                filtered.masked_fill_(held, 0)
                (after,) = self._world.total(norm_of(filtered).square())
                after = after.sqrt()
        self._norms = before, after
        self._world.put_(filtered)

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
        self._check_alone("observe")
        if grads.dim() != 2 or grads.shape[1] != self._layout.dim:
            raise ValueError(
                f"samples must have shape (B, {self._layout.dim}), one gradient per "
                f"row, got {tuple(grads.shape)}"
            )
        if self._streaming:
            raise RuntimeError(
                "observe() was called after backward(), but stream=True has used its "
                "samples already: call observe() before backward(), or leave stream "
                "out"
            )
        self._tracker.update(grads)
        self._stats = None
        self._observed = True  # so that a step without samples is no error

    @own_arithmetic
    def filter_(self) -> None:
        """Filter ``.grad`` with the basis as it is, without counting a step."""
        self._check_alone("filter_")
        self._filter(self._options.strength_at(self._num_steps))
        self._stats = None

    @own_arithmetic
    def project_out(self, grads: Tensor) -> Tensor:
        """Gradient samples (B, D) without their part in the tracked span."""
        self._check_alone("project_out")
        filtered = grads.clone()
        for columns, tracker in self._tracker:
            if tracker.effective_rank > 0:
                U = tracker.basis.to(grads)
                filtered[:, columns] -= (grads[:, columns] @ U) @ U.T
        return filtered

    def detach(self) -> None:
        """Remove every hook from the model and the optimizer. Can be called twice.

        Across workers, gradients are averaged again as without a filter.
        """
        # Once: another filter may have been attached to the model since.
        attached, self._world.attached = self._world.attached, ()
        for part in attached:
            part.detach()
        super().detach()

    @property
    def trackers(self) -> dict[str, Tracker]:
        """The tracker of each block: "all", or one per layer by the layer's name.

        Across workers it may hold only this worker's rows of its basis.
        """
        return dict(self._tracker.by_name)

    @property
    def stats(self) -> FilterStats:
        """What the last step did. Computed when asked for.

        Across workers a ``dome.distributed.DistributedStats``, for any of them.
        """
        return self._world.stats(self._stats or self._collected())

    def state_dict(self, only: int | None = None) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit: a flat dictionary of tensors.

        Across workers all must call it. It is that of one process, whatever their
        number, and on every worker. With a compressor it is a synchronisation: bases
        become the leading part of their average, memories of error feedback their
        average, so that the run that continues and one that resumes are the same.
        With ``fully_shard`` it is for ``torch.distributed.checkpoint``: bases are in it
        as DTensors, one for each parameter and cut as it is.

        Args:
            only: The one worker that gets the state. The others get an empty
                dictionary.
        """
        return self._state(only, whole=False)

    def full_state_dict(self, only: int | None = None) -> dict[str, Tensor]:
        """The state of one process, with ``fully_shard`` too: D K numbers.

        Args:
            only: As for ``state_dict``.
        """
        return self._state(only, whole=True)

    def _collected(self) -> FilterStats:
        trackers = list(self._tracker.by_name.values())
        return collect_stats(
            trackers, self._num_steps, self._norms, self._seconds, self._averages
        )

    def _state(self, only: int | None, *, whole: bool) -> dict[str, Tensor]:
        # A synchronisation of workers forgets the last update.
        self._stats = self._stats or self._collected()
        own = self._world.state(whole, only)
        if own is None:
            return {}
        state = states.shapes_of(self._layout) | own
        state["num_steps"] = torch.tensor(self._num_steps)
        return state | states.stages(self._options.stages)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state; one of another model, layout or rank is refused.

        It may come from any number of workers, or from one process.
        """
        states.check_model(self._layout, state)
        state = self._world.held(state)
        self._tracker.check_state(state)
        self._masks.check_state(state)
        num_steps = states.count_in(state, "num_steps")
        # Whatever is refused is refused before anything is changed.
        states.load_stages(self._options.stages, state)
        self._tracker.load_state_dict(state)
        self._masks.load_state_dict(state)
        self._num_steps, self._stats = num_steps, None
        self._averages.forget()
        self._source.discard()
        self._source.arm(self._options.takes_samples(self._num_steps))

    def _check_alone(self, name: str) -> None:
        if not isinstance(self._world, Alone):
            raise RuntimeError(
                f"{name}() needs the whole basis and works in one process only: with "
                f"workers, call optimizer.step()"
            )


def not_finite(vector: Tensor) -> Tensor:
    """1 if some number is not finite, else 0: a fifth of ``isfinite().all()``."""
    if not vector.numel():
        return torch.zeros((), dtype=torch.float64, device=vector.device)
    return torch.stack(torch.aminmax(vector)).isfinite().all().logical_not().double()


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
