"""Vision-language models of Transformers, with one and with two images a sample.

Every image is four words long in the text.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from model_zoo.case import Case, Value

BATCH = 4  # of three, the colours of an image might be the samples
IMAGE, PATCHES, SIDE, WORDS = 60, 16, 16, 64
Config = dict[str, Any]


def text(kind: str, **more: Value) -> Config:
    """The configuration of a language model."""
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    layers = {"num_hidden_layers": 2, "max_position_embeddings": 128}
    return {"model_type": kind} | sizes | heads | ids | layers | more


def vision(kind: str, **more: Value) -> Config:
    """The configuration of an image encoder, of 16 patches."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    image = {"num_attention_heads": 2, "image_size": SIDE, "patch_size": 4}
    return {"model_type": kind} | sizes | image | more


ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
MARKS = {"video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
BLOCKS = {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
CONFIGS: dict[str, Config] = {
    "Llava": {
        "vision_config": vision("clip_vision_model", patch_size=8),
        "text_config": text("llama"),
        "image_token_index": IMAGE,
        "image_seq_length": 4,
    },
    "Gemma3": {
        "vision_config": vision("siglip_vision_model"),
        "text_config": text(
            "gemma3_text",
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": 61,
        "eoi_token_index": 62,
    },
    "Qwen2VL": {
        "vision_config": BLOCKS | {"embed_dim": 16, "mlp_ratio": 2},
        "text_config": text("qwen2_vl_text", rope_parameters=ROPE),
        "image_token_id": IMAGE,
    }
    | MARKS,
    "Qwen2_5_VL": {
        "vision_config": BLOCKS
        | {"out_hidden_size": 16, "intermediate_size": 24}
        | {"window_size": 8, "fullatt_block_indexes": [1]},
        "text_config": text("qwen2_5_vl_text", rope_parameters=ROPE),
        "image_token_id": IMAGE,
    }
    | MARKS,
    "PaliGemma": {
        "vision_config": vision(
            "siglip_vision_model",
            patch_size=8,
            projection_dim=16,
            vision_use_head=False,
        ),
        "text_config": text("gemma", num_image_tokens=4),
        "image_token_index": IMAGE,
        "vocab_size": WORDS,
        "projection_dim": 16,
        "hidden_size": 16,
    },
    "InternVL": {
        "vision_config": vision("internvl_vision"),
        "text_config": text("qwen2"),
        "image_token_id": IMAGE,
        "image_seq_length": 4,
    },
    "Idefics3": {
        "vision_config": vision("idefics3_vision"),
        "text_config": text("llama"),
        "image_token_id": IMAGE,
    },
    "SmolVLM": {
        "vision_config": vision("smolvlm_vision"),
        "text_config": text("llama"),
        "image_token_id": IMAGE,
    },
    "Mistral3": {
        "vision_config": vision("pixtral", head_dim=8),
        "text_config": text("mistral"),
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
    },
}


def inputs(name: str, images: int) -> dict[str, Any]:
    """Sentences with images in them, as the model's processor gives them."""
    words = torch.randint(3, 50, (BATCH, 6 + 5 * images))
    for image in range(images):
        words[:, 2 + 5 * image : 6 + 5 * image] = IMAGE
    found = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    total = BATCH * images
    if name.startswith("Qwen"):
        patches = torch.randn(total * PATCHES, 3 * 2 * 4 * 4)
        grid = torch.tensor([[1, 4, 4]]).repeat(total, 1)
        found |= {"pixel_values": patches, "image_grid_thw": grid}
        return found | {"mm_token_type_ids": (words == IMAGE).int()}
    if name in ("Idefics3", "SmolVLM"):
        return found | {"pixel_values": torch.randn(BATCH, images, 3, SIDE, SIDE)}
    if name == "Mistral3":
        found["image_sizes"] = torch.tensor([[SIDE, SIDE]]).repeat(total, 1)
    if name in ("Gemma3", "PaliGemma"):
        found["token_type_ids"] = (words == IMAGE).long()
    return found | {"pixel_values": torch.randn(total, 3, SIDE, SIDE)}


def split(given: dict[str, Any], b: int) -> dict[str, Any]:
    """The inputs of sample b, whose images are rows of their own."""
    rows = {name: len(value) // BATCH for name, value in given.items()}
    return {name: t[b * rows[name] : (b + 1) * rows[name]] for name, t in given.items()}


def make(name: str, images: int) -> Case:
    """A model and sentences with this many images each."""
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    given = inputs(name, images)
    # Images go to whichever sentence has a place for them.
    text = tuple(key for key in given if key.endswith(("_ids", "_mask")))
    return Case(model_class(config), given, split, batch=BATCH, samples_in=text)


MODELS: dict[str, Callable[[], Case]] = {
    f"{name}, {count}": partial(make, name, images)
    for name in CONFIGS
    for images, count in ((1, "one image"), (2, "two images"))
}
