"""What the filter does and what there is to remove, in numbers.

``FilterStats`` is what ``.stats`` gives after every step. The rest is on demand: signal
and noise of samples, drift over many steps, the spectrum and what it says about rank.
"""

from dome.diagnostics.angles import principal_angles, subspace_overlap
from dome.diagnostics.drift import Drift, rms_sine
from dome.diagnostics.rank import (
    Eigengap,
    SuggestedRank,
    effective_rank,
    eigengap,
    entropy_rank,
    knee,
    suggest_rank,
)
from dome.diagnostics.signal import SignalToNoise, captured_fraction, signal_to_noise
from dome.diagnostics.spectrum import (
    Spectrum,
    batch_spectrum,
    covariance_eigenpairs,
    covariance_eigenvalues,
    data_spectrum,
)
from dome.diagnostics.stats import (
    FilterStats,
    collect_stats,
    warn_of_random_directions,
)

__all__ = [
    "Drift",
    "Eigengap",
    "FilterStats",
    "SignalToNoise",
    "Spectrum",
    "SuggestedRank",
    "batch_spectrum",
    "captured_fraction",
    "collect_stats",
    "covariance_eigenpairs",
    "covariance_eigenvalues",
    "data_spectrum",
    "effective_rank",
    "eigengap",
    "entropy_rank",
    "knee",
    "principal_angles",
    "rms_sine",
    "signal_to_noise",
    "subspace_overlap",
    "suggest_rank",
    "warn_of_random_directions",
]
