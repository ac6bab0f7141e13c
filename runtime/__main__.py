"""``python -m runtime``: the same as ``mtp-run``."""

from runtime.cli import main

if __name__ == "__main__":
    main()
