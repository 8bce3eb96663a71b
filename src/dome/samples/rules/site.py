"""One place of a forward pass where samples meet a weight and, maybe, a bias."""

from dataclasses import dataclass

from torch import Tensor

from dome.samples.store.sink import Sink
from dome.samples.tracing.origins import Place


@dataclass(frozen=True, slots=True)
class Site:
    """What the backward of a rule needs to know besides tensors.

    Attributes:
        axis: Where the operation's input and result hold the samples.
        weight: Takes the weight's per-sample gradients; None if it is not tracked.
        bias: The same for the bias.
        transposed: The weight is (in, out), not (out, in).
    """

    axis: Place
    weight: Sink | None
    bias: Sink | None
    transposed: bool = False

    def wants_weight(self) -> bool:
        """Whether this backward pass asks for the weight's gradient."""
        return self.weight is None or self.weight.wanted()

    def wants_bias(self) -> bool:
        """Whether this backward pass asks for the bias's gradient."""
        return self.bias is None or self.bias.wanted()

    def weight_total(self, grads: Tensor) -> Tensor:
        """Store per-sample weight gradients (B, *weight), return their sum."""
        return _total(self.weight, grads)

    def bias_total(self, grads: Tensor) -> Tensor:
        """Store per-sample bias gradients (B, *bias), return their sum."""
        return _total(self.bias, grads)


def _total(sink: Sink | None, grads: Tensor) -> Tensor:
    if sink is not None:
        sink.put(grads)
    return grads.sum(0)
