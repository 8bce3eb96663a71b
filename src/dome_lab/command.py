"""The door of the command ``dome``: Ctrl-C is seen to before anything is imported."""

from dome_lab import interrupts


def main() -> None:
    """Run the command."""
    interrupts.install()
    from dome_lab.cli import main as run

    run()
