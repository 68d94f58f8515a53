"""The interface of the parallel modes `data`, `hybrid`, `resident` and `host`, and what they share:
precision, and what a run counts."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distcache.comm.link import run_on_all_ranks
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.engine.full_tables import Snapshot
from distcache.engine.gradients import StepResult
from distcache.engine.step import MoveCounts, StageClock, StepContext, Watcher
from distcache.engine.tables import CachedTables
from distcache.errors import ConfigError
from distcache.optim import load_state, state_tensors
from distcache.store.table_files import Stored

log = logging.getLogger(__name__)

_MODEL, _OPTIMIZER = "dense.", "dense_optim."
"""What begins the names of the dense part's values in a checkpoint."""


@dataclass(frozen=True)
class Step:
    """A batch with the mode's own handle on it (for cached modes: the step on its way through the
    stages)."""

    batch: Batch
    context: Any = None


class LateResult:
    """A result that is read when someone looks at it: the device may still be at work."""

    def __init__(self, read: Callable[[], StepResult]) -> None:
        self.read = read

    def __getattr__(self, name: str) -> Any:
        return getattr(self.read(), name)


class Parallel(ABC):
    """A model whose tables lie in one of four ways; every method is called by all ranks in order.

    The dense part is `model(dense [b, F], pooled [b, sum of widths]) -> logits [b]`, and
    `dense_optimizer` updates it; `clock`: of the stages of steps.
    """

    model: nn.Module
    dense_optimizer: torch.optim.Optimizer
    clock: StageClock

    result_delay: int = 0
    """How many steps later the result of a step is best looked at; earlier means waiting for it.
    At most so many later steps change nothing after one whose loss is not finite."""

    scratch: Path | None = None
    """Folder on disk for temporary files; None: the system's."""

    @abstractmethod
    def stream(self, batches: Iterable[Batch]) -> Iterator[Step]:
        """The batches with what the mode must know before each runs (plans), in order."""

    @abstractmethod
    def train_step(self, step: Step, asks: int = 0) -> StepResult:
        """Forward, backward, sync and apply; `asks`: bits (`gradients.STOP` ...) that this rank
        tells all ranks with this step."""

    @abstractmethod
    def eval_step(self, step: Step) -> Tensor:
        """Logits `[b]` of this rank's slice; changes no weight."""

    @abstractmethod
    def set_lr(self, dense_lr: float, embedding_lr: float) -> None:
        """Learning rates of the coming steps."""

    @abstractmethod
    def flush(self) -> None:
        """Make the whole tables readable by `table_block` and `state_dict`."""

    @abstractmethod
    def table_block(self, table: int, start: int, stop: int) -> Tensor | None:
        """Rows [start, stop) of a table in original ids, `[stop - start, D]` on the CPU.

        Rank 0 gets the tensor, others may get None. After `flush`.
        """

    @abstractmethod
    def fill_table(self, table: int, source: Stored) -> None:
        """Let the first rows of a table have the weights of `source`, `[rows, D]`; before any
        step."""

    def dense_state(self) -> dict[str, Tensor]:
        """The dense parameters by name, unwrapped, in parameter order (CPU or device tensors)."""
        return {name: value.detach() for name, value in self.model.named_parameters()}

    def dense_values(self) -> dict[str, Tensor]:
        """The dense part in a checkpoint: `dense.<name>` of the model's state, and
        `dense_optim.<parameter>.<state>` of its optimizer's."""
        state = {f"{_MODEL}{name}": value for name, value in self.model.state_dict().items()}
        optimized = state_tensors(self.dense_optimizer, self.model)
        return state | {f"{_OPTIMIZER}{name}": value for name, value in optimized.items()}

    def load_dense(self, state: dict[str, Any]) -> None:
        """Take back what `dense_values` gave, from among the values of a checkpoint."""
        model, optimizer = (
            {key.removeprefix(own): v for key, v in state.items() if key.startswith(own)}
            for own in (_MODEL, _OPTIMIZER)
        )
        self.model.load_state_dict(model)
        load_state(self.dense_optimizer, self.model, optimizer)

    def snapshot(self, folder: Path) -> Snapshot | None:
        """The tables of `state_dict` as they are now, after a flush, to be read while steps go on;
        `folder`: see `Snapshot`. None where tables must be read before the next step."""
        return None

    def mark(self) -> int | None:
        """A mark at this step, right after a flush, in place of the one before, for `state_dict`;
        None where the mode keeps none."""
        return None

    @abstractmethod
    def state_dict(self, since: int | None = None) -> dict[str, Any]:
        """All that `torch.distributed.checkpoint` must save for the same trajectory to go on.

        Keys: `tables.<name>.weight`, `tables.<name>.<state>`, `dense.<parameter>`,
        `dense_optim.*`, counters. Tensors are whole tables in original ids (or shards of them).
        `since`: a mark; of tables there may be the rows alone that changed since, `ChangedRows`.
        """

    def blank_state(self) -> dict[str, Any]:
        """`state_dict` to be filled by a load: the values of its tensors do not matter."""
        return self.state_dict()

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, after `torch.distributed.checkpoint` filled it."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """This mode's values of `summary.json`; None where a value does not exist here."""

    @abstractmethod
    def errors_are_common(self) -> bool:
        """Whether what the stream raised was raised on all ranks, after the same whole step."""

    def progress(self) -> dict[str, Any]:
        """This rank's numbers for a log line; no wait. None that this mode does not have.

        `hit_rate`: so far. Since the last call, per training step: `stage_ms`, `stage_hidden_ms`,
        `stall_ms` (the loop waited for plans and rows), and `hidden_share`, the part of planning
        and movement that nothing waited for.
        """
        return {}

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` with the spans of each step once it has ended."""
        self.clock.watchers.append(watcher)

    @abstractmethod
    def close(self) -> None:
        """Stop threads and free tables; safe to call twice."""


# -----------------------------------------------------------------------------
# Precision of the dense part: bfloat16 under autocast, and TF32 in float32 products.


def predict(model: nn.Module, dense: Tensor, pooled: Tensor, amp: str) -> Tensor:
    """Logits `[b]` of `model(dense [b, F], pooled [b, sum of widths])`.

    `amp`: `off`, or `bf16`: the model runs under `torch.autocast`, so that its products are taken
    in bfloat16; parameters, `pooled`, all gradients, and the logits returned keep their dtype.
    Raises ConfigError for a model that returns another shape.
    """
    with torch.autocast(pooled.device.type, torch.bfloat16, enabled=amp == "bf16"):
        logits = model(dense, pooled)
    if logits.shape != dense.shape[:1]:
        raise ConfigError(
            f"the model returned {list(logits.shape)} for {len(dense)} samples: return logits [b], "
            "such as x.squeeze(-1) of [b, 1]"
        )
    return logits if amp == "off" else logits.to(pooled.dtype)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let CUDA take float32 products and convolutions in TF32, or not, in this process meanwhile.

    The settings before come back at the end. torch lets convolutions use TF32 unless told not to.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    parts = (matmul, cudnn.conv, cudnn.rnn)
    before = [part.fp32_precision for part in parts]
    # torch keeps two sets of switches and refuses to read the old one where they disagree: both.
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    for part in parts:
        part.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        matmul.allow_tf32 = before[0] == "tf32"
        cudnn.allow_tf32 = before[1] == "tf32"
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision


# -----------------------------------------------------------------------------
# Global batches whose slices the ranks bring themselves: sizes are agreed step by step.


def agreed_batches(batches: Iterable[Batch], world: World) -> Iterator[Batch]:
    """The batches with their places among the slices of all ranks, until the first rank's end.

    From the main thread: one small exchange per batch. An error of one rank ends all.
    """
    iterator, number = iter(batches), 0
    drawn: list[Batch] = []

    def draw() -> int | None:
        """Take the next batch; its samples, None at the end."""
        drawn[:] = islice(iterator, 1)
        return drawn[0].ids.batch_size if drawn else None

    while True:
        sizes = run_on_all_ranks(world, draw)
        ended = [rank for rank, size in enumerate(sizes) if size is None]
        if ended:
            if drawn:
                log.warning(
                    "the data of rank %s ended at batch %d; this rank had more, left unread",
                    ended,
                    number,
                )
            return
        yield drawn[0].among([size for size in sizes if size is not None], world.rank)
        number += 1


# -----------------------------------------------------------------------------
# What a run of a cached mode counts for `summary.json`: bytes, rows, phases, the ranks' shares.

COLLECTIVE = ("fill", "share_early", "share_late", "sync", "return_rows")
"""Stages of several ranks that exchange."""


class StepStatistics:
    """Counts over all training steps of this process on `tables`, and the `clock` of their stages.

    Of this rank: `home_rows`, rows of its home that some rank looked up; `received`, sharded rows
    that came to it from their homes, and `early`, those of them that came before their step.
    """

    def __init__(self, tables: CachedTables) -> None:
        self.distinct = self.misses = self.lookups = self.lookup_hits = 0
        self.steps = self.home_rows = self.received = self.early = 0
        self._tables, self._own_bytes, self._early_bytes = tables, 0, 0
        self.clock = StageClock()
        self._phases = {"hot": MoveCounts(), "cold": MoveCounts()}
        self._phase_steps = dict.fromkeys(self._phases, 0)

    def add(self, context: StepContext) -> None:
        """Count one training step.

        Row buffers: the replicated rows' copies, their gradients and the sums (3 U D), sharded ones
        as they come and go at rank and home, and what was fetched and evicted, (D + S) each.
        Sharded rows that came early lie there for as many steps as movement is ahead.
        """
        self.steps += 1
        buffers = early = 0
        if phase := context.batch.phase:
            self._phase_steps[phase] += 1
            for counts in context.counts:
                self._phases[phase].add(counts)
        for plan, group in zip(context.plans, self._tables.rows, strict=True):
            kind, dim = group.cache.kind, group.cache.dim
            distinct, misses, shard = plan.distinct, plan.misses, plan.shard
            moved, kept = misses + plan.evict_slots.shape[0], 3 * distinct
            self.home_rows += plan.home_counts[self._tables.world.rank]
            self.lookups += plan.positions.shape[0]
            self.lookup_hits += plan.lookup_hits
            if shard is not None:
                count, own = shard.rows, shard.slots.shape[0]
                moved += shard.fetch_slots.shape[0] + shard.evict_slots.shape[0]
                copies = 2 if distinct == 0 else 3  # joined with the replicated ones
                kept += copies * count + 2 * shard.source_rows.shape[0] + own
                distinct, misses = distinct + shard.distinct, misses + shard.misses
                self.home_rows += own
                self.received += count
                if shard.early is not None:
                    early += count * dim * kind.stored.itemsize
                    self.early += shard.early.places.shape[0]
            self.distinct += distinct
            self.misses += misses
            buffers += kept * dim * kind.dtype.itemsize + moved * group.row_bytes
        self._own_bytes = max(self._own_bytes, buffers)
        self._early_bytes = max(self._early_bytes, early)

    @property
    def row_buffer_bytes(self) -> int:
        """The most that the rows of steps took beside the slots."""
        return self._own_bytes + self._tables.settings.prefetch * self._early_bytes

    def hit_rate(self) -> float | None:
        """Distinct rows found cached when planned / distinct rows, so far; None before any."""
        return 1 - self.misses / self.distinct if self.distinct else None

    def summary(self, dense_bytes: int = 0) -> dict[str, Any]:
        """Values of `summary.json`, over all ranks; called by all of them.

        `dense_bytes`: parameters, gradients and optimizer state of the dense part.
        """
        tables, clock = self._tables, self.clock
        world, rows, counters = tables.world, tables.rows, tables.counters
        embedding = sum(group.cache.device_bytes for group in rows) + self.row_buffer_bytes
        most = {"embedding": embedding, "peak": embedding + dense_bytes, "home": self.home_rows}
        if world.device.type == "cuda":
            most["peak"] = torch.cuda.max_memory_allocated(world.device)
        most = over_ranks(world, most, max)
        moved = [vars(group.counts) for group in rows]
        own = {name: sum(counts[name] for counts in moved) for name in vars(MoveCounts())}
        own |= {"lookups": self.lookups, "hits": self.lookup_hits} | dict(counters.values())
        own |= {"home": self.home_rows, "received": self.received, "early": self.early}
        for name, counts in self._phases.items():
            own[f"{name}_rows_fetched"] = counts.rows_fetched
            own[f"{name}_host_bytes"] = counts.host_to_device_bytes + counts.device_to_host_bytes
        total = over_ranks(world, own)
        took, hidden = clock.mean_ms(), clock.hidden_ms()
        values = {
            "hit_rate": self.hit_rate(),
            "hit_rate_lookups": total["hits"] / total["lookups"] if total["lookups"] else None,
            **{name: total[name] for name in vars(MoveCounts())},
            **{name: total[name] // world.size for name in counters.values()},
            "embedding_device_bytes": most["embedding"],
            "peak_device_bytes": most["peak"],
            "cache_rows": sum(group.cache.slots for group in rows),
            "stage_ms": took,
            "stage_hidden_ms": hidden,
        }
        for name, steps in self._phase_steps.items() if any(self._phase_steps.values()) else ():
            keys = (f"{name}_rows_fetched", f"{name}_host_bytes")
            values |= {f"{name}_steps": steps} | {key: total[key] for key in keys}
        if world.size > 1:
            steps, received = max(self.steps, 1), total["received"]
            exchange = sum(took.get(name, 0.0) for name in COLLECTIVE)
            beside = sum(hidden.get(name, 0.0) for name in COLLECTIVE)
            values |= {
                "placement": tables.placement.kind,
                "cache_state": tables.placement.state,
                "home_rows_mean": total["home"] / world.size / steps,
                "home_rows_max": most["home"] / steps,
                "early_rows": total["early"] / received if received else None,
                "exchange_ms": exchange,
                "exchange_hidden": beside / exchange if exchange else None,
            }
        return values


def over_ranks(world: World, values: dict[str, int], op: Callable[..., int] = sum) -> dict:
    """The sums of `values` over all ranks, or what `op` makes of them."""
    by_rank = zip(*run_on_all_ranks(world, lambda: list(values.values())), strict=True)
    return dict(zip(values, map(op, by_rank), strict=True))


def held_bytes(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the dense part: its parameters, as many gradients, and optimizer state."""
    state = (value for own in optimizer.state.values() for value in own.values())
    tensors = sum(value.nbytes for value in state if isinstance(value, Tensor))
    return tensors + 2 * sum(parameter.nbytes for parameter in parameters)
