"""One added callback, `DomeTrainerCallback`: a small BERT, made here, learns a rule.

A sentence is of class 1 if the word 7 is in it. Nothing is downloaded.
"""

import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from dome.integrations.transformers import DomeTrainerCallback

VOCABULARY, LENGTH, WORD = 30, 12, 7


def sentences(num, seed):
    rng = torch.Generator().manual_seed(seed)
    words = torch.randint(1, VOCABULARY, (num, LENGTH), generator=rng)
    lengths = torch.randint(4, LENGTH + 1, (num,), generator=rng)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    words *= mask
    labels = (words == WORD).any(dim=1).long()
    columns = {"input_ids": words, "attention_mask": mask, "labels": labels}
    return [{name: c[i] for name, c in columns.items()} for i in range(num)]


def train(folder, callbacks):
    """Accuracy on new sentences."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            num_train_epochs=3,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            optim="adamw_torch",
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=sentences(600, seed=1),
        eval_dataset=sentences(200, seed=2),
        compute_metrics=lambda p: {
            "accuracy": float((p.predictions.argmax(axis=1) == p.label_ids).mean())
        },
        callbacks=callbacks,
    )
    trainer.train()
    return trainer.evaluate()["eval_accuracy"]


callback = DomeTrainerCallback(rank=4, warmup=10)
with tempfile.TemporaryDirectory() as folder:
    plain, filtered = (train(folder, callbacks) for callbacks in ([], [callback]))
print(f"accuracy without the filter {plain:.3f}, with it {filtered:.3f}")
print(callback.filter.stats)
