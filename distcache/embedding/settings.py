"""The settings of a collection by keyword, and errors in the words of the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from distcache.errors import ConfigError, DistcacheError
from distcache.planner.policy import POLICIES, TAILS, Policy


@dataclass(frozen=True)
class CacheSettings:
    """How the rows of a collection are cached and summed; see `CachedEmbeddingBagCollection`."""

    rows: int | None = None
    ratio: float | None = None
    bytes: int | None = None
    lookahead: int = 8
    prefetch: int = 1
    policy: str = "lookahead"
    tail: str = "lru"
    admission: bool = False
    half_life: float | str = "auto"
    schedule: str = "overlapped"
    reduction: str = "ordered"
    gradient_reduction: str = "mean"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    on_bad_id: str = "error"

    def __post_init__(self) -> None:
        for name, known in (
            ("policy", POLICIES),
            ("tail", TAILS),
            ("admission", (False, True)),
            ("schedule", ("overlapped", "serial")),
            ("reduction", ("ordered", "native")),
            ("gradient_reduction", ("mean", "sum")),
            ("on_bad_id", ("error", "hash")),
            ("dtype", (torch.float32, torch.float64)),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{name}={value!r} is not {' or '.join(map(repr, known))}")
        self._check_policy()
        for name in ("lookahead", "prefetch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 0")

    def _check_policy(self) -> None:
        with library_words():
            policy = self.policy_settings
        if self.tail != "lru" and not policy.uses_window:
            raise ConfigError(f"tail={self.tail!r} is for policy='lookahead': leave it out")
        if policy.needs_popularity:
            name = "tail" if policy.uses_window else "policy"
            raise ConfigError(
                f"{name}={policy.ranking!r} ranks rows by statistics, which a collection cannot be "
                f"given yet: use {name}='lfu', which counts for itself"
            )

    @property
    def policy_settings(self) -> Policy:
        """Which rows leave first."""
        return Policy.of(self.policy, self.tail, self.admission, self.half_life)


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
