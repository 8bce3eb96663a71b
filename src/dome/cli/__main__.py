"""``python -m dome.cli``."""

from dome.cli import main

if __name__ == "__main__":
    main()
