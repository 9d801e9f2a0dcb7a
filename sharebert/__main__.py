"""``python -m sharebert`` and ``torchrun ... -m sharebert``."""

import sys

from sharebert.cli import main

if __name__ == "__main__":
    sys.exit(main())
