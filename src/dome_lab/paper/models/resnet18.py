"""ResNet-18 with group normalisation, for images of 64 x 64 pixels.

He et al. (2016), "Deep residual learning for image recognition", with a 3 x 3 stem, as
is usual for small images: eight basic blocks in four stages (64 to 512 channels). Group
normalisation treats samples independently, which per-sample gradients need.
"""

from torch import nn

from dome_lab.paper.models.resnet8 import NUM_GROUPS, BasicBlock

WIDTHS = (64, 128, 256, 512)


def resnet18(in_channels: int = 3, num_classes: int = 200) -> nn.Sequential:
    """The network, for images (B, in_channels, height, width) of 16 pixels or more.

    Convolutions have no bias. 11,271,432 parameters at three channels and 200 classes.
    """
    width = WIDTHS[0]
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
        nn.GroupNorm(NUM_GROUPS, width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    for stage, out_width in enumerate(WIDTHS):
        stride = 1 if stage == 0 else 2
        layers.append(BasicBlock(width, out_width, stride=stride))
        layers.append(BasicBlock(out_width, out_width, stride=1))
        width = out_width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)]
    return nn.Sequential(*layers)
