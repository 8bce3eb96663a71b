"""``python -m dome_lab.cli``."""

from dome_lab.cli import main

if __name__ == "__main__":
    main()
