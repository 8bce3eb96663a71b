"""What training has cost so far, by Opacus' accountants.

Every step is one Poisson-subsampled Gaussian mechanism with the same noise multiplier
σ, whatever the basis. Two quantities that are released of one batch, with noise
multipliers σ₁ and σ₂, are one Gaussian mechanism with

    1/σ² = 1/σ₁² + 1/σ₂²

so a share s of 1/σ² for the basis leaves σ₁ = σ/√(1 − s) to the gradient and gives
σ₂ = σ/√s to the basis.
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from dome.privacy.errors import PrivacyError
from dome.privacy.stages import check_positive

ACCOUNTANTS = ("rdp", "prv")
TOLERANCE = 1e-2  # of the target epsilon, to which the noise multiplier is solved


class Budget:
    """Counts releases and says what they cost together.

    Args:
        noise_multiplier: σ of a step, all that it releases taken together.
        sample_rate: Probability that a sample is in a batch.
        accountant: "rdp" or "prv".
        max_steps: Refuse steps beyond this number; None takes any number.
    """

    def __init__(
        self,
        noise_multiplier: float,
        sample_rate: float,
        accountant: str = "rdp",
        max_steps: int | None = None,
    ) -> None:
        check_positive("noise_multiplier", noise_multiplier)
        check_sample_rate(sample_rate)
        self.noise_multiplier, self.sample_rate = noise_multiplier, sample_rate
        self.max_steps = max_steps
        self.num_steps = 0
        self._accountant = make_accountant(accountant)

    def spend(self) -> None:
        """One more step; called before anything of it is released."""
        if self.max_steps is not None and self.num_steps >= self.max_steps:
            raise PrivacyError(
                f"the noise was chosen for {self.max_steps} steps, and all of them are "
                f"taken: one more would exceed target_epsilon. Stop here, or attach "
                f"with more steps from the start"
            )
        self._accountant.step(
            noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate
        )
        self.num_steps += 1

    def epsilon(self, delta: float) -> float:
        """ε of all steps so far at this δ, as Opacus' accountant has it."""
        check_delta(delta)
        if not self._accountant.history:
            return 0.0
        return float(self._accountant.get_epsilon(delta=delta))

    def state_dict(self) -> dict[str, Tensor]:
        """The accountant's history: rows of multiplier, rate and number of steps."""
        history = torch.tensor(self._accountant.history, dtype=torch.float64)
        return {"history": history.reshape(-1, 3)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what was spent before."""
        rows = state["history"].tolist()
        self._accountant.history = [(s, q, round(n)) for s, q, n in rows]
        self.num_steps = sum(n for _, _, n in self._accountant.history)


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
