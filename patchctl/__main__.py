"""``python -m patchctl``."""

from patchctl.cli import main

if __name__ == "__main__":
    main()
