"""One added callback, `DomeCallback`: digits with Lightning, compressed 200 times."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dome.compression import GaussianSketch
from dome.integrations.lightning import DomeCallback


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        correct = self.net(x).argmax(dim=1) == y
        self.log("accuracy", correct.float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
data = TensorDataset(x.float() / 16, y)
train = DataLoader(torch.utils.data.Subset(data, range(1500)), 64, shuffle=True)
test = DataLoader(torch.utils.data.Subset(data, range(1500, 1797)), 297)


def fit(callbacks):
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=5,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), train, test)
    return float(trainer.callback_metrics["accuracy"])


sketch = GaussianSketch(rate=200)
# With strength=0.0 nothing is removed: gradients are compressed as they are.
plain = fit([DomeCallback(rank=50, strength=0.0, after=sketch)])
callback = DomeCallback(rank=50, after=sketch)
print(f"accuracy without the filter {plain:.3f}, with it {fit([callback]):.3f}")
print(callback.filter.stats)
