"""Models and optimizers that cannot be trained privately, refused by name."""

from torch import nn
from torch.optim import Optimizer

from dome.parameters import Layout
from dome.privacy.errors import PrivacyError
from dome.samples.sources.opacus import carries_grad_sample
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


def check_parameters(optimizer: Optimizer, layout: Layout, model: nn.Module) -> None:
    """Refuse a parameter that would be trained without noise."""
    tracked = {id(p) for p in layout.parameters}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.requires_grad and id(p) not in tracked for p in held):
        raise PrivacyError(
            "the optimizer trains a parameter that is not the model's, or was added or "
            "unfrozen after attach: it would get a gradient without noise. Freeze it, "
            "or attach again"
        )
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in tracked:
            raise PrivacyError(
                f"parameter {name!r} can be trained, but not by this optimizer: its "
                f"gradient would have no noise. Give it to the optimizer or freeze it"
            )
