"""Every causal model of Transformers' auto class, from its configuration made small.

A configuration keeps all it has as shipped (dropout, activations, tied weights) but the
sizes: those whose name stands in ``SIZES``, and of its layers one of each kind.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model_zoo.case import BATCH, Case, Value

Changes = dict[str, Any]
Config = Any  # each model has a class of its own for it

WORDS, LENGTH = 64, 6
SIZES = {
    name: size
    for size, names in {
        WORDS: "vocab_size vocab_size_per_layer_input decoder_vocab_size "
        "max_position_embeddings n_positions n_ctx max_source_positions context_length "
        "max_target_positions max_seq_len model_max_length max_sequence_length "
        "original_max_position_embeddings",
        16: "hidden_size d_model n_embd emb_dim embedding_size dim embed_dim lru_width "
        "attention_hidden_size input_embedding_size output_embedding_size "
        "word_embed_proj_dim embedding_dim out_hidden_size backbone_hidden_size "
        "hidden_size_global",
        24: "intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim d_inner "
        "dff dim_ff intermediate_size_mlp n_inner ffn_hidden_size feed_forward_size "
        "mlp_dim",
        12: "moe_intermediate_size shared_expert_intermediate_size "
        "shared_intermediate_size moe_shared_expert_intermediate_size "
        "expert_ffn_hidden_size dense_intermediate_size",
        8: "head_dim qk_head_dim v_head_dim swa_head_dim kv_channels dim_head d_head "
        "linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim "
        "mamba_d_head mamba_head_dim mamba_headdim attention_head_dim d_kv "
        "attention_head_size kv_lora_rank q_lora_rank o_lora_rank gated_norm_rank "
        "laurel_rank adapter_rank hidden_size_per_layer_input router_hidden_size",
        4: "qk_rope_head_dim qk_nope_head_dim rotary_dim mamba_d_state state_size "
        "ssm_state_size num_experts num_local_experts n_routed_experts moe_num_experts "
        "sliding_window attention_window_size window_size local_attention chunk_size "
        "mamba_chunk_size",
        2: "num_hidden_layers n_layer n_layers num_layers encoder_layers depth "
        "decoder_layers num_encoder_layers num_decoder_layers num_blocks "
        "num_attention_heads n_head n_heads num_heads attention_heads index_n_heads "
        "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads "
        "num_decoder_attention_heads swa_num_attention_heads linear_num_key_heads "
        "linear_num_value_heads linear_num_heads num_experts_per_tok moe_topk moe_k "
        "moe_top_k num_experts_per_token n_group eos_token_id decoder_start_token_id",
        1: "num_key_value_heads num_kv_heads swa_num_key_value_heads topk_group "
        "n_shared_experts num_shared_experts moe_num_shared_experts bos_token_id "
        "first_k_dense_replace",
        0: "pad_token_id",
    }.items()
    for name in names.split()
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR, FULL = "linear_attention", "full_attention"

# What a model needs beyond that, by its type.
NEEDED: dict[str, Changes] = {
    "bailing_hybrid": {
        "num_key_value_heads": 2,
        "short_conv_kernel_size": 2,
        "num_expert_group": 2,
        "num_hidden_layers": 3,
        "layer_types": [LINEAR, LINEAR, FULL],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "bamba": {"mamba_n_heads": 4, "attn_layer_indices": [1]},
    # As it is for sentences that are short: after its first pass.
    "big_bird": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3]},
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {FULL: ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1},
    "diffllama": {"num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "head_dim": 8}
    | {"num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", FULL, "sliding_attention"],
        "intermediate_size": [24] * 3,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0],
    },
    "got_ocr2": {"vision_config": {"output_channels": 8}},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2, "num_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", FULL], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "musicgen": {"decoder": {"pad_token_id": 0, "bos_token_id": 0}},
    "musicgen_melody": {"decoder": {"pad_token_id": 0, "bos_token_id": 0}},
    "nemotron": {"num_key_value_heads": 1},
    "phi4_multimodal": {
        "audio_config": {"nemo_conv_channels": 8, "ext_pw_out_channel": 8}
        | {"depthwise_separable_out_channel": 8, "bias_max_distance": 8},
        "vision_config": {"crop_size": 16, "image_size": 16, "patch_size": 4},
    },
    "qwen4_exp": {
        "text_config": {
            "layer_types": [LINEAR, "indexed_attention"],
            "num_hidden_layers": 2,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
            "hc_lowrank": 4,
            "ngram_vocab_size_base": 64,
        }
    },
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": 2,
        "axial_pos_shape": [2, 4],
        "axial_pos_embds_dim": [8, 8],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
    },
    "roc_bert": {"shape_vocab_size": WORDS, "pronunciation_vocab_size": WORDS}
    | {"pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 32,
        "attention_head_dim": 16,
        "num_hidden_layers": 3,
        "layers_block_type": [LINEAR, "hybrid", "hybrid"],
        "mamba_dt_rank": 2,
        "num_key_value_heads": 2,
    },
    "zamba2": {
        "attention_hidden_size": 32,
        "attention_head_dim": 16,
        "num_hidden_layers": 3,
        "layers_block_type": [LINEAR, "hybrid", LINEAR],
        "hybrid_layer_ids": [1],
        "n_mamba_heads": 4,
        "mamba_headdim": 8,
        "num_query_groups": 2,
        "num_key_value_heads": 2,
    },
}
# Of the auto class, but no model that words alone go into.
NOT_BUILT = {
    "Gemma3nForConditionalGeneration": "its vision tower needs the library timm",
    "Gemma4Assistant": "it takes the keys and values of another model",
    "Gemma4UnifiedAssistant": "it takes the keys and values of another model",
}


def small(config: Config) -> Changes:
    """What to change in a configuration to make the model small."""
    changes: Changes = {}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and not name.startswith("_"):
            changes[name] = small(value) | {"model_type": value.model_type}
        elif type(value) is int and name in SIZES:
            size = SIZES[name]
            keeps = 0 <= value < size and "token_id" not in name
            changes[name] = value if keeps else size
    if "qk_rope_head_dim" in changes:  # latent attention: keys of every head
        parts = {"head_dim": changes["qk_rope_head_dim"]}
        parts["num_key_value_heads"] = changes["num_attention_heads"]
        changes |= {k: v for k, v in parts.items() if k in changes}
    return changes | _one_layer_of_each_kind(config, changes)


def _one_layer_of_each_kind(config: Config, changes: Changes) -> Changes:
    num = getattr(config, "num_hidden_layers", None)
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == num
    }
    if not lists or num <= 2:
        return {}
    first: dict[str, int] = {}
    for layer in range(num):
        first.setdefault(str([value[layer] for value in lists.values()]), layer)
    layers = list(first.values())[:4] if len(first) > 1 else [0, 1]
    kept = {name: [value[i] for i in layers] for name, value in lists.items()}
    return kept | {name: len(layers) for name in LAYERS if name in changes}


def merged(changes: Changes, more: Mapping[str, Value]) -> Changes:
    """Changes and more of them, in the configurations of parts too."""
    both = dict(changes)
    for name, value in more.items():
        part = both.get(name)
        nested = isinstance(part, dict) and isinstance(value, dict)
        both[name] = merged(part, value) if nested else value
    return both


def make(kind: str, class_name: str) -> Case:
    """A model of the auto class with words for it."""
    needed, config_class = NEEDED.get(kind, {}), CONFIG_MAPPING[kind]
    config = config_class(**merged(small(config_class()), needed))
    model_class = getattr(transformers, class_name)
    own = model_class.config_class
    if own is not None and not isinstance(config, own):
        parts = vars(config).values()  # such as the text model of several
        config = next((part for part in parts if isinstance(part, own)), config)
    config.use_cache = False
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    model = model_class(config)
    return Case(model, _inputs(kind, model, config))


def _inputs(kind: str, model: torch.nn.Module, config: Config) -> dict[str, Any]:
    length = 8 if kind == "reformer" else LENGTH  # a multiple of its chunks
    rows = BATCH * getattr(config, "num_codebooks", 1) if "musicgen" in kind else BATCH
    inputs = {"input_ids": torch.randint(3, WORDS - 4, (rows, length))}
    takes = inspect.signature(model.forward).parameters
    # The mask of ProphetNet gives gradients that are no numbers, without dome too.
    if "attention_mask" in takes and rows == BATCH and kind != "prophetnet":
        ends = torch.tensor([[length], [length - 1], [length - 2]])
        inputs["attention_mask"] = (torch.arange(length) < ends).long()
    return inputs


def _all() -> dict[str, Callable[[], Case]]:
    found: dict[str, Callable[[], Case]] = {}
    for kind, classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for class_name in [classes] if isinstance(classes, str) else classes:
            name = class_name
            for ending in ("ForCausalLM", "LMHeadModel", "ModelWithLMHead"):
                name = name.removesuffix(ending)
            if name not in NOT_BUILT:
                found.setdefault(name, partial(make, kind, class_name))
    return found


CAUSAL = _all()
