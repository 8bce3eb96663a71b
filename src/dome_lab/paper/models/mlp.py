"""A network of linear layers alone, small enough for its Hessian to be affordable.

Song et al. (2024), "Does SGD really happen in tiny subspaces?", show most of their
results on such a network.
"""

from torch import nn

WIDTH = 32


def mlp(num_inputs: int = 784, num_classes: int = 10) -> nn.Sequential:
    """Two hidden layers of tanh units, for inputs (B, ...) of ``num_inputs`` numbers.

    26,506 parameters at 784 inputs and ten classes.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_inputs, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, num_classes),
    )
