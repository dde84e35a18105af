"""``python -m ortlab`` works like the command ``ortlab``."""

import sys

from ortlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
