"""Differentially private training with the filter; clipping and noise for ``after``."""

from dome.privacy.accounting import PrivacyError
from dome.privacy.attachment import attach
from dome.privacy.filter import PrivateFilter
from dome.privacy.releases import Clip, GaussianNoise

__all__ = ["Clip", "GaussianNoise", "PrivacyError", "PrivateFilter", "attach"]
