"""The one error of this package: what was asked for would not be private."""


class PrivacyError(RuntimeError):
    """Raised instead of training without the privacy that was asked for."""
