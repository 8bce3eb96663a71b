"""What a filter would do, measured: bases learned on some batches, judged on others.

Letters: G (B, D) samples, H = G − mean, g (D,) their mean, U (D, K) a basis. The first
k columns of Algorithm 2's U do not depend on the others: one tracker of K directions
stands for those of all smaller ranks.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from dome.options import FilterOptions
from dome.parameters import Layout
from dome.samples.calls import LossCall, LossFn
from dome.samples.functional import sample_shares
from dome.samples.tracing.nested import Value
from dome.torch_private import buffers_of
from dome.trackers.blocks import Blockwise
from dome.world import make_tracker


@dataclass(frozen=True, slots=True)
class Judged:
    """What batches have along directions that they had no part in, in one layout.

    Attributes:
        spread: Σ ‖h_b‖² over all samples.
        spread_inside: The same along each direction, block by block, (K_l,) each.
        lengths: ‖g‖² of each batch, shape (N,).
        lengths_inside: The same along each direction, (N, K_l) each.
        num_samples: B of each batch.
    """

    spread: Tensor
    spread_inside: tuple[Tensor, ...]
    lengths: Tensor
    lengths_inside: tuple[Tensor, ...]
    num_samples: tuple[int, ...]

    def share(self, rank: int) -> float:
        """How much of the samples' variance the first directions of a block hold."""
        return float(sum(s[:rank].sum() for s in self.spread_inside) / self.spread)

    def kept_squares(self, rank: int) -> Tensor:
        """kept_norm² of every batch's gradient, shape (N,)."""
        return 1 - (self._inside(rank) / self.lengths).clamp(0.0, 1.0)

    def noise_scales(self, rank: int) -> tuple[float, float]:
        """tr Σ / ‖μ‖² inside and outside, from all batches together."""
        inside = sum(s[:rank].sum() for s in self.spread_inside)
        within = self._inside(rank)
        return (
            self._scale(torch.as_tensor(inside), within),
            self._scale(self.spread - inside, self.lengths - within),
        )

    def noise_scale(self) -> float:
        """The same of the whole gradient."""
        return self._scale(self.spread, self.lengths)

    def _inside(self, rank: int) -> Tensor:
        return torch.stack([x[:, :rank].sum(1) for x in self.lengths_inside]).sum(0)

    def _scale(self, spread: Tensor, lengths: Tensor) -> float:
        sizes = torch.tensor(self.num_samples, dtype=torch.float64)
        trace = float(spread) / float((sizes - 1).sum())
        signal = float(lengths.cpu().mean()) - trace * float((1 / sizes).mean())
        return trace / signal if signal > 0 else float("inf")


class Judge:
    """Adds up what held-out batches have along the directions of a tracker."""

    def __init__(self, tracker: Blockwise) -> None:
        self._bases = [(columns, t.basis) for columns, t in tracker]
        self._spread: list[Tensor] = []
        self._lengths: list[Tensor] = []
        self._inside: list[list[tuple[Tensor, Tensor]]] = []
        self._sizes: list[int] = []

    def see(self, G: Tensor) -> None:
        """One more batch of samples (B, D)."""
        g = G.mean(dim=0, keepdim=True)
        H = G - g
        self._spread.append(_squares(H))
        self._lengths.append(_squares(g))
        self._sizes.append(len(G))
        self._inside.append([_along(U, H, g, columns) for columns, U in self._bases])

    def verdict(self) -> Judged:
        """Of all batches seen."""
        pairs = list(zip(*self._inside, strict=True))  # by block
        return Judged(
            torch.stack(self._spread).sum(),
            tuple(torch.stack([s for s, _ in block]).sum(0) for block in pairs),
            torch.stack(self._lengths),
            tuple(torch.stack([m for _, m in block]) for block in pairs),
            tuple(self._sizes),
        )


def _along(U: Tensor, H: Tensor, g: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Σ_b (uᵀ h_b)² and (uᵀ g)² of every direction of a block."""
    inside = [(rows[:, columns].to(U) @ U).double().square() for rows in (H, g)]
    return inside[0].sum(0), inside[1].sum(0)


def _squares(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dtype=torch.float64).square()


class SampleBatches:
    """Gradient samples of a loader's batches, one after the other, at fixed weights.

    Args:
        model: The network.
        loss_fn: Its loss; None if the model returns it.
        loader: Batches as ``LossCall.of_batch`` takes them.
        most: How many to take.
        samples_in: Which inputs hold samples.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        loader: Iterable[Value],
        most: int,
        samples_in: tuple[str, ...] | None,
    ) -> None:
        self._model, self._loss_fn, self._names = model, loss_fn, samples_in
        self.length = len(loader) if isinstance(loader, Sized) else None  # if known
        self._left = islice(iter(loader), most)
        self._device = next(model.parameters()).device
        self.positions = 1  # of a sample, where it is a text

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._left:
            call = LossCall.of_batch(self._loss_fn, batch).to(self._device)
            self._look_at(call)
            loss = partial(call.loss, self._model)
            rows = sample_shares(self._model, loss, self._names)
            if not rows.isfinite().all():
                raise ValueError(
                    "a gradient sample is not finite at the model's weights: there is "
                    "nothing to suggest until the loss of every sample is finite"
                )
            yield rows.mul_(len(rows))

    def _look_at(self, call: LossCall) -> None:
        inputs = [*call.args, *call.kwargs.values()]
        first = next((x for x in inputs if isinstance(x, Tensor)), None)
        if first is not None and first.ndim == 2 and not first.is_floating_point():
            self.positions = first.shape[1]


def learned(
    model: nn.Module, rank: int, layout: str, direction_rank: int | None
) -> Blockwise:
    """A tracker that has seen nothing yet."""
    options = FilterOptions(rank=rank, layout=layout, direction_rank=direction_rank)
    return make_tracker(Layout(model, layout), options)


@contextmanager
def untouched(model: nn.Module, loader: object) -> Iterator[None]:
    """Put back generators and buffers, as they were before."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    generators = _generators(loader)
    states = [(g, g.get_state()) for g in generators]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    buffers = [(m, dict(buffers_of(m)), _copies(m)) for m in model.modules()]
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        for module, held, values in buffers:
            _put_back(module, held, values)


def _copies(module: nn.Module) -> dict[str, Tensor]:
    return {n: b.clone() for n, b in buffers_of(module).items() if b is not None}


def _put_back(
    module: nn.Module, held: dict[str, Tensor | None], values: dict[str, Tensor]
) -> None:
    buffers = buffers_of(module)
    buffers.clear()
    buffers.update(held)
    with torch.no_grad():
        for name, value in values.items():
            buffer = buffers[name]
            if buffer is not None and not torch.equal(buffer, value):
                buffer.copy_(value)


def _generators(loader: object) -> Sequence[torch.Generator]:
    """Those that a ``DataLoader`` and its samplers draw from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    found = {
        id(g): g
        for g in (getattr(owner, "generator", None) for owner in owners)
        if isinstance(g, torch.Generator)
    }
    return list(found.values())
