"""Does a sample's gradient depend on that sample alone?

Clipping bounds what one sample adds to a sum; if it also changes the gradients of the
others (``x - x.mean(0)``, batch norm, attention over the batch), nothing is bounded. So
the first samples that a step is taken with are put through the model again: with half
of them in the place of the other half, one among copies of another, and half of them
alone. The gradients of the samples that stayed must stay.

Shapes: G (B, D), one sample per row.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dome.parameters import Layout
from dome.privacy.accounting import PrivacyError
from dome.privacy.refuse import is_short
from dome.samples.capture import Capture, capture_paused
from dome.samples.store.rows import Rows
from dome.samples.tracing.inputs import Roles
from dome.samples.tracing.nested import Value, all_tensors, tensors
from dome.torch_private import TorchDispatchMode, tree_flatten, tree_map_only

MOST = 8  # samples that are looked at, so that large models have room for it
SEED, OTHER_SEED = 0x646F6D65, 0x656D6F64


def check_independence(
    model: nn.Module,
    layout: Layout,
    inputs: Value,
    outputs: Iterable[int],
    roles: Roles,
    *,
    batch_dim: int = 0,
    mean: bool = True,
) -> bool:
    """Refuse a model that mixes samples, or keeps something of them in a buffer.

    Dropout does no harm: all runs that are compared draw the same numbers for the same
    places. Only the dependence on the number of samples is tested without it, in
    evaluation mode, and not at all for a model that draws numbers there too.

    Args:
        model: In the mode it is trained in; it and all seeds are left as they were.
        layout: Its tracked parameters.
        inputs: Arguments and keyword arguments of a call.
        outputs: Numbers of those tensors it returns that the loss was computed from.
        roles: Which inputs hold samples.
        batch_dim: Which dimension of the inputs enumerates samples.
        mean: Whether a loss that the model returns is a mean over samples.

    Returns:
        Whether it was tested: a single sample has none to be mixed with.
    """
    given = ModelInput(model, inputs, roles, batch_dim)
    chosen = list(range(min(given.size, MOST)))
    if len(chosen) < 2:
        return False
    wanted = frozenset(outputs)
    with capture_paused(model):
        for per_sample in (True, False):
            rerun = Rerun(model, layout, given, wanted, per_sample, batch_dim, mean)
            rerun.check(chosen)
    return True


class ModelInput:
    """What a model was called with.

    Args:
        model: Bags of its embeddings make samples of a pair (indices, offsets).
        value: Arguments and keyword arguments of the call.
        roles: Which of them hold samples.
        batch_dim: Which dimension of them enumerates samples.
    """

    def __init__(
        self, model: nn.Module, value: Value, roles: Roles, batch_dim: int
    ) -> None:
        self._value, self.samples_in = value, roles.declared
        leaves = tree_flatten(self._value)[0]
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(found) != len(all_tensors(self._value)):
            raise PrivacyError(
                "the model's input hides tensors in an object, so dome cannot "
                "exchange its samples to test whether the model mixes them: give the "
                "model tensors, tuples, lists or dictionaries of them"
            )
        self._bounds = bag_bounds(model, found)
        self._dims: dict[int, int] = {}
        if self._bounds is not None:
            self._offsets, self.size = found[1], len(self._bounds) - 1
            return
        named = roles.named(*value)
        self.size, places = roles.assigned(named, batch_dim)
        self._dims = {id(t): places[n].dim for n, t in named if n in places}

    def only(self, chosen: Sequence[int]) -> Value:
        """Arguments and keyword arguments with these samples, in copies."""
        select = self._selector(chosen)
        if self._bounds is not None:
            select = self._bag_selector(chosen, self._bounds)
        return tree_map_only(Tensor, select, self._value)

    def _selector(self, chosen: Sequence[int]) -> Callable[[Tensor], Tensor]:
        def select(t: Tensor) -> Tensor:
            dim = self._dims.get(id(t))
            if dim is None:
                return t.detach().clone()
            index = torch.tensor(chosen, device=t.device)
            return t.detach().index_select(dim, index)

        return select

    def _bag_selector(
        self, chosen: Sequence[int], bounds: list[int]
    ) -> Callable[[Tensor], Tensor]:
        pieces = [slice(bounds[i], bounds[i + 1]) for i in chosen]
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + piece.stop - piece.start)

        def select(t: Tensor) -> Tensor:
            if t is self._offsets:
                last = len(t) == len(bounds)  # include_last_offset
                return t.new_tensor(starts if last else starts[:-1])
            if t.ndim == 1 and len(t) == bounds[-1]:  # indices, or weights of them
                return torch.cat([t.detach()[piece] for piece in pieces])
            return t.detach().clone()

        return select


class Rerun:
    """Gradients of one probe of the model's outputs, with samples of one's choice.

    A probe is a scalar: of outputs that hold samples Σ w·o + o²/2, so that their values
    count as well as their derivatives; of the others (a loss that the model computes)
    Σ w·o, because their values are of all samples together.

    Args:
        model: The model.
        layout: Its tracked parameters.
        given: What it was called with.
        wanted: Which outputs count.
        per_sample: Whether the probe is of those that hold samples.
        batch_dim: Which dimension enumerates samples.
        mean: Whether a loss that the model returns is a mean.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        given: ModelInput,
        wanted: frozenset[int],
        per_sample: bool,
        batch_dim: int,
        mean: bool,
    ) -> None:
        self._model, self._layout, self._given = model, layout, given
        self._wanted, self._per_sample = wanted, per_sample
        self._batch_dim, self._mean = batch_dim, mean

    def check(self, chosen: list[int]) -> None:
        """Refuse a model in which these samples meet."""
        half = len(chosen) // 2
        first, last = chosen[:half], chosen[half:]
        whole, kept = self._rows(chosen)
        if whole is None:
            return
        again, _ = self._rows(chosen)
        if _largest_change(whole, again) > _tolerance(whole):
            raise PrivacyError(
                "the model gives other gradients for the same samples and the same "
                "seeds, so dome cannot test whether it mixes samples: let it draw its "
                "random numbers from torch's global generator"
            )
        # Sums over halves may agree by chance; then one sample among copies of another.
        others = (
            (slice(0, half), [first[i % half] for i in range(len(chosen))]),
            (slice(half, None), [last[i % len(last)] for i in range(half)] + last),
            (slice(0, 1), chosen[:1] + chosen[-1:] * (len(chosen) - 1)),
            (slice(-1, None), chosen[:1] * (len(chosen) - 1) + chosen[-1:]),
        )
        for stay, samples in others:
            rows, left = self._rows(samples)
            _check_same(whole[stay], None if rows is None else rows[stay])
            _check_buffers(kept, left)
        self._check_size(chosen, first)

    def _check_size(self, chosen: list[int], part: list[int]) -> None:
        """Refuse gradients that depend on how many samples there are."""
        for mode in (None, False):
            with in_mode(self._model, mode):
                rows, _ = self._rows(chosen)
                other, _ = self._rows(chosen, OTHER_SEED)
                # Numbers drawn for a part are not those drawn for the whole.
                if rows is None or _largest_change(rows, other) > _tolerance(rows):
                    continue
                alone, _ = self._rows(part)
                if alone is None:
                    raise PrivacyError(_mixing("vanishes"))
                if self._mean and not self._per_sample:
                    alone, rows = len(alone) * alone, len(rows) * rows
                _check_same(rows[: len(part)], alone)
                return

    def _rows(
        self, chosen: list[int], seed: int = SEED
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """G of these samples, None if the probe does not exist; the buffers after."""
        args, kwargs = self._given.only(chosen)
        rows = Rows(self._layout, functional=True)
        capture = Capture(self._model, self._batch_dim, self._given.samples_in)
        capture.subscribe(rows, allow_mixing=True)  # to be found here, by comparing
        try:
            with untouched(self._model), seeded(seed, self._layout.device):
                with torch.enable_grad(), _RefuseShort():  # type: ignore[no-untyped-call]
                    out = self._model(*args, **kwargs)
                probe = self._probe(out, len(chosen))
                buffers = {n: b.clone() for n, b in self._model.named_buffers()}
            if probe is None:
                return None, buffers
            return rows.take(self._gradients(probe)), buffers
        finally:
            capture.unsubscribe(rows)

    def _gradients(self, probe: Tensor) -> list[Tensor | None]:
        trained = [p for p in self._layout.parameters if p.requires_grad]
        found = torch.autograd.grad(probe, trained, allow_unused=True)
        by_id = {id(p): g for p, g in zip(trained, found, strict=True)}
        return [by_id.get(id(p)) for p in self._layout.parameters]

    @torch.enable_grad()
    def _probe(self, out: Value, size: int) -> Tensor | None:
        terms: list[Tensor] = []
        for number, t in enumerate(all_tensors(out)):
            dim = sample_dim(t, size, self._batch_dim)
            counts = number in self._wanted and t.requires_grad
            if not counts or (dim is not None) != self._per_sample:
                continue
            if dim is None:
                terms.append((_weights(t.shape, number).to(t) * t).sum())
                continue
            o = t.movedim(dim, 0)
            # A part of the samples has the weights that it has in the whole.
            w = _weights((MOST, *o.shape[1:]), number)[:size].to(o)
            terms += [(w * o).sum(), o.square().sum() / 2]
        return torch.stack(terms).sum() if terms else None


def _weights(shape: tuple[int, ...], number: int) -> Tensor:
    rng = torch.Generator().manual_seed(SEED + number)
    return torch.randn(shape, generator=rng, dtype=torch.float64)


class _RefuseShort(TorchDispatchMode):
    """Refuses what a model computes in 16 bits, wherever in its forward."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Value],
        types: object,
        args: tuple[Value, ...] = (),
        kwargs: dict[str, Value] | None = None,
    ) -> Value:
        out = func(*args, **(kwargs or {}))
        if any(is_short(t.dtype) for t in tensors(out)):
            raise PrivacyError(
                f"the model computes in 16 bits ({func}): rounding there depends on "
                "the number of samples, so one more sample would move the gradients "
                "of all others. Use float32 throughout, without autocast"
            )
        return out


def _check_same(rows: Tensor, others: Tensor | None) -> None:
    change = _largest_change(rows, others)
    if change > _tolerance(rows):
        raise PrivacyError(_mixing(f"changes by {change:.1%}"))


def _mixing(what: str) -> str:
    return (
        f"a sample's gradient {what} when other samples are in its batch: the model "
        f"mixes samples (a mean over the batch, batch norm, attention across it), so "
        f"clipping does not bound the effect of a sample. Make every sample's output "
        f"depend on that sample alone"
    )


def _tolerance(rows: Tensor) -> float:
    # Half of the digits: runs are alike but for the order of sums in other kernels.
    return torch.finfo(rows.dtype).eps ** 0.5


def _largest_change(rows: Tensor, others: Tensor | None) -> float:
    """How far a row moved, in units of its norm; infinite if it became NaN."""
    if others is None:
        return float("inf")
    rows, others = rows.double(), others.double()
    size = torch.linalg.vector_norm(rows, dim=1)
    change = torch.linalg.vector_norm(rows - others, dim=1) / size
    # A row that was zero or NaN, and is so again, has not moved.
    alike = (rows == others) | (rows.isfinite() | others.isfinite()).logical_not()
    change[alike.all(dim=1)] = 0.0
    return float(change.nan_to_num(nan=float("inf")).max())


def _check_buffers(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    for name, values in before.items():
        if not torch.equal(values.nan_to_num(), after[name].nan_to_num()):
            raise PrivacyError(
                f"buffer {name!r} keeps something of the samples that the model sees, "
                f"without noise: remove it, or leave it as it is while training"
            )


def sample_dim(t: Tensor, size: int, batch_dim: int) -> int | None:
    """Where a tensor holds the samples; None for one that holds none (a mask, say)."""
    places = [dim for dim, length in enumerate(t.shape) if length == size]
    if batch_dim in places:
        return batch_dim
    return places[0] if len(places) == 1 else None


def bag_bounds(model: nn.Module, found: list[Tensor]) -> list[int] | None:
    """Where bags begin and end, if a sample is a bag of indices."""
    bags = [m for m in model.modules() if isinstance(m, nn.EmbeddingBag)]
    pair = [t for t in found[:2] if t.ndim == 1 and not t.is_floating_point()]
    if not bags or len(pair) < 2:
        return None
    offsets = pair[1].tolist()
    return offsets if bags[0].include_last_offset else [*offsets, len(pair[0])]


@contextmanager
def in_mode(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Train or evaluate, or stay as it is; afterwards as it was."""
    modes = {module: module.training for module in model.modules()}
    if training is not None:
        model.train(training)
    try:
        yield
    finally:
        for module, was in modes.items():
            module.training = was


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put every buffer back, by value and by identity."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, values in kept:
            if not torch.equal(buffer, values):
                buffer.copy_(values)
            setattr(module, name, buffer)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The same random numbers every time, and the program's own ones afterwards."""
    numpy: Any = sys.modules.get("numpy")
    python, others = random.getstate(), numpy and numpy.random.get_state()
    module: Any = torch.get_device_module(device)
    # A device may draw its numbers on the CPU.
    own = device.type != "cpu" and hasattr(module, "get_rng_state")
    state, on_device = torch.get_rng_state(), own and module.get_rng_state(device)
    try:
        torch.default_generator.manual_seed(seed)
        if own:
            fresh = torch.Generator(device).manual_seed(seed)
            module.set_rng_state(fresh.get_state(), device)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed)
        yield
    finally:
        torch.set_rng_state(state)
        if own:
            module.set_rng_state(on_device, device)
        random.setstate(python)
        if numpy:
            numpy.random.set_state(others)
