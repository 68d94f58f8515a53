"""The settings of a collection by keyword, and errors in the words of the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from distcache.errors import ConfigError, DistcacheError


@dataclass(frozen=True)
class CacheSettings:
    """How the rows of a collection are cached and summed; see `CachedEmbeddingBagCollection`."""

    rows: int | None = None
    ratio: float | None = None
    bytes: int | None = None
    lookahead: int = 8
    prefetch: int = 1
    policy: str = "lookahead"
    schedule: str = "overlapped"
    reduction: str = "ordered"
    gradient_reduction: str = "mean"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    on_bad_id: str = "error"

    def __post_init__(self) -> None:
        for name, known in (
            ("policy", ("lookahead", "lru")),
            ("schedule", ("overlapped", "serial")),
            ("reduction", ("ordered", "native")),
            ("gradient_reduction", ("mean", "sum")),
            ("on_bad_id", ("error", "hash")),
            ("dtype", (torch.float32, torch.float64)),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{name}={value!r} is not {known[0]!r} or {known[1]!r}")
        for name in ("lookahead", "prefetch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 0")


_WORDS = (
    ("data.on_bad_id=hash", "on_bad_id='hash'"),
    ("data.table_rows, model.embedding_dim", "num_embeddings, embedding_dim"),
    ("data.global_batch_size", "the batch size"),
    ("cache.", ""),
    ("trainer.", ""),
    ("data.", ""),
)
"""The keys of the command line, and what a user of the library gives instead."""


@contextmanager
def library_words() -> Iterator[None]:
    """Errors of the parts below name the arguments of the library, not command-line keys."""
    try:
        yield
    except DistcacheError as error:
        text = str(error)
        for key, word in _WORDS:
            text = text.replace(key, word)
        error.args = (text,)
        raise
