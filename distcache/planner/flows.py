"""From counts of rows to bytes: what every rank sends, receives and moves in a step. Pure.

Stages have the names of `cost.traffic`; bytes are those of `comm.counters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distcache.planner.traffic import StepCounts

ROW_BYTES, REPLY_BYTES, HEADER_NUMBERS, CONTROL_NUMBERS = 8, 4, 8, 2
"""Of planning: a row asked for, an answer about it, numbers of a header besides counts, and of the
loss and the wish to stop."""


@dataclass(frozen=True)
class RowFormat:
    """Rows of one group: D elements, S of optimizer state, bytes of an element; `state`: where
    that of replicated rows lies, `replicated` or `home`."""

    dim: int
    state_width: int = 0
    itemsize: int = 4
    state: str = "replicated"

    @property
    def row_bytes(self) -> int:
        """Of a row."""
        return self.dim * self.itemsize

    @property
    def stored_bytes(self) -> int:
        """Of a row and its state."""
        return (self.dim + self.state_width) * self.itemsize

    @property
    def filled_bytes(self) -> int:
        """Of a fetched row as its home sends it to all ranks."""
        return self.row_bytes if self.state == "home" else self.stored_bytes


def flows(counts: StepCounts, row: RowFormat) -> dict[str, np.ndarray]:
    """Bytes of rows and row gradients by stage: int64 `[W, W]`, from rank (first index) to rank.

    The diagonal, what a rank keeps, is 0.
    """
    found: dict[str, np.ndarray] = {}
    near, far = counts.replicated, counts.sharded
    if near is not None:
        sums = "updated_rows" if row.state == "home" else "row_sums"
        found["fill"] = _to_all(near.fetched) * row.filled_bytes
        found["row_gradients"] = near.asked * row.row_bytes
        found[sums] = _to_all(near.rows) * row.row_bytes
    if far is not None:
        found["late_rows"] = far.late * row.row_bytes
        found["early_rows"] = (far.asked.T - far.late) * row.row_bytes
        found["sharded_row_gradients"] = far.asked * row.row_bytes
    return {stage: _leaving(flow) for stage, flow in found.items()}


def _to_all(rows: np.ndarray) -> np.ndarray:
    """What each home sends to every rank, `[W, W]` of `[W]`."""
    return np.repeat(rows[:, None], len(rows), axis=1)


def _leaving(flow: np.ndarray) -> np.ndarray:
    found = flow.copy()
    np.fill_diagonal(found, 0)
    return found


@dataclass(frozen=True)
class StepTraffic:
    """What ranks send in a step of all groups. Bytes are int64 `[W]`, by rank.

    `alone`: whether it is decided in an exchange that asks for no other step, with a header of its
    own: as the last L of a stream are, and all where L is 0."""

    counts: tuple[StepCounts, ...]
    rows: tuple[RowFormat, ...]
    alone: bool = False

    @property
    def kind(self) -> str:
        """`train` or `eval`."""
        return self.counts[0].kind

    @cached_property
    def flows(self) -> dict[str, np.ndarray]:
        """The `flows` of all groups together."""
        found: dict[str, np.ndarray] = {}
        for counts, row in zip(self.counts, self.rows, strict=True):
            for stage, flow in flows(counts, row).items():
                found[stage] = found[stage] + flow if stage in found else flow
        return found

    @property
    def sent(self) -> np.ndarray:
        """Of rows and row gradients: `collective_bytes` of each rank."""
        return sum(flow.sum(1) for flow in self.flows.values())  # type: ignore[return-value]

    @property
    def received(self) -> np.ndarray:
        """Of rows and row gradients, that come to each rank."""
        return sum(flow.sum(0) for flow in self.flows.values())  # type: ignore[return-value]

    @cached_property
    def planning(self) -> np.ndarray:
        """`planning_bytes` of each rank."""
        return planning_sent(self.counts, 2 if self.alone else 1)

    @property
    def host_read(self) -> np.ndarray:
        """Read from each home's store for the step."""
        return self._of_store("fetched")

    @property
    def host_written(self) -> np.ndarray:
        """Written back to each home's store for the step."""
        return self._of_store("written_back")

    def _of_store(self, what: str) -> np.ndarray:
        return sum(
            getattr(region, what) * row.stored_bytes
            for counts, row in zip(self.counts, self.rows, strict=True)
            for region in counts.regions
        )  # type: ignore[return-value]

    @property
    def fetched(self) -> int:
        """Rows fetched over all homes."""
        return sum(int(r.fetched.sum()) for counts in self.counts for r in counts.regions)

    @property
    def written_back(self) -> int:
        """Rows written back over all homes."""
        return sum(int(r.written_back.sum()) for counts in self.counts for r in counts.regions)

    @property
    def home_rows(self) -> np.ndarray:
        """Distinct rows of each home."""
        return sum(r.rows for counts in self.counts for r in counts.regions)  # type: ignore


def planning_sent(groups: Sequence[StepCounts], headers: int = 1) -> np.ndarray:
    """Bytes of integers that each rank sends for a step of all groups, int64 `[W]`.

    As `planning_bytes`: headers, requests and decisions (`pipeline.exchange`), and the loss with
    a flag, on one node (on several, homes also send masks: `planner.relays`).
    """
    near = [group.replicated for group in groups if group.replicated is not None]
    far = [group.sharded for group in groups if group.sharded is not None]
    world = len((near + far)[0].rows)
    if world == 1:
        return np.zeros(1, dtype=np.int64)
    numbers = HEADER_NUMBERS + (len(near) + len(far)) * (3 + world)
    flow = np.zeros((world, world), dtype=np.int64)
    for region in near + far:
        flow += region.asked * ROW_BYTES + region.asked.T * REPLY_BYTES
    for region in near:
        flow += _to_all(region.rows + region.fetched) * REPLY_BYTES
    about = headers * 8 * numbers * (world - 1)
    control = (world - 1) * 8 * CONTROL_NUMBERS
    return _leaving(flow).sum(1) + about + control


@dataclass(frozen=True)
class Load:
    """How evenly something lies over the ranks: `mean`, and `largest`, of one rank."""

    mean: float
    largest: float

    @classmethod
    def of(cls, by_rank: np.ndarray) -> Load:
        """From the amounts of all ranks, `[W]`."""
        return cls(float(np.mean(by_rank)), float(np.max(by_rank)))

    @property
    def ratio(self) -> float:
        """Largest over mean; 1 where there is nothing."""
        return self.largest / self.mean if self.mean else 1.0
