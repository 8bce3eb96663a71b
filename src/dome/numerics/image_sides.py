"""The sides of a convolution's samples: the places of an image.

Shapes as in ``sides``: vectors x[b, t] of B samples with T positions each, side by side
X; c columns. A convolution's patches are never written down: X M is a convolution, Xᵀ C
the gradient of its kernels.
"""

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor


@dataclass(slots=True, eq=False)
class Maps:
    """The channels of an image, position by position.

    Attributes:
        x: Shape (B, size, ...).
    """

    x: Tensor

    @property
    def num_samples(self) -> int:
        """B."""
        return self.x.shape[0]

    @property
    def num_positions(self) -> int:
        """T."""
        return prod(self.x.shape[2:])

    @property
    def size(self) -> int:
        """Number of channels."""
        return self.x.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The image."""
        return (self.x,)

    def times(self, M: Tensor) -> Tensor:
        """X M, shape (B, T, c), channels first in memory."""
        return (M.T @ self.x.flatten(2).to(M.dtype)).mT

    def transposed_times(self, C: Tensor) -> Tensor:
        """Xᵀ C, shape (size, c)."""
        return (self.x.flatten(2).to(C.dtype) @ C).sum(0)

    def squares(self) -> Tensor:
        """‖x[b, t]‖², shape (B, T)."""
        return self.x.square().sum(1).flatten(1)

    def written_out(self) -> Tensor:
        """X itself, shape (B, T, size)."""
        return self.x.flatten(2).mT


@dataclass(slots=True, eq=False)
class Patches:
    """What a convolution's kernel sees of an image, position by position.

    M then is c kernels: X M is a convolution with them, and Xᵀ C is the gradient of
    their weights.

    Attributes:
        x: Shape (B, channels, ...).
        kernel: Its size in space.
        stride: Steps between positions.
        padding: Zeros around the image.
        dilation: Steps between the kernel's points.
    """

    x: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        """B."""
        return self.x.shape[0]

    @property
    def places(self) -> tuple[int, ...]:
        """Positions along each dimension of space."""
        sizes = zip(
            self.x.shape[2:],
            self.kernel,
            self.stride,
            self.padding,
            self.dilation,
            strict=True,
        )
        return tuple(
            (x + 2 * pad - gap * (k - 1) - 1) // step + 1
            for x, k, step, pad, gap in sizes
        )

    @property
    def num_positions(self) -> int:
        """T."""
        return prod(self.places)

    @property
    def size(self) -> int:
        """Channels times the points of the kernel."""
        return self.x.shape[1] * prod(self.kernel)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The image."""
        return (self.x,)

    def times(self, M: Tensor) -> Tensor:
        """X M, shape (B, T, c), channels first in memory."""
        kernels = M.T.reshape(-1, self.x.shape[1], *self.kernel)
        return self._convolved(self.x.to(M.dtype), kernels)

    def transposed_times(self, C: Tensor) -> Tensor:
        """Xᵀ C, shape (size, c)."""
        maps = C.mT.unflatten(2, self.places).contiguous()
        x = self.x.to(C.dtype)
        zeros = (0,) * len(self.kernel)
        shape = (maps.shape[1], x.shape[1], *self.kernel)
        weight = x.new_empty(shape)  # only its shape is read
        mask = [False, True, False]
        geometry = (self.stride, self.padding, self.dilation, False, zeros, 1)
        _, grad, _ = torch.ops.aten.convolution_backward(
            maps, x, weight, None, *geometry, mask
        )
        return grad.flatten(1).T

    def squares(self) -> Tensor:
        """‖x[b, t]‖², shape (B, T)."""
        ones = self.x.new_ones(1, 1, *self.kernel)
        return self._convolved(self.x.square().sum(1, keepdim=True), ones)[:, :, 0]

    def written_out(self) -> Tensor:
        """X itself, shape (B, T, size), positions last in memory."""
        around = [p for pad in reversed(self.padding) for p in (pad, pad)]
        x = F.pad(self.x, around)
        steps = x.stride()[2:]
        # A window for each position, of which all but the ends overlap.
        windows = x.as_strided(
            (*x.shape[:2], *self.kernel, *self.places),
            (
                *x.stride()[:2],
                *(s * gap for s, gap in zip(steps, self.dilation, strict=True)),
                *(s * step for s, step in zip(steps, self.stride, strict=True)),
            ),
        )
        return windows.reshape(len(x), self.size, -1).mT

    def _convolved(self, x: Tensor, kernels: Tensor) -> Tensor:
        convolution = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
        maps = convolution(x, kernels, None, self.stride, self.padding, self.dilation)
        return maps.flatten(2).mT
