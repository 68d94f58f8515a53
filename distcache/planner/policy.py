"""Which rows leave first: the settings of a policy, as plain values. `victims` carries them out."""

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
