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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dome.privacy.errors import PrivacyError
from dome.privacy.ledger import Ledger, Row
from dome.privacy.stages import check_positive

ACCOUNTANTS = ("rdp", "prv")
TOLERANCE = 1e-2  # of the target epsilon, to which the noise multiplier is solved
SLACK = 1e-6  # of the target: the same numbers, added up in another order


@dataclass(frozen=True, slots=True)
class Target:
    """What all steps together may cost.

    Attributes:
        epsilon: ε that is not exceeded,
        delta: at this δ.
    """

    epsilon: float
    delta: float


class Budget:
    """Counts releases and says what they cost together.

    Args:
        noise_multiplier: σ of a step, all that it releases taken together.
        sample_rate: Probability that a sample is in a batch.
        accountant: "rdp" or "prv".
        max_steps: Refuse steps beyond this number; None takes any number.
        target: What ``max_steps`` steps may cost, earlier runs included.

    Attributes:
        ledger: The steps so far.
    """

    def __init__(
        self,
        noise_multiplier: float,
        sample_rate: float,
        accountant: str = "rdp",
        max_steps: int | None = None,
        target: Target | None = None,
    ) -> None:
        check_positive("noise_multiplier", noise_multiplier)
        check_sample_rate(sample_rate)
        make_accountant(accountant)
        self.noise_multiplier, self.sample_rate = noise_multiplier, sample_rate
        self.max_steps, self._target = max_steps, target
        self._accountant = accountant
        self.ledger = Ledger(noise_multiplier, sample_rate)

    @property
    def num_steps(self) -> int:
        """Steps that have been paid for, those of earlier runs included."""
        return self.ledger.num_steps

    def spend(self) -> None:
        """One more step; called before anything of it is released."""
        self.check_left()
        self.ledger.add()

    def check_left(self) -> None:
        """Refuse one step more than the noise was chosen for."""
        if self.max_steps is not None and self.num_steps >= self.max_steps:
            raise PrivacyError(
                f"the noise was chosen for {self.max_steps} steps, and all of them are "
                f"taken: one more would exceed target_epsilon. Stop here, or attach "
                f"with more steps from the start"
            )

    def epsilon(self, delta: float, num_more: int = 0) -> float:
        """ε at this δ of all steps so far and of more, as Opacus' accountant has it."""
        check_delta(delta)
        return _epsilon(self._accountant, self.ledger.history(num_more), delta)

    def state_dict(self, num_more: int = 0) -> dict[str, Tensor]:
        """The history of costs, and of so many more steps."""
        return self.ledger.state_dict(num_more)

    def resumed(self, state: Mapping[str, Tensor]) -> Ledger:
        """What was spent here and before, if it leaves the target within reach."""
        ledger = self.ledger.with_state(state)
        if self._target is not None and ledger.num_steps:
            self._check_target(ledger, self._target)
        return ledger

    def _check_target(self, ledger: Ledger, target: Target) -> None:
        left = max(0, (self.max_steps or 0) - ledger.num_steps)
        spent, planned = (
            _epsilon(self._accountant, ledger.history(more), target.delta)
            for more in (0, left)
        )
        if max(spent, planned) > target.epsilon * (1 + SLACK):
            raise PrivacyError(
                f"the state has spent epsilon {spent:.4g} at delta {target.delta:g}, "
                f"and with the {left} steps that are left it would be {planned:.4g}: "
                f"more than target_epsilon {target.epsilon:g}. Attach with the targets "
                f"it was started with, or with larger ones"
            )


def _epsilon(accountant: str, history: list[Row], delta: float) -> float:
    if not history:
        return 0.0
    counts = make_accountant(accountant)
    counts.history = history
    return float(counts.get_epsilon(delta=delta))


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
