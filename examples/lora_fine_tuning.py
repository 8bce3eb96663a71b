"""Fine-tuning with LoRA through PEFT: the adapters alone are filtered.

A small GPT-2, made here, stands for a model that you would download. It first learns to
count up; then adapters of a few hundred parameters teach it to count down.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import dome

DIGITS, LENGTH, BATCH = 10, 8, 32


def counting(step, num=BATCH):
    first = torch.randint(DIGITS, (num, 1))
    return (first + step * torch.arange(LENGTH)) % DIGITS


def train(model, step, num_steps, rank=None):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    grad_filter = dome.attach(model, optimizer, rank) if rank else None
    for _ in range(num_steps):
        x = counting(step)
        optimizer.zero_grad()
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
    arm = f"rank {rank}" if rank else "no filter"
    print(f"{sum(p.numel() for p in trained):6} trained, {arm}, loss {loss.item():.3f}")
    return grad_filter


config = GPT2Config(
    vocab_size=DIGITS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
for rank in (None, 4):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    train(model, step=1, num_steps=60)
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = get_peft_model(model, lora)
    grad_filter = train(adapted, step=-1, num_steps=120, rank=rank)

names = [n for n in grad_filter.state_dict() if n.startswith("parameters.")]
print(f"filtered: {len(names)} parameters, all of adapters:",
      all("lora" in name for name in names))  # fmt: skip
print(grad_filter.stats)
