"""The door of the command ``dome``: Ctrl-C is seen to before anything is imported."""

import sys

import dome
from dome_lab import interrupts


def main() -> None:
    """Run the command."""
    interrupts.install()
    # Another package named dome, installed later, replaces our __init__.py.
    if "attach" not in getattr(dome, "__all__", ()):
        sys.exit(
            f"{dome.__file__} belongs to another package named dome: pip uninstall "
            f"dome dome-torch, then pip install 'dome-torch[lab]'"
        )
    from dome_lab.cli import main as run

    run()
