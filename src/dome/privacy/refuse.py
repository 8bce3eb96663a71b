"""Models and settings of torch with which training is not private, refused by name."""

import torch
from torch import nn

from dome.privacy.accounting import PrivacyError
from dome.samples.opacus import carries_grad_sample
from dome.torch_private import AnyBatchNorm, AnyInstanceNorm


def check_model(model: nn.Module) -> None:
    """Refuse layers through which one sample reaches another, or a buffer."""
    if carries_grad_sample(model):
        raise PrivacyError(
            "the model is under Opacus' hooks already: train it with Opacus' "
            "optimizer, or give the bare model to dome.privacy.attach, but not both"
        )
    for name, module in model.named_modules():
        where = f"layer {name!r}" if name else "the model"
        if isinstance(module, AnyBatchNorm):
            raise PrivacyError(
                f"{where} is batch norm: it mixes the samples of a batch and keeps "
                f"their statistics without noise. Replace it by GroupNorm"
            )
        if isinstance(module, AnyInstanceNorm) and module.track_running_stats:
            raise PrivacyError(
                f"{where} keeps statistics of private samples without noise: make it "
                f"with track_running_stats=False"
            )
        if getattr(module, "max_norm", None) is not None:
            raise PrivacyError(
                f"{where} shortens the rows that a batch uses (max_norm), without "
                "noise, which reveals what samples contain: make it without max_norm"
            )
    check_precision(model)


def check_precision(model: nn.Module) -> None:
    """Refuse 16 bits: there a sample's gradient depends on how many others there are.

    A mean divides by the batch size before the gradient is rounded, and the rows of all
    samples move when one more joins.
    """
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if is_short(t.dtype):
            raise PrivacyError(
                f"{name!r} has 16 bits ({t.dtype}): rounding to them depends on the "
                "batch size, so one more sample would move the gradients of all "
                "others. Train in float32: model.float()"
            )


def is_short(dtype: torch.dtype) -> bool:
    """Whether numbers of this type have fewer than 32 bits."""
    return dtype.is_floating_point and dtype.itemsize < 4


def check_products(device: torch.device) -> None:
    """Refuse settings under which products of float32 numbers keep fewer bits.

    Asked before every call of the model, when its backward pass begins, and at the
    step, because they can be switched on at any time.
    """
    if torch.is_autocast_enabled(device.type):
        raise PrivacyError(
            "autocast is on where the model is called or differentiated, in 16 bits: "
            "rounding to them depends on the batch size, so one more sample would "
            "move the gradients of all others. Leave autocast out"
        )
    for name in (*_EVERYWHERE, *_ON_DEVICE.get(device.type, ())):
        value = _setting(name)
        if value not in _EXACT:
            raise PrivacyError(
                f"torch.{name} is {value!r}: products or convolutions of float32 "
                "numbers keep fewer than 24 bits. Their rounding depends on the batch "
                "size, so one more sample would move the gradients of all others. "
                f"Switch it off: {_cure(name)}"
            )


# None where this torch does not know a setting, or another one speaks for it.
_EXACT = (None, False, "highest", "ieee", "none")
_EVERYWHERE = ("get_float32_matmul_precision()", "backends.fp32_precision")
_REDUCED = "backends.cuda.matmul.allow_{}_reduced_precision_reduction"
_ON_DEVICE = {
    "cpu": (
        "backends.mkldnn.fp32_precision",
        "backends.mkldnn.matmul.fp32_precision",
        "backends.mkldnn.conv.fp32_precision",
        "backends.mkldnn.rnn.fp32_precision",
    ),
    "cuda": (
        "backends.cuda.matmul.fp32_precision",
        "backends.cuda.matmul.allow_tf32",
        "backends.cudnn.conv.fp32_precision",
        "backends.cudnn.rnn.fp32_precision",
        "backends.cudnn.allow_tf32",
        _REDUCED.format("fp16"),
        _REDUCED.format("bf16"),
    ),
}


def _setting(name: str) -> object:
    """What a setting of torch says."""
    value: object = torch
    try:
        for part in name.removesuffix("()").split("."):
            value = getattr(value, part)
        value = value() if callable(value) else value
    # Torch refuses the older name of a setting whose newer one was used.
    except (AttributeError, RuntimeError):
        return None
    return value[0] if isinstance(value, tuple) else value


def _cure(name: str) -> str:
    if name.endswith("()"):
        return "torch.set_float32_matmul_precision('highest')"
    off = "'ieee'" if name.endswith("fp32_precision") else "False"
    return f"torch.{name} = {off}"
