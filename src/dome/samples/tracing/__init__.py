"""Which tensor holds which sample where."""
