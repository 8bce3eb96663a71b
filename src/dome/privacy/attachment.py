"""``attach``: differentially private training with the filter, in one call."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dome.hooking import call_before_step, check_optimizer
from dome.options import Downstream, FilterOptions
from dome.parameters import Layout
from dome.privacy.accounting import (
    Budget,
    check_positive,
    check_sample_rate,
    noise_multiplier_for,
)
from dome.privacy.bases import BASES, Basis, Setting, check_basis
from dome.privacy.filter import PrivateFilter
from dome.privacy.parameters import check_parameters
from dome.privacy.refuse import check_model
from dome.privacy.releases import Randomness
from dome.privacy.sampling import num_batches, size_of
from dome.trackers.samples import check_whole

Batches = Iterable[tuple[Tensor, Tensor]]


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    rank: int,
    max_grad_norm: float,
    noise_multiplier: float | None = None,
    *,
    data: Dataset[Any] | DataLoader[Any] | None = None,
    sample_rate: float | None = None,
    basis: str | None = None,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    public: Batches | None = None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
    basis_share: float = 0.25,
    update_every: int = 1,
    window: int = 8,
    tracker: str = "svd",
    forget: float | None = None,
    accountant: str = "rdp",
    expected_batch_size: float | None = None,
    loss_reduction: str = "mean",
    after: Downstream | Sequence[Downstream] = (),
    generator: torch.Generator | None = None,
    batch_dim: int | None = None,
    samples_in: str | Sequence[str] | None = None,
) -> PrivateFilter:
    """Make every ``optimizer.step()`` private: filter, clip, add noise, count.

    Train on the batches of the returned filter's ``.loader()``, take a step for each of
    them, and read ``.epsilon()``. docs/explanation/privacy.md says what is guaranteed.

    Args:
        model: The model; layers that mix samples (batch norm) are refused.
        optimizer: Holds all of the model's trainable parameters, and no others.
        rank: Number of directions K to remove; 0 is plain DP-SGD.
        max_grad_norm: C, to which every sample's filtered gradient is clipped.
        noise_multiplier: σ of a step, everything that it releases taken together; or
            give ``target_epsilon`` instead.
        data: What is kept private: a data set with ``sample_rate``, or a ``DataLoader``
            without, whose number of batches tells it. May also be given to
            ``.loader(dataset)`` later.
        sample_rate: Probability with which a sample is in a batch.
        basis: "public", "released" or "private"; anything else is refused. With rank 0
            there is none to choose.
        target_epsilon: ε that all steps together may cost,
        target_delta: at this δ, which ``.epsilon()`` remembers.
        epochs: Passes over the loader, after which further steps are refused;
        steps: or their number instead.
        public: For "public": batches (x, y) of public data, read again and again.
        loss_fn: For "public": maps predictions and targets to a scalar mean.
        basis_share: For "private": share of 1/σ² that the basis gets, on those steps
            that update it.
        update_every: Update the basis on every n-th step.
        window: For "released": how many releases make one batch of samples.
        tracker: For "public" and "released": "svd" or "power".
        forget: None averages all updates; a number in (0, 1) is the newest's weight.
        accountant: Opacus' "rdp" or "prv".
        expected_batch_size: What sums are divided by, if not sample_rate times the size
            of the data set.
        loss_reduction: How the loss sums up samples: "mean" or "sum".
        after: What the private gradient (D,) goes through, in order.
        generator: For experiments: makes sampling and noise reproducible, and private
            to nobody who knows its seed. Without one the operating system's
            cryptographic generator is used.
        batch_dim: Which dimension of the model's input enumerates samples, if not 0.
        samples_in: Which inputs of the model hold samples, as in ``dome.attach``;
            needed if it takes more than one tensor. All others hold none.

    Returns:
        The filter; ``.detach()`` undoes this call.
    """
    if rank or basis is not None:
        check_basis(basis)
    sample_rate = _sample_rate(data, sample_rate)
    check_positive("max_grad_norm", max_grad_norm)
    if expected_batch_size is not None:
        check_positive("expected_batch_size", expected_batch_size)
    if rank < 0 or update_every < 1 or not 0 < basis_share < 1:
        raise ValueError(
            f"rank must not be negative, update_every be at least 1 and basis_share "
            f"lie between 0 and 1; got {rank}, {update_every} and {basis_share}"
        )
    options = FilterOptions(
        rank=rank,
        tracker=tracker,
        update_every=update_every,
        forget=forget,
        after=after,
        loss_reduction=loss_reduction,
        batch_dim=batch_dim,
        samples_in=samples_in,
    )
    check_optimizer(model, optimizer)
    check_model(model)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    layout = Layout(model, only=held)
    check_parameters(optimizer, layout, model)
    targets = (target_epsilon, target_delta, _num_steps(steps, epochs, sample_rate))
    budget = _budget(noise_multiplier, targets, sample_rate, accountant)
    given = [value is not None for value in (public, loss_fn)]
    if given != [basis == "public"] * 2:
        raise ValueError(
            "basis='public' needs public=batches and loss_fn=...; the other bases "
            "accept neither"
        )
    setting = Setting(
        model, layout, options, window, () if public is None else public, loss_fn
    )
    own = BASES[basis](setting) if rank and basis else Basis(setting)
    private = PrivateFilter(
        model,
        optimizer,
        layout,
        own,
        budget,
        options,
        max_grad_norm=max_grad_norm,
        basis_share=basis_share,
        randomness=Randomness(generator),
        expected_batch_size=expected_batch_size,
        data=data,
    )
    call_before_step(optimizer, private)
    private.hook_into(optimizer.register_step_post_hook(lambda *_: private.settle()))
    return private


def _sample_rate(
    data: Dataset[Any] | DataLoader[Any] | None, sample_rate: float | None
) -> float:
    """As it is given, or that of a loader; not of both."""
    if data is not None:
        size_of(data.dataset if isinstance(data, DataLoader) else data)
    of_loader = 1 / len(data) if isinstance(data, DataLoader) else None
    if of_loader is not None and sample_rate is not None:
        raise ValueError(
            f"sample_rate={sample_rate} is given twice: the loader has {len(data)} "  # type: ignore[arg-type] # a loader
            f"batches, and so {of_loader:.4g}. Leave sample_rate out, or give "
            f"data=loader.dataset"
        )
    rate = sample_rate if of_loader is None else of_loader
    if rate is None:
        raise ValueError(
            "the sample rate, the probability that a sample is in a batch, is not "
            "known: pass sample_rate, or data=loader with a DataLoader"
        )
    check_sample_rate(rate)
    return rate


def _num_steps(steps: int | None, epochs: int | None, sample_rate: float) -> int | None:
    """As it is given, or that of so many passes over the loader."""
    if epochs is None:
        return steps
    if steps is not None:
        raise ValueError(f"give epochs or steps, not both; got {epochs} and {steps}")
    check_whole(epochs=epochs)
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    return epochs * num_batches(sample_rate)


def _budget(
    noise_multiplier: float | None,
    targets: tuple[float | None, float | None, int | None],
    sample_rate: float,
    accountant: str,
) -> Budget:
    """With σ as it is given, or solved for the targets."""
    epsilon, delta, steps = targets
    if noise_multiplier is not None:
        if epsilon is not None:
            raise ValueError(
                "give noise_multiplier, or target_epsilon with target_delta and epochs "
                "or steps, but not both"
            )
        return Budget(
            noise_multiplier, sample_rate, accountant, steps, target_delta=delta
        )
    if epsilon is None or delta is None or steps is None:
        raise ValueError(
            "give noise_multiplier, or all of target_epsilon, target_delta and epochs "
            f"(or steps); got {epsilon}, {delta} and {steps}"
        )
    sigma = noise_multiplier_for(epsilon, delta, steps, sample_rate, accountant)
    return Budget(sigma, sample_rate, accountant, steps, epsilon, delta)
