"""The settings of a collection by keyword, and errors in the words of the library."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any

import torch

from distcache.errors import ConfigError, DistcacheError
from distcache.planner.policy import DEFAULT, POLICIES, TAILS, Policy
from distcache.popularity.statistics import Statistics
from distcache.store.rows import ACCESS, STAGED

_LEAST = {"rows": 1, "bytes": 1, "lookahead": 0, "prefetch": 0, "batch_size": 1, "seed": 0}


@dataclass(frozen=True)
class CacheSettings:
    """How the rows of a collection are cached and summed; see `CachedEmbeddingBagCollection`.

    `statistics` may lie in another folder on each rank: what they say is compared, not where.
    """

    rows: int | None = None
    ratio: float | None = None
    bytes: int | None = None
    lookahead: int | str = "auto"
    prefetch: int = 1
    policy: str = DEFAULT.name
    tail: str = DEFAULT.tail
    half_life: float | str = "auto"
    statistics: Any = field(default=None, repr=False)
    warm_start: float | str = "auto"
    split: Any = "proportional"
    batch_size: int | None = None
    placement: str = "replicated"
    state: str = "replicated"
    replicated_rows: Any = None
    replicated_share: float | None = None
    cluster: Any = field(default=None, repr=False)
    schedule: str = "overlapped"
    store_access: str = STAGED
    reduction: str = "ordered"
    gradient_reduction: str = "mean"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    on_bad_id: str = "error"
    on_nonfinite: str = "off"

    def __post_init__(self) -> None:
        for name, known in (
            ("policy", POLICIES),
            ("tail", TAILS),
            ("schedule", ("overlapped", "serial")),
            ("store_access", ACCESS),
            ("reduction", ("ordered", "native")),
            ("gradient_reduction", ("mean", "sum")),
            ("on_bad_id", ("error", "hash")),
            ("on_nonfinite", ("off", "skip", "stop")),
            ("placement", ("replicated", "sharded", "mixed", "auto")),
            ("state", ("auto", "home", "replicated")),
            ("dtype", (torch.float32, torch.float64)),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{name}={value!r} is not {' or '.join(map(repr, known))}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in ("rows", "bytes", "batch_size"):
                continue
            if value == "auto" and name == "lookahead":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}")
        self._check_policy()
        self._check_popularity()
        self._check_placement()

    def _check_placement(self) -> None:
        kind, rows, share = self.placement, self.replicated_rows, self.replicated_share
        for name, value in (("replicated_rows", rows), ("replicated_share", share)):
            if value is not None and kind != "mixed":
                raise ConfigError(f"{name}={value!r} is for placement='mixed': leave it out")
        if rows is not None and share is not None:
            raise ConfigError("give replicated_rows or replicated_share, not both")
        if rows is not None and not isinstance(rows, Mapping):
            raise ConfigError(f"replicated_rows={rows!r} is no {{table: rows}}")
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"replicated_share={share!r} is a share of the rows, above 0 to 1")
        if kind in ("mixed", "auto"):
            self._needs_statistics(f"placement={kind!r}", True)
        if kind == "auto" or (kind == "mixed" and rows is None and share is None):
            self._needs_batch_size(f"placement={kind!r}", True)
        if self.state == "home" and self.reduction == "native":
            raise ConfigError(
                "state='home' keeps sums at home, and reduction='native' sums everywhere: leave "
                "one of them out"
            )

    def _check_policy(self) -> None:
        with library_words():
            policy = self.policy_settings
        if self.tail != DEFAULT.tail and not policy.uses_window:
            raise ConfigError(f"tail={self.tail!r} is for policy='lookahead': leave it out")
        name = "tail" if policy.uses_window else "policy"
        if self.half_life != "auto" and policy.ranking != "lfu":
            raise ConfigError(
                f"half_life={self.half_life!r} is for policy='lfu' or tail='lfu', not "
                f"{name}={policy.ranking!r}: leave it out"
            )
        self._needs_statistics(f"{name}={policy.ranking!r}", policy.needs_popularity)
        self._needs_batch_size(f"{name}={policy.ranking!r}", policy.ranking == "static")

    def _check_popularity(self) -> None:
        warm, by_curve = self.warm_start, self.split == "by_curve"
        number = isinstance(warm, int | float) and not isinstance(warm, bool)
        if warm != "auto" and not (number and 0 <= float(warm) <= 1):
            raise ConfigError(
                f"warm_start={warm!r} is a share of the slots, from 0 to 1, or 'auto'"
            )
        if not (isinstance(self.split, Mapping) or self.split in ("proportional", "by_curve")):
            raise ConfigError(
                f"split={self.split!r} is not 'proportional', 'by_curve' or {{table: rows}}"
            )
        self._needs_statistics(f"warm_start={warm!r}", warm not in ("auto", 0))
        self._needs_statistics(f"split={self.split!r}", by_curve)
        self._needs_batch_size(f"split={self.split!r}", by_curve)

        given = self.statistics
        if not (given is None or isinstance(given, str | PathLike | Statistics)):
            raise ConfigError(
                f"statistics={given!r} is neither a folder nor a distcache Statistics"
            )

    def _needs_statistics(self, what: str, needed: bool) -> None:
        if needed and self.statistics is None:
            raise ConfigError(
                f"{what} needs to know how often rows are looked up: give statistics=<folder of "
                "python -m distcache.analyze or preprocess, or a Statistics>"
            )

    def _needs_batch_size(self, what: str, needed: bool) -> None:
        if needed and self.batch_size is None:
            raise ConfigError(
                f"{what} needs to know how many rows a step looks up: give batch_size=<samples of "
                "an optimizer step over all ranks>"
            )

    @property
    def policy_settings(self) -> Policy:
        """Which rows leave first."""
        return Policy.of(self.policy, self.tail, self.half_life)


_WENT = {
    "order": "numbering rows by popularity gained nothing and made plans slower",
    "admission": "rows that leave first unless they score higher changed next to nothing",
}
"""Settings that were there once, and why they are not."""


def check_names(settings: Mapping[str, Any], collection: str) -> None:
    """ConfigError for a setting by keyword that a collection does not have."""
    known = [f.name for f in fields(CacheSettings)]
    for name, value in settings.items():
        if name in _WENT:
            raise ConfigError(
                f"{collection}: {name}={value!r}: this setting went, for {_WENT[name]}: leave it "
                "out"
            )
        if name not in known:
            near = difflib.get_close_matches(name.removeprefix("cache_"), known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"{collection}: {name}={value!r}: no such setting: {hint}")


_WORDS = (
    ("data.on_bad_id=hash", "on_bad_id='hash'"),
    ("data.table_rows, model.embedding_dim", "num_embeddings, embedding_dim"),
    ("data.global_batch_size", "the batch size"),
    ("store.access=staged", "store_access='staged'"),
    ("store.access=zero_copy", "store_access='zero_copy'"),
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
            # Not inside a longer word, such as distcache.analyze.
            text = re.sub(rf"(?<![a-z]){re.escape(key)}", lambda found, word=word: word, text)
        error.args = (text,)
        raise
