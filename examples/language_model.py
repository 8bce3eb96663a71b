"""A GPT-2-shaped language model with directions of low rank and checkpointing.

    python examples/language_model.py                      # a small one, in a minute
    python examples/language_model.py --width 768 --layers 12 --heads 12    # GPT-2's

Learns the next word of DBPedia's texts: from the folder in DOME_DATA, else the Hub,
else made ones. Directions are products of two thin matrices in every weight, so that
neither rows of samples nor a basis are formed; activations are computed again in
backward(). Steps with and without the filter go to language_model/, next to a page that
compares them.
Needs dome-torch[lab] and transformers.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from rich.progress import track
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import dome
from dome_lab.paper.tasks import load_task
from dome_lab.paper.tasks.texts import LENGTH, PADDING

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--rank", type=int, default=8, help="directions")
parser.add_argument("--direction-rank", type=int, default=4)
parser.add_argument("--no-checkpointing", action="store_true")
parser.add_argument("--out", type=Path, default=Path("language_model"))
options = parser.parse_args()

try:
    texts = load_task("dbpedia", num_train=4000, num_test=256)
except (OSError, ValueError, RuntimeError, ImportError) as error:
    print(f"made texts, because DBPedia cannot be loaded: {str(error)[:80]}")
    texts = load_task("made_text")


def new_model():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=texts.vocabulary_size,
            n_positions=LENGTH,
            n_embd=options.width,
            n_layer=options.layers,
            n_head=options.heads,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )
    if not options.no_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def loss_of(model, words):
    scores = model(words, attention_mask=(words != PADDING).long()).logits[:, :-1]
    return cross_entropy(
        scores.flatten(0, 1), words[:, 1:].flatten(), ignore_index=PADDING
    )


def train(name, filtered):
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    grad_filter = None
    if filtered:
        grad_filter = dome.attach(
            model,
            optimizer,
            rank=options.rank,
            direction_rank=options.direction_rank,
            warmup=10,
        )
    rows = options.out / f"{name}.jsonl"
    rows.unlink(missing_ok=True)
    order = torch.Generator().manual_seed(0)
    model.train()
    with dome.Recorder(rows) as recorder:
        for _ in track(range(options.steps), description=name):
            chosen = torch.randint(
                len(texts.train_x), (options.batch_size,), generator=order
            )
            loss = loss_of(model, texts.train_x[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.record(grad_filter, loss=loss)
    model.eval()
    with torch.no_grad():
        test = loss_of(model, texts.test_x[:128])
    print(f"{name}: loss of the next word {loss:.2f}, on test texts {test:.2f}")
    return rows, model, grad_filter


options.out.mkdir(parents=True, exist_ok=True)
plain, *_ = train("plain", filtered=False)
filtered, model, grad_filter = train("filtered", filtered=True)
stored = grad_filter.trackers["all"].num_stored
num_parameters = sum(p.numel() for p in model.parameters())
print(
    f"{num_parameters:,} parameters, {stored / num_parameters:.3f} of it in directions"
)
print(f"of the gradient's norm, {grad_filter.stats.kept_norm:.3f} is kept")
report = [sys.executable, "-m", "dome_lab", "report", str(plain), str(filtered)]
subprocess.run(report, check=True)
