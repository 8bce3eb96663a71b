"""A larger model: one small basis a layer, samples on every fourth step only.

A global basis holds rank numbers for every parameter. Layer by layer, a few directions
each do, large layers may be left alone, and the basis may be stored in bfloat16.
"""

import torch
from torch import nn

import dome

WORDS, LENGTH, WIDTH = 200, 16, 128


class Tagger(nn.Module):
    """Says for each word whether it stood in the sentence before."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, words):
        return self.head(self.encoder(self.embedding(words)))


def repeated(words):
    before = words[:, :, None] == words[:, None, :]
    return before.tril(-1).any(dim=2).long()


def train(filtered):
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ranks = {
        name: 8
        for name, module in model.named_modules()
        if name != "embedding" and any(True for _ in module.parameters(recurse=False))
    }
    if filtered:
        grad_filter = dome.attach(
            model, optimizer, rank=ranks, layout="layerwise",
            update_every=4, basis_dtype=torch.bfloat16,
        )  # fmt: skip
    for step in range(40):
        words = torch.randint(WORDS // 10, (16, LENGTH))
        optimizer.zero_grad()
        scores = model(words).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, repeated(words).flatten())
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"{filtered=} {step=} loss={loss.item():.3f}")
    if filtered:
        numbers = sum(t.basis.numel() for t in grad_filter.trackers.values())
        print(f"{len(grad_filter.trackers)} bases, {numbers:,} numbers")
        print(grad_filter.stats)


print(dome.plan(Tagger(), rank=8, batch_size=16))
train(filtered=False)
train(filtered=True)
