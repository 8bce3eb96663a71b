"""BatchNorm mixes the samples of a batch; micro-batches are samples all the same.

Each step adds up the gradients of eight micro-batches, and the filter takes what each
`backward()` brought as one sample. Any model works, a compiled one too.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import dome

MICRO_BATCHES = 8

x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
x = x.float().view(-1, 1, 8, 8) / 16


def train(filtered):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    if filtered:
        grad_filter = dome.attach(model, optimizer, rank=20, samples="microbatch")
    for epoch in range(4):
        model.train()
        for batch in torch.randperm(1500).split(128):
            optimizer.zero_grad()
            for part in batch.chunk(MICRO_BATCHES):
                loss = nn.functional.cross_entropy(model(x[part]), y[part])
                (loss / MICRO_BATCHES).backward()
            optimizer.step()
        model.eval()
        correct = model(x[1500:]).argmax(dim=1) == y[1500:]
        print(f"{filtered=} {epoch=} accuracy={correct.float().mean():.3f}")
    if filtered:
        print(grad_filter.stats)


train(filtered=False)
train(filtered=True)
