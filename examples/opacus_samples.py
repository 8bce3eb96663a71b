"""A model that Opacus hooks already: its per-sample gradients are taken as they are."""

import warnings

import torch
from opacus.grad_sample import GradSampleModule
from sklearn.datasets import load_digits
from torch import nn

import dome

warnings.filterwarnings("ignore", message="Full backward hook")  # torch about Opacus

x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
x = x.float() / 16


def train(filtered):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = GradSampleModule(net)  # or what PrivacyEngine made of your model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if filtered:
        grad_filter = dome.attach(model, optimizer, rank=30)
    for epoch in range(5):
        for batch in torch.randperm(1500).split(64):
            model.zero_grad()  # what Opacus keeps of samples, too
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        with torch.no_grad():  # else Opacus waits for a backward pass that never comes
            correct = net(x[1500:]).argmax(dim=1) == y[1500:]
        print(f"{filtered=} {epoch=} accuracy={correct.float().mean():.3f}")
    if filtered:
        print(grad_filter.stats)


train(filtered=False)
train(filtered=True)
