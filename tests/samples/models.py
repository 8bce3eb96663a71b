import copy

import torch
from torch import nn

B = 4


class Then(nn.Module):
    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.run(self, *inputs)


def vector(*shape):
    return nn.Parameter(torch.randn(shape))


def images(channels=3, size=(6, 5)):
    return [torch.randn(B, channels, *size)]


def words(*shape, high=7):
    return [torch.randint(high, shape or (B, 5))]


def sequence(*shape):
    return [torch.randn(*shape)]


def built(make):
    torch.manual_seed(0)
    model, inputs = make()
    return copy.deepcopy(model), model, inputs
