"""Cases to replay, and what they come to: plain values (`replay` carries them out)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distcache.errors import ConfigError
from distcache.planner.policy import Policy


@dataclass(frozen=True)
class Case:
    """One configuration. `policy` None: Belady's MIN, the offline optimum; `slots`: C per rank of
    each group; `lookahead` L, `prefetch` P and `world_size` W, as in training."""

    policy: Policy | None
    slots: tuple[int, ...]
    lookahead: int = 8
    prefetch: int = 1
    world_size: int = 1

    def __post_init__(self) -> None:
        if not self.slots or min(self.slots) < 1:
            raise ConfigError(f"slots {self.slots}: give at least one for each group of tables")
        numbers = {"lookahead": (self.lookahead, 0), "prefetch": (self.prefetch, 0)}
        for name, (value, least) in {**numbers, "world size": (self.world_size, 1)}.items():
            if value < least:
                raise ConfigError(f"{name} {value} must be at least {least}")

    @property
    def home_slots(self) -> tuple[int, ...]:
        """Slots of one home in each group: ceil(C / W)."""
        return tuple(-(-slots // self.world_size) for slots in self.slots)

    @property
    def label(self) -> str:
        """The policy in words, for tables."""
        if self.policy is None:
            return "MIN"
        admission = ", admission" if self.policy.admission else ""
        if self.policy.uses_window:
            return f"lookahead {self.lookahead}, {self.policy.tail}{admission}"
        return f"{self.policy.name}{admission}"


@dataclass(frozen=True)
class GroupCounts:
    """Counts of one group over all training steps and homes.

    `lookups_hit`: ids whose row was cached when planned; `distinct`: distinct rows, summed over
    steps; `fetched` and `written_back`: rows moved for training steps, as `rows_fetched` and
    `rows_written_back` of `summary.json`; `left_dirty`: rows that a checkpoint at the end writes.
    """

    ids: int = 0
    lookups_hit: int = 0
    distinct: int = 0
    fetched: int = 0
    written_back: int = 0
    left_dirty: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a case came to. `refused`: why training would refuse it, with nothing counted then;
    `tight_steps`: steps that found too few unheld slots, whose moves start later than P allows;
    `seconds`: what replaying it took."""

    case: Case
    steps: int
    groups: tuple[GroupCounts, ...]
    refused: str | None = None
    tight_steps: int = 0
    seconds: float = field(default=0.0, compare=False)

    @property
    def ids(self) -> int:
        """Lookups of all training steps."""
        return sum(group.ids for group in self.groups)

    @property
    def lookups_hit(self) -> int:
        """See `GroupCounts`, as for the others."""
        return sum(group.lookups_hit for group in self.groups)

    @property
    def distinct(self) -> int:
        """Distinct rows, summed over steps."""
        return sum(group.distinct for group in self.groups)

    @property
    def fetched(self) -> int:
        """Rows fetched."""
        return sum(group.fetched for group in self.groups)

    @property
    def written_back(self) -> int:
        """Rows written back."""
        return sum(group.written_back for group in self.groups)

    @property
    def left_dirty(self) -> int:
        """Dirty rows in the cache at the end."""
        return sum(group.left_dirty for group in self.groups)

    @property
    def hit_rate(self) -> float | None:
        """Share of distinct rows found cached, `hit_rate` of `summary.json`; None without any."""
        return 1 - self.fetched / self.distinct if self.distinct else None

    @property
    def hit_rate_lookups(self) -> float | None:
        """Share of lookups whose row was cached; None without any."""
        return self.lookups_hit / self.ids if self.ids else None

    def host_to_device_bytes(self, row_bytes: Sequence[int]) -> int:
        """Bytes fetched; `row_bytes`: of a row and its optimizer state, by group."""
        return sum(g.fetched * size for g, size in zip(self.groups, row_bytes, strict=True))

    def device_to_host_bytes(self, row_bytes: Sequence[int]) -> int:
        """Bytes written back, without what a checkpoint writes; `row_bytes` as above."""
        return sum(g.written_back * size for g, size in zip(self.groups, row_bytes, strict=True))
