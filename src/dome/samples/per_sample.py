"""Per-sample gradients from the user's own ``backward()``, whatever the model is.

While the model's forward runs, a ``TorchFunctionMode`` sees every operation. Where
samples meet a tracked parameter, a rule runs the operation as an autograd function
whose backward writes per-sample gradients (B, *parameter) into the rows (B, D) and
returns their sum, so that the batch gradient is not computed a second time. The model
is not wrapped and nothing is hung on its parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from dome.parameters import Layout
from dome.samples.capture import capture_of
from dome.samples.protocol import NONE
from dome.samples.store.group import large_tables
from dome.samples.store.rows import Rows
from dome.samples.store.streamed import StreamedRows, Use
from dome.samples.tracing.inputs import declared
from dome.samples.tracing.refuse import check_capturable
from dome.trackers.factors import FactorBatch
from dome.trackers.parts import PartialRows


class PerSample:
    """One row for each sample of a batch: the gradient of its term of the loss.

    The model must treat samples independently: batch norm in training mode does not.
    Sources of one model share one capture; each takes the columns of its own layout.

    Args:
        model: Hooks are registered on it, and nothing else.
        layout: The tracked parameters.
        batch_dim: The dimension of the model's input that enumerates the samples;
            the first, if not given.
        samples_in: The names of the inputs that hold samples; found by their sizes, if
            not given.
        allow_mixing: Let tracked parameters meet samples that were mixed: their rows
            then hold parts of other samples' terms of the loss. All sources of a model
            must agree to it.
        strict: Raise this error for every mix that the model computes, also one that
            is part of the loss, as differential privacy must.
        ignore_penalty: Let the loss have terms that are no sample's and that cannot
            be recognised, as an L2 or L1 penalty on the weights is.
        direction_rank: Keep samples as products, for directions of this rank.
        use: Give the rows of each layer to this while backward() runs, and drop them.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        *,
        batch_dim: int | None = None,
        samples_in: str | Sequence[str] | None = None,
        allow_mixing: bool = False,
        strict: type[RuntimeError] | None = None,
        ignore_penalty: bool = False,
        direction_rank: int | None = None,
        use: Use | None = None,
    ) -> None:
        check_capturable(model)
        self.samples_per_row = 1.0
        self.rows: Rows | StreamedRows
        self._take_compact: Callable[[], Tensor | PartialRows | FactorBatch | None]
        if use is None:
            self.rows = rows = Rows(
                layout,
                ignore_penalty=ignore_penalty,
                direction_rank=direction_rank,
                tables=large_tables(model),
            )
            self._take_compact = rows.take_parts
            if direction_rank is not None:
                self._take_compact = rows.take_factors
        else:
            self.rows = StreamedRows(layout, use, ignore_penalty=ignore_penalty)
            self._take_compact = self.rows.take
        self._capture = capture_of(model, batch_dim, declared(samples_in))
        self._capture.subscribe(self.rows, allow_mixing=allow_mixing, strict=strict)

    def arm(self, active: bool) -> None:
        """Choose whether forward passes from now on are captured."""
        self.rows.arm(active)

    def watch(
        self,
        inputs: Sequence[object],
        named: Mapping[str, object] = NONE,
        samples_in: tuple[str, ...] | None = None,
    ) -> AbstractContextManager[None]:
        """Capture what is computed inside, as a call of the model with these inputs."""
        return self._capture.watch(inputs, named, samples_in)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Capture no forward pass inside, such as the one of a gradient penalty."""
        active, self.rows.active = self.rows.active, False
        self.rows.excuse()
        try:
            yield
        finally:
            self.rows.active = active

    def expect(self, loss: Tensor) -> None:
        """Ignored: every captured operation reports from its own backward."""

    def take(self, due: bool = True) -> Tensor | None:
        """The rows (B, D) of every backward pass since the last call."""
        self._check(due)
        return self.rows.take()

    def take_compact(
        self, due: bool = True
    ) -> Tensor | PartialRows | FactorBatch | None:
        """The same without what is zero, or as products: see ``CompactSource``."""
        self._check(due)
        return self._take_compact()

    def _check(self, due: bool) -> None:
        """Raise what is known to be wrong with the samples of this step."""
        if due and self.rows.came_without():
            raise RuntimeError(
                "no samples were captured for this step, although .grad was filled: "
                "the model was not called as model(...), and calls of model.forward, "
                "of another method or of its parts are not seen. Call the model "
                "itself, put the step into `with grad_filter.watch(inputs):`, or use "
                'samples="microbatch"'
            )
        self._capture.questions.answer()

    def discard(self) -> None:
        """Forget what was captured since the last ``take()``."""
        self.rows.discard()

    def detach(self) -> None:
        """Leave the capture; graphs already built still hold what they captured."""
        self._capture.unsubscribe(self.rows)
        self.discard()
