"""Which rows leave first, and how far ahead is looked for that: a policy as plain values, which
`victims` carries out, and the window L that `auto` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distcache.errors import ConfigError

POLICIES = ("lookahead", "lfu", "lru", "frequency", "static")
"""`lookahead`: window-Belady, then `tail`; the others look at no window."""

TAILS = ("lru", "lfu", "frequency")
"""How `lookahead` ranks the rows without a use in the window."""

PINNED = 255
"""Popularity class of a row that leaves only where no other can."""

LONGEST = 10**9
"""Most steps of a half-life."""


@dataclass(frozen=True)
class Policy:
    """`name` of `POLICIES`; `tail` of `TAILS`; `half_life`: steps in which the counts of `lfu` lose
    half of their weight (None: chosen from slots and distinct rows)."""

    name: str = "lookahead"
    tail: str = "lfu"
    half_life: float | None = None

    def __post_init__(self) -> None:
        for key, value, known in (("policy", self.name, POLICIES), ("tail", self.tail, TAILS)):
            if value not in known:
                raise ConfigError(f"cache.{key}={value} is unknown: choose {' or '.join(known)}")
        life = self.half_life
        number = isinstance(life, int | float) and not isinstance(life, bool)
        if life is not None and not (number and 1 <= life <= LONGEST):
            raise ConfigError(
                f"cache.half_life={life} is out of range: give auto, or steps from 1 to {LONGEST}"
            )

    @classmethod
    def of(cls, name: str, tail: str, half_life: float | str) -> Policy:
        """The policy of a user's settings, where a half-life may be `auto`."""
        life: Any = None if half_life == "auto" else half_life
        return cls(name, tail, life)

    @property
    def uses_window(self) -> bool:
        """Whether the window's next uses decide before scores do."""
        return self.name == "lookahead"

    @property
    def ranking(self) -> str:
        """What ranks rows without a next use: `lru`, `lfu`, `frequency` or `static`."""
        return self.tail if self.uses_window else self.name

    @property
    def needs_popularity(self) -> bool:
        """Whether it reads the popularity class of each row (`cache.statistics`)."""
        return self.ranking in ("frequency", "static")


DEFAULT = Policy()
"""What is used where nothing is said."""

WINDOWS = (8, 16, 32, 64)
"""What `auto` chooses L from. On traces of users and items with half of the rows cached, a window
of 8 fetched 1.3 times what Belady's MIN does, one of 16 and more 1.05 (docs/results/policies.md);
beyond 64 little is left."""

WINDOW_BYTES = 64 << 20
"""Most bytes of ids that a window of `auto` keeps on a rank."""


def auto_lookahead(ids_per_step: float, prefetch: int) -> int:
    """L for `auto`: the largest of `WINDOWS` whose L + P + 1 steps of `ids_per_step` ids of a rank,
    8 bytes each, stay within `WINDOW_BYTES`; the smallest where none does. `prefetch`: P."""
    fits = (w for w in WINDOWS if 8 * ids_per_step * (w + prefetch + 1) <= WINDOW_BYTES)
    return max(fits, default=WINDOWS[0])
