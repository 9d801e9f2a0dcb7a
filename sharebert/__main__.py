"""``python -m sharebert`` and ``torchrun ... -m sharebert``."""

from sharebert.cli import entry

if __name__ == "__main__":
    entry()
