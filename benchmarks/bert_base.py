"""A BERT-base or a GPT-2, made from its configuration, in the Transformers Trainer.

Tests use small configurations. This is the real size, 109 and 124 million parameters,
with padding masks and tied embeddings: what a step takes and what memory it needs,
beside the same Trainer without the callback and beside what ``dome.plan`` predicts.

    python benchmarks/bert_base.py
    python benchmarks/bert_base.py --rank 16 --batch-size 8
    python benchmarks/bert_base.py --rank 16 --direction-rank 4 --model gpt2
"""

import argparse
import resource
import tempfile
import time
from multiprocessing import get_context
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import dome
from dome.integrations.transformers import DomeTrainerCallback
from dome.planning.units import size

LENGTH, STEPS = 64, 6


class Clock(TrainerCallback):  # type: ignore[misc] # is not type-checked
    """Seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.work: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Start."""
        self._start = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Stop."""
        self.seconds.append(time.perf_counter() - self._start[0])
        self.work.append(time.process_time() - self._start[1])


def sentences(num: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Random words, of different lengths, padded; every word is to be predicted."""
    rng = torch.Generator().manual_seed(0)
    words = torch.randint(1, vocabulary, (num, LENGTH), generator=rng)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (num,), generator=rng)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    labels = words.masked_fill(mask == 0, -100)
    columns = {"input_ids": words * mask, "attention_mask": mask, "labels": labels}
    return [{name: c[i] for name, c in columns.items()} for i in range(num)]


MODELS = {
    "bert": lambda: BertForMaskedLM(BertConfig()),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config()),
}


def train(
    name: str, rank: int, batch_size: int, direction_rank: int | None
) -> dict[str, Any]:
    """Train some steps, with the filter if there is a rank."""
    torch.manual_seed(0)
    model = MODELS[name]()
    clock = Clock()
    callback = DomeTrainerCallback(rank, direction_rank=direction_rank)
    callbacks = [clock, *([callback] if rank else [])]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=batch_size,
                learning_rate=1e-4,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                logging_steps=1,
            ),
            train_dataset=sentences(STEPS * batch_size, model.config.vocab_size),
            callbacks=callbacks,
        )
        trainer.train()
    choices = ()
    if rank:
        choices = dome.plan(model, rank, batch_size, positions=LENGTH).choices
    alike = [c.memory for c in choices if c.direction_rank == direction_rank]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": sorted(clock.seconds)[len(clock.seconds) // 2],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": [float(loss) for loss in losses],
        "work": sorted(clock.work)[len(clock.work) // 2],
        "predicted": alike[0] if alike else None,
    }


def main() -> None:
    """Each case in a process of its own, so that its memory is its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--direction-rank", type=int)
    parser.add_argument("--model", choices=tuple(MODELS), default="bert")
    options = parser.parse_args()
    found = {}
    for name, rank in (("plain", 0), ("filtered", options.rank)):
        with get_context("spawn").Pool(1) as pool:
            chosen = options.model, rank, options.batch_size, options.direction_rank
            found[name] = pool.apply(train, chosen)
        one = found[name]
        print(
            f"{name:9} {one['parameters']:,} parameters, {one['seconds']:.2f} s a step "
            f"({one['work']:.2f} s of work), {size(one['peak'])}, "
            f"losses {one['losses']}",
            flush=True,
        )
    extra = found["filtered"]["peak"] - found["plain"]["peak"]
    predicted = found["filtered"]["predicted"]
    print(f"extra {size(extra)}, predicted {size(predicted)}")


if __name__ == "__main__":
    main()
