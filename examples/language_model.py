"""A GPT-2-shaped language model with directions of low rank and checkpointing.

    python examples/language_model.py                      # a small one, in a minute
    python examples/language_model.py --width 768 --layers 12 --heads 12    # GPT-2's

Learns the next word of DBPedia's texts: from the folder in DOME_DATA, else the Hub,
else made ones. Directions are products of two thin matrices in every weight, so that
neither rows of samples nor a basis are formed; activations are computed again in
backward(). Steps go to language_model/steps.jsonl, beside a page that shows them.
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
parser.add_argument("--rank", type=int, default=8, help="directions; 0: no filter")
parser.add_argument("--direction-rank", type=int, default=4)
parser.add_argument("--no-checkpointing", action="store_true")
parser.add_argument("--out", type=Path, default=Path("language_model"))
options = parser.parse_args()

try:
    texts = load_task("dbpedia", num_train=4000, num_test=256)
except (OSError, ValueError, RuntimeError, ImportError) as error:
    print(f"made texts, because DBPedia cannot be loaded: {str(error)[:80]}")
    texts = load_task("made_text")

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
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
num_parameters = sum(p.numel() for p in model.parameters())
grad_filter = dome.attach(
    model,
    optimizer,
    rank=max(options.rank, 1),
    direction_rank=options.direction_rank,
    strength=1.0 if options.rank else 0.0,
    warmup=10,
)
stored = grad_filter.trackers["all"].num_stored
print(
    f"{num_parameters:,} parameters, {stored / num_parameters:.3f} of it in directions"
)


def loss_of(words):
    scores = model(words, attention_mask=(words != PADDING).long()).logits[:, :-1]
    return cross_entropy(
        scores.flatten(0, 1), words[:, 1:].flatten(), ignore_index=PADDING
    )


options.out.mkdir(parents=True, exist_ok=True)
rows = options.out / "steps.jsonl"
rows.unlink(missing_ok=True)
order = torch.Generator().manual_seed(0)
model.train()
with dome.Recorder(rows) as recorder:
    for _ in track(range(options.steps), description="training"):
        chosen = torch.randint(
            len(texts.train_x), (options.batch_size,), generator=order
        )
        loss = loss_of(texts.train_x[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.record(grad_filter, loss=loss)

model.eval()
with torch.no_grad():
    test = loss_of(texts.test_x[:128])
print(f"loss of the next word {loss:.2f}, on test texts {test:.2f}")
print(f"of the gradient's norm, {grad_filter.stats.kept_norm:.3f} is kept")
report = [sys.executable, "-m", "dome_lab", "report", str(rows)]
subprocess.run(report, check=True)
