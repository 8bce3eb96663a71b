"""The small convolutional network of private training on MNIST.

Papernot et al. (2021), "Tempered sigmoid activations for deep learning with
differential privacy": two convolutions with tanh, a hidden layer of 32. Noise grows
with the number of parameters, so private training takes networks with few.
"""

import torch
from torch import nn


def tanh_cnn(
    in_channels: int = 1, num_classes: int = 10, side: int = 28
) -> nn.Sequential:
    """The network, for square images of 16 pixels or more.

    26,010 parameters for MNIST.
    """
    body = nn.Sequential(
        nn.Conv2d(in_channels, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    with torch.no_grad():
        width = body(torch.zeros(1, in_channels, side, side)).shape[1]
    return nn.Sequential(
        *body, nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, num_classes)
    )
