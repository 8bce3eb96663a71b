"""What training has cost so far, by Opacus' accountants.

Every step is one Poisson-subsampled Gaussian mechanism with the same noise multiplier
σ, whatever the basis. Two quantities that are released of one batch, with noise
multipliers σ₁ and σ₂, are one Gaussian mechanism with

    1/σ² = 1/σ₁² + 1/σ₂²

so a share s of 1/σ² for the basis leaves σ₁ = σ/√(1 − s) to the gradient and gives
σ₂ = σ/√s to the basis.
"""

import math
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ACCOUNTANTS = ("rdp", "prv")
TOLERANCE = 1e-2  # of the target epsilon, to which the noise multiplier is solved
SLACK = 1e-6  # of the target: the same numbers, added up in another order

Row = tuple[float, float, int]  # noise multiplier, sample rate, number of steps

# The largest counts of this process, so that a filter made anew knows them as well.
_seen: dict[int, Row] = {}


class PrivacyError(RuntimeError):
    """Raised instead of training without the privacy that was asked for."""


class Budget:
    """Counts releases and computes what they cost together.

    A budget counts the steps of its own run. A state holds the counts of all runs that
    led to it, and loading one keeps the larger count of each: going back to an older
    state takes nothing back, because what those steps released stays released.

    Args:
        noise_multiplier: σ of a step, all that it releases taken together.
        sample_rate: Probability that a sample is in a batch.
        accountant: "rdp" or "prv".
        max_steps: Refuse steps beyond this number; None takes any number.
        target_epsilon: What ``max_steps`` steps may cost, earlier runs included,
        target_delta: at this δ; also that of ``epsilon()``.
    """

    def __init__(
        self,
        noise_multiplier: float,
        sample_rate: float,
        accountant: str = "rdp",
        max_steps: int | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
    ) -> None:
        check_positive("noise_multiplier", noise_multiplier)
        check_sample_rate(sample_rate)
        make_accountant(accountant)
        if target_delta is not None:
            check_delta(target_delta)
        self.noise_multiplier, self.sample_rate = noise_multiplier, sample_rate
        self.max_steps, self._accountant = max_steps, accountant
        self._target_epsilon, self._target_delta = target_epsilon, target_delta
        self._own = int.from_bytes(os.urandom(8)) >> 1  # fits an int64
        self._runs: dict[int, Row] = {self._own: (noise_multiplier, sample_rate, 0)}

    @property
    def num_steps(self) -> int:
        """Steps that have been paid for, those of earlier runs included."""
        return sum(steps for _, _, steps in self._runs.values())

    def spend(self) -> None:
        """One more step; called before anything of it is released."""
        self.check_left()
        self._runs = self._with(1)
        _seen[self._own] = self._runs[self._own]

    def check_left(self) -> None:
        """Refuse one step more than the noise was chosen for."""
        if self.max_steps is not None and self.num_steps >= self.max_steps:
            raise PrivacyError(
                f"the noise was chosen for {self.max_steps} steps, and all of them are "
                f"taken: one more would exceed target_epsilon. Stop here, or attach "
                f"with more steps from the start"
            )

    def epsilon(self, delta: float | None = None, num_more: int = 0) -> float:
        """ε at this δ of all steps so far and of more, as Opacus' accountant has it.

        At the δ of the target, if none is given.
        """
        delta = self._target_delta if delta is None else delta
        if delta is None:
            raise ValueError(
                "epsilon depends on delta: pass one, such as .epsilon(delta=1e-5), or "
                "give target_delta to attach"
            )
        check_delta(delta)
        return self._epsilon(self._with(num_more), delta)

    def _with(self, num_more: int) -> dict[int, Row]:
        sigma, rate, steps = self._runs[self._own]
        return self._runs | {self._own: (sigma, rate, steps + num_more)}

    def _epsilon(self, runs: Mapping[int, Row], delta: float) -> float:
        total: dict[tuple[float, float], int] = {}
        for sigma, rate, steps in runs.values():
            if steps:
                total[sigma, rate] = total.get((sigma, rate), 0) + steps
        if not total:
            return 0.0
        counts = make_accountant(self._accountant)
        counts.history = [(*row, steps) for row, steps in total.items()]
        return float(counts.get_epsilon(delta=delta))

    def state_dict(self, num_more: int = 0) -> dict[str, Tensor]:
        """Rows of multiplier, rate and number of steps, and which run each is of.

        With so many more steps of this run.
        """
        runs = self._with(num_more)
        rows = torch.tensor(list(runs.values()), dtype=torch.float64)
        return {"history": rows, "runs": torch.tensor(list(runs))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Add what a saved state has spent; refused if it is damaged or too much."""
        rows = state["history"].reshape(-1, 3).tolist()
        runs = dict(self._runs)
        for run, row in zip(state["runs"].tolist(), rows, strict=True):
            known = [runs.get(run), _seen.get(run), _checked(row)]
            runs[run] = max((r for r in known if r), key=lambda r: r[2])
        self._check_target(runs)
        self._runs = runs

    def _check_target(self, runs: dict[int, Row]) -> None:
        """Refuse runs that leave the target out of reach."""
        target, delta = self._target_epsilon, self._target_delta
        num_steps = sum(steps for _, _, steps in runs.values())
        if target is None or delta is None or not num_steps:
            return
        left = max(0, (self.max_steps or 0) - num_steps)
        sigma, rate, steps = runs[self._own]
        spent = self._epsilon(runs, delta)
        planned = self._epsilon(runs | {self._own: (sigma, rate, steps + left)}, delta)
        if max(spent, planned) > target * (1 + SLACK):
            raise PrivacyError(
                f"the state has spent epsilon {spent:.4g} at delta {delta:g}. With the "
                f"{left} steps that are left it would be {planned:.4g}: more than "
                f"target_epsilon {target:g}. Attach with the targets it was started "
                "with, or with larger ones"
            )


def _checked(row: list[float]) -> Row:
    sigma, rate, steps = row
    if not (0 < sigma < math.inf and 0 < rate <= 1 and steps >= 0 and steps % 1 == 0):
        raise ValueError(
            f"the checkpoint says that {steps} steps were taken with noise multiplier "
            f"{sigma} and sample rate {rate}, which is impossible: it is damaged, and "
            "nothing was loaded"
        )
    return sigma, rate, int(steps)


def noise_multiplier_for(
    target_epsilon: float,
    target_delta: float,
    steps: int,
    sample_rate: float,
    accountant: str = "rdp",
) -> float:
    """The σ with which ``steps`` steps cost at most ``target_epsilon``."""
    check_positive("target_epsilon", target_epsilon)
    check_delta(target_delta)
    check_sample_rate(sample_rate)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    make_accountant(accountant)
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        # The search passes through multipliers that are far too large.
        warnings.filterwarnings("ignore", message="Optimal order is the largest alpha")
        sigma = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate,
            steps=steps,
            accountant=accountant,
            epsilon_tolerance=TOLERANCE * target_epsilon,
        )
    return float(sigma)


def divided(noise_multiplier: float, share: float) -> tuple[float, float]:
    """σ₁ of the gradient and σ₂ of the basis, of which σ is made."""
    return noise_multiplier / math.sqrt(1 - share), noise_multiplier / math.sqrt(share)


def make_accountant(name: str) -> Any:  # noqa: ANN401 (Opacus has no annotations)
    """One of Opacus' accountants that bound epsilon from above."""
    if name not in ACCOUNTANTS:
        why = " (its central limit may understate epsilon)" if name == "gdp" else ""
        raise PrivacyError(
            f"accountant must be one of {ACCOUNTANTS}, got {name!r}{why}"
        )
    try:
        from opacus.accountants import create_accountant
    except ImportError as error:
        raise ImportError(
            "dome.privacy counts with Opacus' accountants: pip install "
            "'dome-torch[privacy]'"
        ) from error
    return create_accountant(mechanism=name)


def check_positive(name: str, value: float) -> None:
    """Refuse what is not a positive number."""
    # Asked this way round, NaN is refused too.
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value}")


def check_delta(delta: float) -> None:
    """Refuse a δ outside (0, 1)."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, got {delta}")


def check_sample_rate(sample_rate: float) -> None:
    """Refuse a rate outside (0, 1]."""
    if not 0 < sample_rate <= 1:
        raise ValueError(
            f"sample_rate is the probability that a sample is in a batch, in (0, 1]; "
            f"got {sample_rate}"
        )
