"""LBFGS and other optimizers with a closure: the filter runs after each call of it."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import dome

x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
x = x.float() / 16


def train(filtered):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    if filtered:
        grad_filter = dome.attach(model, optimizer, rank=10, strength=0.5)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[:1500]), y[:1500])
        loss.backward()
        return loss

    for step in range(8):
        loss = optimizer.step(closure).item()
        correct = model(x[1500:]).argmax(dim=1) == y[1500:]
        print(f"{filtered=} {step=} {loss=:.3f} accuracy={correct.float().mean():.3f}")
    if filtered:
        print(f"{grad_filter.stats.step} calls of the closure were filtered")


train(filtered=False)
train(filtered=True)
