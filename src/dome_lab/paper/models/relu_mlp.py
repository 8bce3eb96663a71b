"""The fully connected network of continual learning on MNIST.

As in Kirkpatrick et al. (2017), "Overcoming catastrophic forgetting in neural
networks", with fewer and narrower layers.
"""

from torch import nn

WIDTH = 100


def relu_mlp(num_inputs: int = 784, num_classes: int = 10) -> nn.Sequential:
    """Two hidden layers of 100; 89,610 parameters for MNIST."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_inputs, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, num_classes),
    )
