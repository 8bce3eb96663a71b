"""Model families of Transformers, from small random configurations."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

from model_zoo.case import Case, Value

B, T, V = 3, 6, 50
SMALL = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KEY_VALUE = {"num_key_value_heads": 1, "head_dim": 8}


def words(length: int = T) -> dict[str, Any]:
    """Word indices and a mask that cuts the samples at different lengths."""
    mask = torch.arange(length) < torch.tensor([[length], [length - 1], [length - 2]])
    return {
        "input_ids": torch.randint(3, V, (B, length)),
        "attention_mask": mask.long(),
    }


def unmasked(length: int = 8) -> dict[str, Any]:
    """Word indices alone."""
    return {"input_ids": words(length)["input_ids"]}


def pictures(size: int = 16) -> dict[str, Any]:
    """Small images."""
    return {"pixel_values": torch.randn(B, 3, size, size)}


def both() -> dict[str, Any]:
    """Words for an encoder and for a decoder."""
    return words() | {"decoder_input_ids": torch.randint(3, V, (B, 4))}


def made(
    name: str,
    config: dict[str, Any],
    inputs: Callable[[], dict[str, Any]] = words,
    **extra: Value,
) -> Callable[[], Case]:
    """A case of a model class by its name."""

    def make() -> Case:
        model_class = getattr(transformers, name)
        settings = model_class.config_class(**config)
        settings.use_cache = False
        return Case(model_class(settings), inputs() | extra)

    return make


def encoder(name: str, **more: Value) -> Callable[[], Case]:
    """An encoder with the usual names of sizes."""
    return made(f"{name}Model", SMALL | more)


BART = {
    "vocab_size": V,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": V,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
}
SPEECH = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (2, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": V,
}
GPT2 = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
TEXT = {"text_config": SMALL | {"max_position_embeddings": 32, "projection_dim": 8}}
VISION = {"vision_config": VIT | {"projection_dim": 8}}


def sound() -> dict[str, Any]:
    """Raw sound."""
    return {"input_values": torch.randn(B, 64)}


def clip() -> dict[str, Any]:
    """Words that end in the largest index, and images."""
    text = torch.randint(3, V - 1, (B, T))
    text[:, -1] = V - 1
    return {"input_ids": text, "attention_mask": torch.ones_like(text)} | pictures()


TRANSFORMERS: dict[str, Callable[[], Case]] = {
    # encoders
    "BERT": made("BertForSequenceClassification", SMALL),
    "RoBERTa": encoder("Roberta", max_position_embeddings=64),
    "DistilBERT": made(
        "DistilBertModel",
        {"vocab_size": V, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
    ),
    "ALBERT": encoder("Albert", embedding_size=8),
    "ELECTRA": encoder("Electra", embedding_size=8),
    "DeBERTa": encoder("Deberta", relative_attention=True, pos_att_type="c2p|p2c"),
    "DeBERTa-v2": encoder(
        "DebertaV2",
        relative_attention=True,
        pos_att_type="c2p|p2c",
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    "MPNet": encoder("MPNet"),
    "Longformer": made(
        "LongformerModel",
        SMALL | {"attention_window": 4, "max_position_embeddings": 64},
        unmasked,
    ),
    "BigBird": encoder("BigBird", attention_type="original_full"),
    "ConvBERT": encoder("ConvBert", embedding_size=16),
    "MobileBERT": encoder(
        "MobileBert", embedding_size=8, intra_bottleneck_size=8, true_hidden_size=8
    ),
    "SqueezeBERT": encoder("SqueezeBert", embedding_size=16),
    "RemBERT": encoder("RemBert", input_embedding_size=8),
    "RoFormer": encoder("RoFormer", embedding_size=16),
    "FNet": made("FNetModel", SMALL, unmasked),
    "Nyströmformer": encoder("Nystromformer", segment_means_seq_len=T, num_landmarks=T),
    "YOSO": encoder("Yoso", use_expectation=True),
    "XLNet": made(
        "XLNetModel",
        {"vocab_size": V, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
    ),
    "XLM": made(
        "XLMModel", {"vocab_size": V, "emb_dim": 16, "n_layers": 2, "n_heads": 2}
    ),
    "XLM-RoBERTa": encoder("XLMRoberta", max_position_embeddings=64),
    "Funnel": made(
        "FunnelBaseModel",
        {
            "vocab_size": V,
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 24,
            "block_sizes": [1, 1],
        },
    ),
    "ModernBERT": encoder("ModernBert", attn_implementation="eager"),
    "ESM": encoder("Esm", max_position_embeddings=64, mask_token_id=3),
    "LayoutLM": encoder("LayoutLM"),
    "LUKE": encoder("Luke", entity_vocab_size=10, entity_emb_size=8),
    "I-BERT": encoder("IBert", quant_mode=False),
    # mixtures of experts
    "Mixtral, eager experts": made(
        "MixtralForCausalLM",
        SMALL | KEY_VALUE | {"num_local_experts": 4, "experts_implementation": "eager"},
    ),
    "Switch Transformers": made(
        "SwitchTransformersForConditionalGeneration",
        T5
        | {
            "num_experts": 2,
            "num_sparse_encoder_layers": 1,
        },
        both,
    ),
    # encoder and decoder
    "BART": made("BartForConditionalGeneration", BART, both),
    "mBART": made("MBartForConditionalGeneration", BART, both),
    "Pegasus": made("PegasusForConditionalGeneration", BART, both),
    "Marian": made("MarianMTModel", BART, both),
    "BlenderBot": made("BlenderbotForConditionalGeneration", BART, both),
    "M2M-100": made("M2M100ForConditionalGeneration", BART, both),
    "LED": made(
        "LEDForConditionalGeneration",
        BART | {"attention_window": 4, "max_encoder_position_embeddings": 32},
        lambda: unmasked() | {"decoder_input_ids": both()["decoder_input_ids"]},
    ),
    "T5": made("T5ForConditionalGeneration", T5, both),
    "UMT5": made("UMT5ForConditionalGeneration", T5, both),
    "LongT5": made("LongT5ForConditionalGeneration", T5 | {"local_radius": 3}, both),
    # vision
    "ViT": made("ViTForImageClassification", VIT, pictures),
    "DeiT": made("DeiTForImageClassification", VIT, pictures),
    "BEiT": made("BeitModel", VIT | {"use_relative_position_bias": True}, pictures),
    "DINOv2": made("Dinov2Model", VIT | {"mlp_ratio": 2}, pictures),
    "Swin": made(
        "SwinModel",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1]}
        | {"num_heads": [2, 2], "window_size": 2},
        pictures,
    ),
    "Swin v2": made(
        "Swinv2Model",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1]}
        | {"num_heads": [2, 2], "window_size": 2},
        pictures,
    ),
    "ConvNeXt": made(
        "ConvNextModel",
        {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
        lambda: pictures(32),
    ),
    "ConvNeXt v2": made(
        "ConvNextV2Model",
        {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
        lambda: pictures(32),
    ),
    "ResNet": made(
        "ResNetModel",
        {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]},
        lambda: pictures(32),
    ),
    "RegNet": made(
        "RegNetModel",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 8],
            "depths": [1, 1],
            "groups_width": 4,
        },
        lambda: pictures(32),
    ),
    "MobileNetV2": made(
        "MobileNetV2Model", {"depth_multiplier": 0.1}, lambda: pictures(32)
    ),
    "PoolFormer": made(
        "PoolFormerModel",
        {"hidden_sizes": [8, 8], "depths": [1, 1], "num_encoder_blocks": 2}
        | {"patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1]},
        pictures,
    ),
    "PVT": made(
        "PvtModel",
        {
            "hidden_sizes": [8, 8],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "image_size": 16,
        }
        | {"patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2]}
        | {"sequence_reduction_ratios": [2, 1], "mlp_ratios": [2, 2]},
        pictures,
    ),
    "SegFormer": made(
        "SegformerModel",
        {"hidden_sizes": [8, 8], "depths": [1, 1], "num_encoder_blocks": 2}
        | {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2]}
        | {"sr_ratios": [2, 1], "mlp_ratios": [2, 2]},
        pictures,
    ),
    "DPT": made(
        "DPTModel",
        VIT | {"backbone_out_indices": [0, 1], "neck_hidden_sizes": [8, 8]},
        pictures,
    ),
    "ImageGPT": made("ImageGPTModel", GPT2),
    "VideoMAE": made(
        "VideoMAEModel",
        VIT | {"num_frames": 2, "tubelet_size": 1},
        lambda: {"pixel_values": torch.randn(B, 2, 3, 16, 16)},
    ),
    "TimeSformer": made(
        "TimesformerModel",
        VIT | {"num_frames": 2},
        lambda: {"pixel_values": torch.randn(B, 2, 3, 16, 16)},
    ),
    # words and pictures
    "CLIP": made(
        "CLIPTextModel",
        SMALL | {"max_position_embeddings": 32},
        lambda: {"input_ids": clip()["input_ids"]},
    ),
    "CLIP vision": made("CLIPVisionModel", VIT, pictures),
    "SigLIP text": made(
        "SiglipTextModel", SMALL | {"max_position_embeddings": 32, "projection_size": 8}
    ),
    "BLIP text": made("BlipTextModel", SMALL | {"is_decoder": False}),
    # The order of its patches is drawn: only what is pooled can be compared.
    "ViLT": made("ViltForQuestionAnswering", SMALL | VIT, lambda: words() | pictures()),
    # sound
    "wav2vec 2.0": made("Wav2Vec2Model", SPEECH, sound),
    "HuBERT": made("HubertModel", SPEECH, sound),
    "WavLM": made("WavLMModel", SPEECH, sound),
    "UniSpeech": made("UniSpeechModel", SPEECH, sound),
    "UniSpeech-SAT": made("UniSpeechSatModel", SPEECH, sound),
    "Data2Vec audio": made("Data2VecAudioModel", SPEECH, sound),
    "wav2vec 2.0 conformer": made("Wav2Vec2ConformerModel", SPEECH, sound),
    "wav2vec 2.0 BERT": made(
        "Wav2Vec2BertModel",
        SPEECH | {"feature_projection_input_dim": 8},
        lambda: {"input_features": torch.randn(B, 14, 8)},
    ),
    "SEW": made("SEWModel", SPEECH | {"squeeze_factor": 2}, sound),
    "Whisper": made(
        "WhisperModel",
        BART
        | {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        lambda: {
            "input_features": torch.randn(B, 8, 16),
            "decoder_input_ids": torch.randint(3, V, (B, 4)),
        },
    ),
    "AST": made(
        "ASTModel",
        {k: v for k, v in VIT.items() if k != "image_size"}
        | {
            "num_mel_bins": 8,
            "max_length": 16,
            "frequency_stride": 4,
            "time_stride": 4,
        },
        lambda: {"input_values": torch.randn(B, 16, 8)},
    ),
    # time series
    "PatchTST": made(
        "PatchTSTModel",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
        }
        | {"d_model": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 8}
        | {"norm_type": "layernorm"},
        lambda: {"past_values": torch.randn(B, 16, 2)},
    ),
    "Decision Transformer": made(
        "DecisionTransformerModel",
        {"state_dim": 3, "act_dim": 2, "hidden_size": 16, "n_layer": 1, "n_head": 2}
        | {"max_ep_len": 8, "n_positions": 32},
        lambda: {
            "states": torch.randn(B, 4, 3),
            "actions": torch.randn(B, 4, 2),
            "rewards": torch.randn(B, 4, 1),
            "returns_to_go": torch.randn(B, 4, 1),
            "timesteps": torch.arange(4).expand(B, 4),
            "attention_mask": torch.ones(B, 4),
        },
    ),
}
