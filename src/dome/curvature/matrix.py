"""What the curvature matrices have in common: parameters as a vector, data in batches.

Letters: D trainable parameters θ, N samples; frozen parameters and buffers stay as they
are. Reverse mode alone is used: it knows more layers than forward mode.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from dome.parameters import Layout
from dome.samples.batches import Batch, Batches, Data

LossFn = Callable[[Tensor, Tensor], Tensor]
Parameters = dict[str, Tensor]
LinearMap = Callable[[Parameters], Parameters]

BATCH_SIZE = 128


class Curvature(Protocol):
    """A symmetric D x D matrix that is known by its products with vectors."""

    @property
    def dim(self) -> int:
        """D, the number of trainable parameters."""

    @property
    def device(self) -> torch.device:
        """Where its products are computed."""

    def __matmul__(self, vector: Tensor) -> Tensor:
        """The product with a vector of shape (D,), shape (D,)."""


class Loss:
    """The mean loss of a model over a data set, as a function of its parameters.

    The model is used in the mode it is in: dropout would make every product another
    matrix's, so call ``model.eval()`` first. Batch norm must be in evaluation mode.

    Args:
        model: The network; its weights are read anew for every product.
        loss_fn: Maps a batch of predictions and targets to a scalar mean.
        data: Inputs and targets (x, y), or batches of them.
        batch_size: Samples that are computed at once, of (x, y).
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, data: Data, batch_size: int
    ) -> None:
        _check_mode(model)
        self.model, self.loss_fn = model, loss_fn
        self.layout = Layout(model)
        self.batches = Batches(data, batch_size)

    def parameters(self) -> Parameters:
        """θ as it is now, by name."""
        named = zip(self.layout.slots, self.layout.parameters, strict=True)
        return {slot.name: p.detach() for slot, p in named}

    def outputs(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Predictions for inputs x."""
        out = functional_call(self.model, parameters, (x,))
        if not isinstance(out, Tensor):
            raise ValueError(
                f"the model returns {type(out).__name__}, and curvature needs one "
                f"tensor: wrap the model so that it returns its predictions alone"
            )
        return out

    def of_batch(self, parameters: Parameters, batch: Batch) -> Tensor:
        """Mean loss of a batch, a scalar."""
        x, y = batch
        loss = self.loss_fn(self.outputs(parameters, x), y)
        if loss.dim() != 0:
            raise ValueError(
                f"loss_fn returned shape {tuple(loss.shape)}: it must be the mean over "
                f"the batch, a scalar"
            )
        return loss

    def walk(self) -> Iterator[tuple[Batch, float]]:
        """All batches where the parameters are, and their shares of the samples."""
        device = self.layout.device
        for x, y in self.batches:
            yield (x.to(device), y.to(device)), len(x) / self.batches.num_samples

    def split(self, vector: Tensor) -> Parameters:
        """A vector (D,) as tensors of the parameters' shapes and precision."""
        if vector.shape != (self.layout.dim,):
            raise ValueError(
                f"vector must have shape ({self.layout.dim},), one entry per trainable "
                f"parameter, got {tuple(vector.shape)}"
            )
        vector = vector.to(self.layout.device)
        named = zip(self.layout.slots, self.layout.parameters, strict=True)
        return {
            slot.name: vector[slot.start : slot.stop].view(slot.shape).to(p.dtype)
            for slot, p in named
        }

    def joined(self, parameters: Parameters) -> Tensor:
        """Tensors of the parameters' shapes as a vector (D,), float64."""
        parts = [parameters[slot.name].flatten() for slot in self.layout.slots]
        return torch.cat([part.double() for part in parts])


class OfLoss:
    """A matrix that is made from the samples of a loss.

    Args:
        model: The network; its weights are read anew for every product.
        loss_fn: Maps a batch of predictions and targets to a scalar mean.
        data: Inputs and targets (x, y), or batches that can be walked over again.
        batch_size: Samples that are computed at once, of (x, y).
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        data: Data,
        *,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        self.loss = Loss(model, loss_fn, data, batch_size)

    @property
    def dim(self) -> int:
        """D, the number of trainable parameters."""
        return self.loss.layout.dim

    @property
    def device(self) -> torch.device:
        """Where its products are computed."""
        return self.loss.layout.device


class MeanOverBatches(OfLoss, ABC):
    """A matrix that is a mean over samples, multiplied batch by batch.

    Args:
        model: The network; its weights are read anew for every product.
        loss_fn: Maps a batch of predictions and targets to a scalar mean.
        data: Inputs and targets (x, y), or batches that can be walked over again.
        batch_size: Samples that are computed at once, of (x, y).
        keep_graphs: Compute derivatives once and keep their graphs: saves time, takes
            the memory of a backward pass over all samples, and stays with the weights
            at which the first product was asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        data: Data,
        *,
        batch_size: int = BATCH_SIZE,
        keep_graphs: bool = False,
    ) -> None:
        super().__init__(model, loss_fn, data, batch_size=batch_size)
        self._keeps = keep_graphs
        self._kept: list[tuple[LinearMap, float]] | None = None

    @abstractmethod
    def _of_batch(self, theta: Parameters, batch: Batch) -> LinearMap:
        """The product v ↦ M v with the matrix of a batch, at given parameters."""

    def __matmul__(self, vector: Tensor) -> Tensor:
        """The product with a vector of shape (D,), in float64."""
        v = self.loss.split(vector)
        total = torch.zeros(self.dim, dtype=torch.float64, device=self.device)
        with differentiable_attention():
            for product, share in self._maps():
                total.add_(self.loss.joined(product(v)), alpha=share)
        return total

    def _maps(self) -> Iterator[tuple[LinearMap, float]]:
        if self._kept is not None:
            yield from self._kept
            return
        theta, made = self.loss.parameters(), []
        for batch, share in self.loss.walk():
            product = self._of_batch(theta, batch)
            if self._keeps:
                made.append((product, share))
            yield product, share
        if self._keeps:
            self._kept = made


def linearized(
    function: Callable[[Parameters], Tensor], theta: Parameters
) -> tuple[Tensor, Callable[[Parameters], Tensor], Callable[[Tensor], Parameters]]:
    """A function's value, and products with its Jacobian J: v ↦ J v and u ↦ Jᵀ u."""
    value, transposed = pulled(function, theta)
    # Jᵀ u is linear in u, so that its own derivative, anywhere, is J.
    _, forward = pulled(transposed, torch.zeros_like(value))
    return value, forward, transposed


def pulled(function: Callable[[Any], Any], at: Any) -> tuple[Any, Callable[[Any], Any]]:  # noqa: ANN401 (tensors or dictionaries)
    """A function's value at a point, and u ↦ Jᵀ u."""
    value, pull = vjp(function, at)[:2]
    return value, lambda u: pull(u)[0]


def differentiable_attention() -> AbstractContextManager[None]:
    """Fused attention kernels have no second derivatives: use the plain formula."""
    return sdpa_kernel(SDPBackend.MATH)


def _check_mode(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__} in training mode, "
                f"which changes with every pass: call model.eval() first"
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__} in training mode, "
                f"which draws another matrix for every product: call model.eval() first"
            )
