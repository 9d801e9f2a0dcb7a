"""One logger for the whole program: rank 0 speaks, above the progress bar, and the run folder keeps a copy."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tqdm import tqdm

NAMES = ("sharebert", "data_prep")


class _TerminalHandler(logging.Handler):
    """Writes above the progress bar, if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except (OSError, ValueError):  # a closed terminal must not end a run
            self.handleError(record)


class _LogFile(logging.FileHandler):
    """The copy in the run folder."""


def set_up_logging(rank: int = 0) -> None:
    """Send messages to standard error: everything on rank 0, warnings and worse on the others."""
    handler = _TerminalHandler()
    prefix = "" if rank == 0 else f"rank {rank}: "
    handler.setFormatter(logging.Formatter(f"%(asctime)s  {prefix}%(message)s", datefmt="%H:%M:%S"))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def open_log_file(path: Path) -> None:
    """Also append to `path` from now on (rank 0)."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in NAMES:
        logging.getLogger(name).addHandler(handler)


def note_in_log_file(text: str) -> None:
    """Append `text` to the log file only: the terminal gets it in other words."""
    record = logging.LogRecord(NAMES[0], logging.ERROR, __file__, 0, text, None, None)
    for handler in logging.getLogger(NAMES[0]).handlers:
        if isinstance(handler, _LogFile):
            handler.emit(record)


def close_log_file() -> None:
    """Undo :func:`open_log_file`, so that the next job of a sweep writes to its own file."""
    for name in NAMES:
        logger = logging.getLogger(name)
        for handler in [handler for handler in logger.handlers if isinstance(handler, _LogFile)]:
            logger.removeHandler(handler)
            handler.close()
