"""``sample_gradients``: the gradient samples of any training loop, to look at.

Shapes: G (B, D), one sample a row, in the order of ``model.parameters()``.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from dome.parameters import Block, Layout, selected
from dome.samples.functional import REDUCTIONS
from dome.samples.per_sample import PerSample
from dome.samples.tracing.inputs import check_names, declared
from dome.trackers.factors import FactorBatch
from dome.trackers.lengths import squared_lengths


class SampleGradients:
    """Gradients of the samples of the last backward pass, as ``sample_gradients`` has.

    Of all passes since it was asked last, where there were several: their samples stand
    behind each other. Until the next pass every method is about the same samples.

    Args:
        source: Where samples come from.
        layout: Their parameters, a block for each layer.
        is_mean: Whether the loss is a mean over samples.
    """

    def __init__(self, source: PerSample, layout: Layout, *, is_mean: bool) -> None:
        self._source, self._layout, self._is_mean = source, layout, is_mean
        self._held: Tensor | FactorBatch | None = None

    def __len__(self) -> int:
        return len(self._newest())

    def rows(self) -> Tensor:
        """All of them, shape (B, D), valid until the next backward pass."""
        batch = self._newest()
        if isinstance(batch, Tensor):
            return batch
        return torch.cat([rows for _, rows in self.layers()], dim=1)

    def layers(self) -> Iterator[tuple[str, Tensor]]:
        """Name and rows (B, D of it) of one layer after the other.

        With ``form_rows=False`` rows are made here, those of one layer at a time.
        """
        batch = self._newest()
        for block in self._layout.blocks:
            if isinstance(batch, Tensor):
                yield block.name, batch[:, block.start : block.stop]
            else:
                within = range(block.start, block.stop)
                uses = {s: u for s, u in batch.uses.items() if s in within and u}
                yield block.name, self._written(FactorBatch(len(batch), uses), block)

    def norms(self) -> Tensor:
        """‖g_b‖ of every sample, shape (B,), float64."""
        batch = self._newest()
        if isinstance(batch, Tensor):
            return torch.linalg.vector_norm(batch, dim=1, dtype=torch.float64)
        return self._scale(len(batch)) * squared_lengths(batch).sqrt()

    def _newest(self) -> Tensor | FactorBatch:
        rows = self._source.rows
        if rows.num_waiting or self._held is None or rows.came_without():
            self._held = self._taken()
        return self._held

    def _taken(self) -> Tensor | FactorBatch:
        batch: Tensor | FactorBatch | None
        if self._source.rows.keeps_products:
            batch = cast("FactorBatch | None", self._source.take_compact())
        else:
            batch = self._source.take()
        self._source.arm(True)
        if batch is None:
            raise RuntimeError(
                "no sample was seen since the last time: ask after loss.backward(), "
                "before optimizer.zero_grad()"
            )
        if isinstance(batch, Tensor):  # the capture's own buffer, taken once
            return batch.mul_(self._scale(len(batch)))
        return batch

    def _scale(self, num_rows: int) -> float:
        return float(num_rows) if self._is_mean else 1.0

    def _written(self, batch: FactorBatch, block: Block) -> Tensor:
        """The rows of one layer, from products; zeros of what has no gradient."""
        rows = torch.zeros(
            (len(batch), block.dim),
            dtype=self._layout.common_dtype,
            device=self._layout.device,
        )
        for start in batch.uses:
            part = batch.rows_of(start)
            rows[:, start - block.start : start - block.start + part.shape[1]] = part
        return rows.mul_(self._scale(len(batch)))


@contextmanager
def sample_gradients(
    model: nn.Module,
    *,
    form_rows: bool = True,
    parameters: Iterable[Tensor | str] | str | None = None,
    loss_reduction: str = "mean",
    batch_dim: int | None = None,
    samples_in: str | Sequence[str] | None = None,
    allow_mixing: bool = False,
    ignore_penalty: bool = False,
) -> Iterator[SampleGradients]:
    """Gradients of the samples of each ``backward()`` inside, whatever the loop is.

        with dome.sample_gradients(model) as samples:
            for x, y in loader:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                samples.rows()       # (B, D), or one of:
                samples.layers()     # name and rows, layer by layer
                samples.norms()      # (B,)
                optimizer.step()

    A row is what ``per_sample_gradients`` gives. The model is neither wrapped nor
    changed, and a filter may be attached to it too. Batch norm in training mode is
    refused.

    Args:
        model: The model that is trained.
        form_rows: False keeps inputs and output gradients of linear maps, embeddings
            and convolutions instead of rows, where these are larger: for norms, or for
            one layer at a time. They must not be written to before samples are asked
            for.
        parameters: Only these of the model's: tensors, names or patterns of names.
        loss_reduction: "mean", or "sum" for rows that add up to ``.grad``.
        batch_dim: The dimension of the model's input that enumerates the samples.
        samples_in: Which inputs hold samples, as in ``dome.attach``.
        allow_mixing: As in ``dome.attach``.
        ignore_penalty: As in ``dome.attach``.
    """
    if loss_reduction not in REDUCTIONS:
        raise ValueError(
            f"loss_reduction must be one of {REDUCTIONS}, got {loss_reduction!r}"
        )
    names = declared(samples_in)
    check_names(model, names)
    layout = Layout(model, "layerwise", only=selected(model, parameters)[0])
    source = PerSample(
        model,
        layout,
        batch_dim=batch_dim,
        samples_in=names,
        allow_mixing=allow_mixing,
        ignore_penalty=ignore_penalty,
        direction_rank=None if form_rows else 1,
    )
    try:
        yield SampleGradients(source, layout, is_mean=loss_reduction == "mean")
    finally:
        source.detach()
