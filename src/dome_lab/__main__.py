"""``python -m dome_lab``."""

from dome_lab.command import main

if __name__ == "__main__":
    main()
