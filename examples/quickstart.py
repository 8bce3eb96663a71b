"""One added line, `dome.attach`: digits, with gradients compressed 200 times."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import dome

x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
x = x.float() / 16
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
sketch = dome.compression.GaussianSketch(rate=200)
grad_filter = dome.attach(model, optimizer, rank=50, after=sketch)

for epoch in range(10):
    for batch in torch.randperm(1500).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    correct = model(x[1500:]).argmax(dim=1) == y[1500:]
    removed = 1 - grad_filter.stats.kept_norm
    print(f"{epoch=} accuracy={correct.float().mean():.3f} {removed=:.0%}")
