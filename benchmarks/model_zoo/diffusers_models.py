"""Denoisers and autoencoders of Diffusers, from small random configurations."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch

from model_zoo.case import Case, Value

B = 3


def made(
    name: str,
    inputs: Callable[[], dict[str, Any]],
    **config: Value,
) -> Callable[[], Case]:
    """A case of a model class by its name."""
    return lambda: Case(getattr(diffusers, name)(**config), inputs())


def noisy(
    channels: int = 3, size: int = 8, **extra: Callable[[], Any]
) -> Callable[[], dict[str, Any]]:
    """Noisy pictures, the time of each, and what else the model takes."""

    def inputs() -> dict[str, Any]:
        given = {
            "sample": torch.randn(B, channels, size, size),
            "timestep": torch.tensor([3, 50, 700]),
        }
        return given | {name: make() for name, make in extra.items()}

    return inputs


def tokens(
    channels: int = 4, size: int = 8, **extra: Callable[[], Any]
) -> Callable[[], dict[str, Any]]:
    """The same for transformers, which call the pictures hidden states."""

    def inputs() -> dict[str, Any]:
        given = noisy(channels, size)()
        given["hidden_states"] = given.pop("sample")
        return given | {name: make() for name, make in extra.items()}

    return inputs


def text(width: int = 16) -> Callable[[], torch.Tensor]:
    """Embedded words."""
    return lambda: torch.randn(B, 5, width)


BLOCKS = {
    "sample_size": 8,
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
DOWN_UP = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 8,
}
CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
}
CODER = {
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "block_out_channels": (8, 8),
    "norm_num_groups": 4,
    "latent_channels": 2,
}
DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 1,
    "sample_size": 8,
}


def pictures() -> dict[str, Any]:
    """Pictures to encode and decode."""
    return {"sample": torch.randn(B, 3, 8, 8)}


DIFFUSERS: dict[str, Callable[[], Case]] = {
    "UNet2D": made("UNet2DModel", noisy(), **BLOCKS, **DOWN_UP),
    "UNet2DCondition": made(
        "UNet2DConditionModel", noisy(encoder_hidden_states=text()), **BLOCKS, **CROSS
    ),
    "UNet1D": made(
        "UNet1DModel",
        lambda: {
            "sample": torch.randn(B, 14, 16),
            "timestep": torch.tensor([3, 50, 700]),
        },
        block_out_channels=(8, 8, 16),
        in_channels=14,
        out_channels=14,
        time_embedding_type="positional",
        use_timestep_embedding=True,
        flip_sin_to_cos=False,
        freq_shift=1.0,
        out_block_type="OutConv1DBlock",
        mid_block_type="MidResTemporalBlock1D",
        down_block_types=("DownResnetBlock1D",) * 3,
        up_block_types=("UpResnetBlock1D",) * 2,
        act_fn="swish",
    ),
    "ControlNet": made(
        "ControlNetModel",
        noisy(
            encoder_hidden_states=text(),
            controlnet_cond=lambda: torch.randn(B, 3, 64, 64),
        ),
        in_channels=3,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=CROSS["down_block_types"],
        attention_head_dim=8,
        cross_attention_dim=16,
    ),
    "AutoencoderKL": made("AutoencoderKL", pictures, **CODER),
    "VQModel": made("VQModel", pictures, **CODER, num_vq_embeddings=8),
    "DiT": made(
        "DiTTransformer2DModel",
        tokens(class_labels=lambda: torch.tensor([1, 0, 3])),
        **DIT,
        in_channels=4,
        num_embeds_ada_norm=1000,
        norm_num_groups=4,
    ),
    "PixArt": made(
        "PixArtTransformer2DModel",
        tokens(
            encoder_hidden_states=text(),
            added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None},
        ),
        **DIT,
        in_channels=4,
        cross_attention_dim=16,
        caption_channels=16,
        num_embeds_ada_norm=1000,
        norm_num_groups=4,
        use_additional_conditions=False,
    ),
    "SD3": made(
        "SD3Transformer2DModel",
        tokens(
            encoder_hidden_states=text(), pooled_projections=lambda: torch.randn(B, 16)
        ),
        **DIT,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    ),
    "Flux": made(
        "FluxTransformer2DModel",
        lambda: {
            "hidden_states": torch.randn(B, 16, 4),
            "encoder_hidden_states": torch.randn(B, 5, 16),
            "pooled_projections": torch.randn(B, 16),
            "timestep": torch.tensor([0.003, 0.05, 0.7]),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(5, 3),
        },
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
    ),
    "AuraFlow": made(
        "AuraFlowTransformer2DModel",
        tokens(encoder_hidden_states=text()),
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pos_embed_max_size=16,
    ),
    "Sana": made(
        "SanaTransformer2DModel",
        tokens(encoder_hidden_states=text()),
        sample_size=8,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
    ),
    "Lumina": made(
        "Lumina2Transformer2DModel",
        tokens(
            encoder_hidden_states=text(),
            encoder_attention_mask=lambda: torch.ones(B, 5, dtype=torch.bool),
        ),
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=16,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(2, 2, 4),
        axes_lens=(16, 16, 16),
        cap_feat_dim=16,
    ),
}
