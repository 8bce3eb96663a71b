"""ResNet-8 with group normalisation, the small residual network of the experiments.

The network of Song et al. (2024), "Does SGD really happen in tiny subspaces?": a stem,
three stages of one basic block each (16, 32, 64 channels) and a linear head. Group
normalisation treats samples independently, which per-sample gradients need.
"""

from torch import Tensor, nn

NUM_GROUPS = 8
WIDTHS = (16, 32, 64)


def resnet8(in_channels: int = 3, num_classes: int = 10) -> nn.Sequential:
    """The network, for images (B, in_channels, height, width) of eight pixels or more.

    Convolutions have no bias. 78,042 parameters at three channels and ten classes.
    """
    first, second, third = WIDTHS
    return nn.Sequential(
        _convolution(in_channels, first, kernel_size=3),
        nn.ReLU(inplace=True),
        BasicBlock(first, first, stride=1),
        BasicBlock(first, second, stride=2),
        BasicBlock(second, third, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(third, num_classes),
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut: relu(body(x) + shortcut(x)).

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        stride: Of the first convolution; 2 halves height and width.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(in_channels, out_channels, kernel_size=3, stride=stride),
            nn.ReLU(inplace=True),
            _convolution(out_channels, out_channels, kernel_size=3),
        )
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut: nn.Module = (
            nn.Identity()
            if same_shape
            else _convolution(in_channels, out_channels, kernel_size=1, stride=stride)
        )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, shape (B, out_channels, height/stride, width/stride)."""
        return self.activation(self.body(x) + self.shortcut(x))


def _convolution(
    in_channels: int, out_channels: int, *, kernel_size: int, stride: int = 1
) -> nn.Sequential:
    """A convolution that keeps the size (up to the stride), then group norm."""
    return nn.Sequential(
        nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=kernel_size // 2,
            bias=False,
        ),
        nn.GroupNorm(NUM_GROUPS, out_channels),
    )
