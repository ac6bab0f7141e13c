"""``python -m export``: the same as ``mtp-export``."""

from export.cli import main

if __name__ == "__main__":
    main()
