"""One of two workers: each trainer with its own data-parallel ways.

Started by as_torchrun.py, with FOLDER.
"""

import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from accelerate import Accelerator
from loops import digits_like, flat, sgd
from models import small_classifier
from test_lightning import CallsANet
from test_transformers import bert, trainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dome.integrations import accelerate
from dome.integrations.lightning import DomeCallback
from dome.integrations.transformers import DomeTrainerCallback


def mine():
    """This worker's half of every batch of twelve."""
    halves = [
        t.view(-1, 2, 6, *t.shape[1:])[:, dist.get_rank()].flatten(0, 1)
        for t in digits_like(48)
    ]
    return DataLoader(TensorDataset(*halves), batch_size=6)


class Rows(pl.LightningDataModule):
    def train_dataloader(self):
        return mine()


def fitted(epochs, checkpoint=None):
    module = CallsANet()
    own = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        precision="64-true",
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        max_epochs=epochs,
        callbacks=[DomeCallback(rank=4)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    own.fit(module, Rows(), ckpt_path=checkpoint)
    return own, module


def with_lightning(folder):
    own, module = fitted(epochs=2)
    own.save_checkpoint(folder / "lightning.ckpt")
    return flat(module)


def with_lightning_resumed(folder):
    own, _ = fitted(epochs=1)
    own.save_checkpoint(folder / "halfway.ckpt")
    _, module = fitted(epochs=2, checkpoint=folder / "halfway.ckpt")
    return flat(module)


def with_accelerate(folder):
    accelerator = Accelerator(cpu=True)
    model = small_classifier()
    model, optimizer = accelerator.prepare(model, sgd(model))
    accelerate.attach(model, optimizer, rank=4)
    for x, y in [*mine(), *mine()]:
        accelerator.backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def sentences_trainer(folder):
    callback, model = DomeTrainerCallback(rank=2), bert()
    # Else the Trainer multiplies its loss by the number of workers, taking it for one
    # that was divided by the labels of all of them.
    model.accepts_loss_kwargs = False
    own = trainer(folder, model, callback, per_device_train_batch_size=2)
    callback.trainer = own
    return own


def with_transformers(folder):
    own = sentences_trainer(folder / "hf")
    own.args.save_strategy, own.args.save_steps = "steps", 3
    own.train()
    return flat(own.model)


def with_transformers_resumed(folder):
    own = sentences_trainer(folder / "hf")
    own.train(resume_from_checkpoint=str(folder / "hf" / "checkpoint-3"))
    return flat(own.model)


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ways = (
        with_lightning,
        with_lightning_resumed,
        with_accelerate,
        with_transformers,
        with_transformers_resumed,
    )
    for way in ways:
        trained = way(folder)
        everyone = [torch.empty_like(trained) for _ in range(2)]
        dist.all_gather(everyone, trained)
        if dist.get_rank() == 0:
            torch.save(everyone, folder / f"{way.__name__}.pt")
    dist.barrier()  # the first worker has the store: it must not leave before others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
