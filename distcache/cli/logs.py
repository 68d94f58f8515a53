"""Logging of one rank: rank 0 speaks on stdout, all ranks' warnings and errors go to stderr."""

from __future__ import annotations

import logging
import sys


class RankFormatter(logging.Formatter):
    """A plain line; warnings and errors say so, and name the rank where there are several."""

    def __init__(self, prefix: str) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")
        self.prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """One line (more with a traceback) for a record."""
        line = super().format(record)
        if record.levelno < logging.WARNING:
            return line
        return f"{self.prefix}{record.levelname.lower()}: {line.split(' ', 1)[1]}"


def set_up_logging(level: str = "INFO", rank: int = 0, world_size: int = 1) -> None:
    """Configure the `distcache` logger of this process; calling it again replaces the set-up.

    `level` holds for rank 0; other ranks log warnings and above, or all with DEBUG.
    """
    logging.getLogger().setLevel(logging.WARNING)  # libraries announce themselves at INFO
    logger = logging.getLogger("distcache")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    number = logging.getLevelNamesMapping()[level.upper()]
    quiet = rank > 0 and number > logging.DEBUG
    logger.setLevel(max(number, logging.WARNING) if quiet else number)
    logger.propagate = False
    formatter = RankFormatter(f"rank {rank}: " if world_size > 1 else "")
    out, err = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    out.addFilter(lambda record: record.levelno < logging.WARNING)
    err.setLevel(logging.WARNING)
    for handler in (out, err):
        handler.setFormatter(formatter)
        logger.addHandler(handler)
