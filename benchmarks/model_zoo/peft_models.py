"""Adapters of PEFT on a small Llama, and on a small convolutional model."""

from collections.abc import Callable

import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from model_zoo.case import Case, Value
from model_zoo.transformers_models import KEY_VALUE, SMALL, words

LAYERS = ["q_proj", "v_proj"]


def adapted(kind: str, **options: Value) -> Callable[[], Case]:
    """A Llama with an adapter whose parameters are all different from zero."""

    def make() -> Case:
        settings = LlamaConfig(**SMALL, **KEY_VALUE)
        settings.use_cache = False
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        model = peft.get_peft_model(LlamaForCausalLM(settings).double(), config)
        return Case(_awakened(model), words())

    return make


def convolutional(kind: str, **options: Value) -> Callable[[], Case]:
    """The same of convolutions."""

    def make() -> Case:
        class Images(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.first(x).relu().mean((2, 3)))

        config = getattr(peft, kind)(target_modules=["first"], **options)
        model = peft.get_peft_model(Images().double(), config)
        return Case(_awakened(model), {"x": torch.randn(3, 3, 6, 6)})

    return make


def _awakened(model: nn.Module) -> nn.Module:
    """Adapters start as zero maps, of which half of the gradients are zero."""
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.02 * torch.randn_like(p))
    return model


PEFT: dict[str, Callable[[], Case]] = {
    "LoRA": adapted("LoraConfig", r=2, target_modules=LAYERS),
    "DoRA": adapted("LoraConfig", r=2, target_modules=LAYERS, use_dora=True),
    "rsLoRA": adapted("LoraConfig", r=2, target_modules=LAYERS, use_rslora=True),
    "LoRA of an embedding": adapted("LoraConfig", r=2, target_modules=["embed_tokens"]),
    "LoRA of a convolution": convolutional("LoraConfig", r=2),
    "AdaLoRA": adapted(
        "AdaLoraConfig", init_r=2, target_r=2, total_step=10, target_modules=LAYERS
    ),
    "LoHa": adapted("LoHaConfig", r=2, target_modules=LAYERS),
    "LoKr": adapted("LoKrConfig", r=2, target_modules=LAYERS),
    "IA3": adapted(
        "IA3Config",
        target_modules=[*LAYERS, "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    "OFT": adapted("OFTConfig", oft_block_size=4, target_modules=LAYERS),
    "BOFT": adapted("BOFTConfig", boft_block_size=4, target_modules=LAYERS),
    "BOFT of a convolution": convolutional("BOFTConfig", boft_block_size=1),
    "VeRA": adapted("VeraConfig", r=2, target_modules=["q_proj"]),
    "VB-LoRA": adapted(
        "VBLoRAConfig",
        r=2,
        num_vectors=4,
        vector_length=8,
        topk=2,
        target_modules=["q_proj"],
    ),
    "FourierFT": adapted("FourierFTConfig", n_frequency=8, target_modules=LAYERS),
    "HRA": adapted("HRAConfig", r=2, target_modules=LAYERS),
    "LN tuning": adapted("LNTuningConfig", target_modules=["input_layernorm"]),
    "MiSS": adapted("MissConfig", r=4, target_modules=LAYERS),
    "RandLoRA": adapted("RandLoraConfig", r=2, target_modules=["q_proj"]),
    "C3A": adapted("C3AConfig", block_size=8, target_modules=["q_proj"]),
    "SHiRA": adapted("ShiraConfig", r=2, target_modules=LAYERS),
    "prompt tuning": adapted("PromptTuningConfig", num_virtual_tokens=2),
    "prefix tuning": adapted("PrefixTuningConfig", num_virtual_tokens=2),
    "P-tuning": adapted(
        "PromptEncoderConfig", num_virtual_tokens=2, encoder_hidden_size=8
    ),
    "LLaMA-Adapter": adapted("AdaptionPromptConfig", adapter_len=2, adapter_layers=1),
    "trainable tokens": adapted(
        "TrainableTokensConfig", token_indices=list(range(3, 30))
    ),
}
