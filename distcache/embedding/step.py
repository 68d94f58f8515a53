"""One optimizer step of a collection: autograd's hooks, and the step that is open.

All that concerns rows is `distcache.engine.tables.CachedTables`. Here is when its exchanges happen:
a step opens when the first of its batches comes through the model, its row gradients are summed at
the end of the backward pass in which the last has taken part, and `RowOptimizer.step` applies them.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable

from distcache.comm.agreement import agree_on, agree_on_versions, together
from distcache.comm.failure import record_failure
from distcache.comm.link import PLANNING, host_link
from distcache.comm.world import World
from distcache.data.batch import Batch, check_ids
from distcache.embedding.ids import Lookups, ReadIds, as_batch
from distcache.embedding.settings import CacheSettings, decide_rows, library_words
from distcache.engine.groups import TableGroup
from distcache.engine.movement import GroupRows
from distcache.engine.step import (
    FORWARD,
    FORWARD_BACKWARD,
    TRAINING_LANE,
    Flight,
    Span,
    Stage,
    StageClock,
    record,
)
from distcache.engine.tables import CachedTables, RowChoice, RowSums, TableSettings
from distcache.errors import DataError, NonFiniteLossError, PlanError
from distcache.layout import TableSpec
from distcache.optim import RowUpdate
from distcache.parallel.base import StepStatistics
from distcache.planner.victims import WINDOWS, auto_lookahead
from distcache.store.memory import describe_bytes
from distcache.streams import COMPUTE, Mark

if TYPE_CHECKING:
    from distcache.embedding.stream import Epoch, Runner, Source

log = logging.getLogger(__name__)

KEPT_BYTES = 256 << 20
"""Most bytes of whole batches that a look-ahead keeps on a rank for a window beyond the least."""

_RECORD_DELAY = 2
"""Steps after which stages are timed where the device works on: earlier the host would wait."""

STOP_S = 60.0
"""Longest wait for the planner's last exchange with the other ranks, seconds."""

LEAVING_S = 5.0
"""Longest wait for threads whose steps are of no use, seconds: at the interpreter's end, where they
may be waiting for other ranks, which look for this one's failure every second or after three; and
for a look-ahead that nobody holds, which ranks that leave theirs at the same step do in turn."""


# -----------------------------------------------------------------------------
# What the optimizer of the rows sees of a step.

_NORMS = {
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    torch.Tensor.norm,
    torch._foreach_norm,
}


class HomeGradient(Tensor):
    """The gradient of rows whose sums lie at this rank's home alone: a norm of it would count other
    rows on every rank, so torch's functions for that are refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise PlanError for a norm; all else is as of any tensor."""
        if func in _NORMS:
            raise PlanError(
                "each rank has the gradients of other rows (placement='sharded' or 'mixed', or "
                "state='home'), so their norm on one rank is not the gradient's: clip with "
                "distcache.clip_grad_norm_(model.parameters(), ebc, max_norm)"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


@dataclass
class RowPart:
    """Rows of one group as the optimizer has them: `rows`, whose `.grad` is what is applied.

    `at_home`: whether the sums lie at this rank's home alone, not on every rank; `sharded`: which
    of the sums of `group` they are.
    """

    group: int
    rows: Tensor
    at_home: bool
    sharded: bool


class OpenStep:
    """A planned step whose rows are on the device, with its micro-batches `reads`.

    Every forward looks up in the same leaves, one `[U + N, D]` for each group, so gradients gather
    there. The end of the backward pass in which the last micro-batch has taken part sums them over
    the ranks: from then on the `.grad` of `params` is what will be applied.
    """

    def __init__(
        self,
        tables: CollectionTables,
        flight: Flight,
        reads: list[ReadIds],
        leaves: Sequence[Tensor],
        frozen: frozenset[int],
    ) -> None:
        """`frozen`: the tables, by index, that this step leaves as they are."""
        self._tables, self.flight, self.reads, self.frozen = tables, flight, reads, frozen
        self.trains = [not frozen.issuperset(group.tables) for group in tables.groups]
        """Whether any table of each group is updated."""
        self.leaves: list[Tensor] | None = None
        self.parts: list[RowPart] = []
        self.guard: Tensor | None = None
        """One number, whose gradient is 0, or infinite where some home's sums are not finite: all
        ranks' scalers see the same."""
        self._began = self._looked_up = 0.0
        self._forwarded: set[int] = set()
        self._backed: set[int] = set()
        self.reduced = False
        self.finite: Tensor | None = None
        """Bool `[1]` on the device, the same on all ranks: whether all sums were finite."""
        self.choices: list[list[RowChoice]] | None = None
        """By group, once reduced, where its rows are not all updated alike."""
        self._task = -1
        self._take(leaves)

    @property
    def number(self) -> int:
        """Position in the stream of planned steps."""
        return self.flight.step

    @property
    def params(self) -> list[Tensor]:
        """What the optimizer of the rows has as parameters."""
        found = [part.rows for part in self.parts]
        return found if self.guard is None else [*found, self.guard]

    @property
    def pending(self) -> bool:
        """Whether gradients wait to be applied or dropped."""
        return any(leaf.grad is not None for leaf in (self.leaves or [])) or any(
            part.rows.grad is not None for part in self.parts
        )

    # --- forward ----------------------------------------------------------------------------

    def pooled(self, micro: int) -> Tensor:
        """The bags of micro-batch `micro`, `[b, sum of widths]`, recorded if gradients are."""
        pooled = self._tables.engine.pooled(self.flight, self._current_leaves(), micro)
        self._watch(micro, [pooled])
        return pooled

    def rows(self, micro: int) -> list[Tensor]:
        """The row of every id of micro-batch `micro`, by lookup: `[n_f, D_f]` each."""
        found = self._tables.engine.lookup(self.flight, self._current_leaves(), micro)
        self._watch(micro, found)
        return found

    def _current_leaves(self) -> list[Tensor]:
        """The leaves; read again once a step has changed its rows, by all ranks."""
        if self.leaves is None:
            self._take(self._tables.engine.leaves(self.flight))
        return self.leaves or []

    def _take(self, leaves: Sequence[Tensor]) -> None:
        self._began = self._looked_up = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():
            pairs = zip(leaves, self.trains, strict=True)
            self.leaves = [leaf.requires_grad_(trains) for leaf, trains in pairs]
            self.parts = self._tables.parts_of(self.flight, self.leaves)
            homes = any(part.at_home for part in self.parts)
            self.guard = self.leaves[0].new_zeros(1).requires_grad_() if homes else None
        step = weakref.ref(self)
        for leaf in self.leaves:
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(_AfterAccumulate(step))
        self._tables.show_leaves(self.params)

    def _watch(self, micro: int, found: Iterable[Tensor]) -> None:
        """Learn when a backward pass goes through this lookup, if gradients are recorded."""
        self._looked_up = time.perf_counter()
        if not torch.is_grad_enabled():
            return
        self._forwarded.add(micro)
        step = weakref.ref(self)

        def mark(gradient: Tensor) -> None:
            alive = step()
            if alive is not None:
                alive._backed.add(micro)

        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(mark)

    # --- backward ---------------------------------------------------------------------------

    def accumulated(self, leaf: Tensor) -> None:
        """A backward pass has added to the gradient of `leaf`: look at the end of the pass."""
        if self.leaves is None or not any(leaf is own for own in self.leaves):
            raise _too_late()
        if self.reduced:
            raise PlanError(
                f"step {self.number}: a backward pass came after its row gradients were summed "
                "over the ranks; sum the losses of one step and call backward once, or read with "
                "lookahead(batches, ebc, accumulate=k) for k micro-batches per step"
            )
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        if len(self._backed) == len(self.reads):
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the row gradients over the ranks, once; all ranks do it for the same step."""
        if self.reduced or self.leaves is None or not any(self.trains):
            return
        self._span(FORWARD_BACKWARD, time.perf_counter())
        local = [
            (torch.zeros_like(at) if at.grad is None else at.grad) if trains else None
            for at, trains in zip(self.leaves, self.trains, strict=True)
        ]
        sums = self._tables.summed(self, local)
        for leaf in self.leaves:
            leaf.grad = None
        for part in self.parts:
            found = (sums.sharded if part.sharded else sums.replicated)[part.group]
            if found is not None and part.at_home:
                found = found.as_subclass(HomeGradient)
            part.rows.grad = found
        if self.guard is not None and self.finite is not None:
            self.guard.grad = torch.where(self.finite, 0.0, math.inf).to(self.guard)
        self.reduced = True

    # --- step -------------------------------------------------------------------------------

    def sums(self) -> RowSums:
        """The gradients to apply, as the optimizer's users have left them."""
        found = RowSums([None] * len(self.trains), [None] * len(self.trains))
        for part in self.parts:
            if part.rows.grad is not None:
                of = found.sharded if part.sharded else found.replicated
                of[part.group] = part.rows.grad.as_subclass(Tensor)
        return found

    def drop(self) -> None:
        """Forget the gradients so far (`zero_grad`)."""
        for tensor in (*(self.leaves or []), *self.params):
            tensor.grad = None
        self.reduced = False

    def ready(self, without_backward: bool = False) -> bool:
        """Whether there is something to apply, summed by then; all ranks ask.

        Raises PlanError where a step would lose part, and, unless `without_backward`, where no
        backward pass has come here.
        """
        if self.leaves is None or not self._forwarded or not any(self.trains):
            return False
        if (self._backed or self.reduced) and not self.pending:
            return False  # dropped by zero_grad
        total = len(self.reads)
        if len(self._forwarded) < total:
            raise PlanError(
                f"step {self.number} was read as {total} micro-batches (accumulate={total}), of "
                f"which {len(self._forwarded)} have gone through the model: call step() after "
                "the last"
            )
        if not (self._backed or self.reduced or without_backward):
            raise PlanError(
                f"step {self.number}: step() without a backward pass through the collection; call "
                "loss.backward() first, or no step(); where the loss of this rank alone does not "
                "depend on the embeddings, call ebc.reduce() after its backward"
            )
        self.reduce()
        return True

    def _span(self, stage: Stage, end: float) -> None:
        span = Span(stage.name, TRAINING_LANE, self.number, self._began, end)
        self.flight.spans.append(span)

    def leave(self) -> None:
        """The step ends without having been applied: to the stages' times it was an evaluation."""
        if self.flight.spans:  # else all is told
            self._span(FORWARD, self._looked_up)
            self.flight.batch = replace(self.flight.batch, kind="eval")

    def close(self) -> None:
        """The rows have changed or left: leaves are stale, late backward passes are errors."""
        self.drop()
        self.leaves, self.parts, self.guard = None, [], None
        self._forwarded.clear()
        self._backed.clear()


class _AfterAccumulate:
    """The hook of a leaf. It holds the step weakly: a step that is gone has no business there."""

    def __init__(self, step: weakref.ref[OpenStep]) -> None:
        self._step = step

    def __call__(self, leaf: Tensor) -> None:
        step: Any = self._step()
        if step is None:
            raise _too_late()
        step.accumulated(leaf)


def _too_late() -> PlanError:
    return PlanError(
        "a backward pass reached the rows of a step that has ended: call backward before step() "
        "and before the next batch's forward; for several batches per step read with "
        "lookahead(batches, ebc, accumulate=k)"
    )


# -----------------------------------------------------------------------------
# The tables of a collection over the engine, and the one step that is open.


def collection_values(
    name: str,
    tables: Sequence[TableSpec],
    lookups: Lookups,
    update: RowUpdate,
    settings: CacheSettings,
) -> dict[str, Any]:
    """What to compare over the ranks of the collection `name`.

    Without the statistics, which may lie elsewhere on each rank: what they say is compared later.
    """
    values = {
        "the collection": name,
        "the order of tables": [table.name for table in tables],
        "the features": lookups.features,
        "optimizer": update,
    }
    values |= {f"table {table.name!r}": table for table in tables}
    own = [f.name for f in fields(settings) if f.repr]
    return values | {name: getattr(settings, name) for name in own}


class CollectionTables:
    """The engine's tables behind one collection, and `current`, the step that was opened last.

    Called by all ranks of `world` in the same order, but for what says otherwise.
    """

    def __init__(
        self,
        world: World,
        tables: Sequence[TableSpec],
        lookups: Lookups,
        update: RowUpdate,
        settings: CacheSettings,
        name: str,
        pooled: bool,
    ) -> None:
        """`name`: what the tables are behind, for messages; `pooled`: bags come out."""
        self.world, self.tables, self.update, self.name = world, list(tables), update, name
        self.settings, self._lookups = settings, [self.tables[table] for table in lookups.tables]
        own = collection_values(name, self.tables, lookups, update, settings)
        agree_on_versions(world)
        agree_on(world, own | {"device": world.device.type})
        named = [
            replace(table, features=tuple(lookups.features[int(f)] for f in table.features))
            for table in self.tables
        ]
        features = [feature for table in tables for feature in table.features]
        with library_words():
            placed = decide_rows(world, named, update, settings)
            engine = TableSettings(
                slots=placed.slots,
                lookahead=settings.window,
                prefetch=settings.prefetch,
                policy=settings.policy_settings,
                reduction=settings.reduction,
                seed=settings.seed,
                dtype=settings.dtype,
                fingerprint=zlib.crc32(repr(own).encode()),
                schedule=settings.schedule,
                placement=placed.placement,
                access=settings.store_access,
                pooled=pooled,
            )
            parts = (world, self.tables, features, update, engine)
            self.engine = CachedTables(*parts, placed.popularity, self._checked)
        self.current: OpenStep | None = None
        self.counts = [0] * len(self.tables)
        """Optimizer steps applied to each table so far: one that is frozen does not count."""
        self.skipped = 0
        """Steps that were left out because their gradients were not finite."""
        self._agreed: Callable[[], Tensor] | None = None
        self._enabled = torch.ones(1, dtype=torch.bool, device=world.device)
        self._judged: list[tuple[int, tuple[int, ...], Tensor, Mark]] = []
        self.closed = False
        self._streams: list[weakref.ref[Epoch]] = []
        self.leaving: list[Runner] = []
        """Behind look-aheads that nobody holds any more; may still be ending."""
        self.show_leaves: Callable[[list[Tensor]], None] = lambda leaves: None
        """Called with the parameters of the current step, or [] when it has none any more."""
        self.clock, self.statistics = StageClock(), StepStatistics(world.rank, settings.prefetch)
        self._unrecorded: deque[Flight] = deque()
        self._window_is_open = settings.lookahead == "auto"

    @property
    def groups(self) -> list[TableGroup]:
        """The tables by width."""
        return self.engine.groups

    @property
    def rows(self) -> list[GroupRows]:
        """Slots and stores of every group."""
        return self.engine.rows

    @property
    def steps(self) -> int:
        """Optimizer steps applied so far, to the table that had most."""
        return max(self.counts)

    def _checked(self, batch: Batch) -> Batch:
        """`batch` with every id inside its table; DataError names the one that is not."""
        rows, names = zip(*((table.rows, table.name) for table in self._lookups), strict=True)
        try:
            ids = check_ids(batch.ids, rows, names, on_bad_id=self.settings.on_bad_id)
        except DataError as error:  # where its samples lie among those of all ranks is not known
            text = str(error).replace("of the global batch", "of this rank's batch")
            raise DataError(text) from error
        return replace(batch, ids=ids)

    # --- plans ------------------------------------------------------------------------------

    @property
    def streams(self) -> list[Epoch]:
        """The look-aheads that are alive and have not ended, the latest first."""
        alive = [stream for ref in reversed(self._streams) if (stream := ref()) is not None]
        return [stream for stream in alive if not stream.ended]

    def start_stream(self, stream: Epoch) -> None:
        """`stream` is about to plan ahead: the others halt, planning goes on from the device."""
        self.require_open()
        self.halt()
        self._streams = [weakref.ref(other) for other in (*reversed(self.streams),)]
        if stream not in self.streams:
            self._streams.append(weakref.ref(stream))

    def choose_window(self, source: Source) -> None:
        """Fix L, where it is `auto`, by the first plan's batches on all ranks; called by all of
        them before the first look-ahead is planned."""
        if not self._window_is_open:
            return
        self._window_is_open, prefetch = False, self.settings.prefetch
        first = source.first()
        own = (0, 0) if first is None else first.sizes
        ids, kept = (max(sizes) for sizes in zip(*together(self.world, lambda: own), strict=True))
        # Where no window decides which rows leave, a deep one only keeps batches waiting.
        by_window = self.settings.policy_settings.uses_window
        most = auto_lookahead(ids, prefetch) if by_window else WINDOWS[0]
        held = [w for w in WINDOWS if w <= most and kept * (w + prefetch + 1) <= KEPT_BYTES]
        steps = max(held, default=WINDOWS[0])
        self.engine.look_ahead(steps)
        log.info(
            "lookahead='auto' is %d: a step has up to %d ids on a rank, in batches of %s",
            steps,
            ids,
            describe_bytes(kept),
        )

    def plan_inline(self, read: ReadIds, kind: str) -> Flight:
        """Plan one batch now (L = 0), with running look-aheads halted before; to be opened next."""
        self.halt()
        with library_words():
            return self.engine.now(as_batch([read], 0, kind))

    def halt(self) -> None:
        """Stop every look-ahead's planner; its plans that have not moved are made again later."""
        self._end_left()
        for stream in self.streams:
            stream.halt()

    def quiet(self) -> None:
        """Between two steps: let no row move until the next batch; called by all ranks."""
        self._end_left()
        self.engine.quiet()

    def _end_left(self) -> None:
        """Wait for the look-aheads that were left; PeerError for one that does not end."""
        while self.leaving:
            self.leaving[-1].require_end()
            self.leaving.pop()

    # --- steps ------------------------------------------------------------------------------

    def open(
        self, flight: Flight, reads: list[ReadIds], frozen: frozenset[int] = frozenset()
    ) -> OpenStep:
        """Make a planned step the current one, with its rows on the device.

        `frozen`: tables, by index, that it will not change, the same on all ranks: PlanError later
        where they are not.
        """
        self.end_current()
        leaves = self.engine.open(flight)
        self.engine.count(flight)
        self.current = OpenStep(self, flight, reads, leaves, frozen)
        self._say_frozen(flight.step, frozen)
        return self.current

    def opened(self) -> OpenStep:
        """The current step."""
        if self.current is None:
            raise PlanError("no step is open")
        return self.current

    def end_current(self) -> None:
        """The current step ends; PlanError if its gradients were neither applied nor dropped."""
        self._check_frozen()  # a step without any gradient has not asked
        step = self.current
        if step is None:
            return
        if step.pending:
            raise PlanError(
                f"step {step.number} has row gradients that were neither applied nor dropped: "
                "call ebc.step() (or ebc.optimizer.zero_grad()) before the next batch; to add up "
                "the gradients of k batches read them with lookahead(batches, ebc, accumulate=k)"
            )
        step.leave()
        self._record(step.flight)
        step.close()
        self.show_leaves([])
        self.current = None

    def parts_of(self, flight: Flight, leaves: Sequence[Tensor]) -> list[RowPart]:
        """The rows of a step as its optimizer has them: the replicated ones, then those at home."""
        engine, found = self.engine, []
        for place, (rows, plan, leaf) in enumerate(
            zip(self.rows, flight.plans, leaves, strict=True)
        ):
            mine = slice(0, plan.distinct)
            if engine.home_state:
                mine = plan.home_slice(self.world.rank)
            if not rows.slots.replicated:
                continue
            whole = plan.shard is None and not engine.home_state
            own = leaf if whole else leaf.detach()[mine].requires_grad_()
            found.append(RowPart(place, own, engine.home_state, sharded=False))
        for place, (rows, plan) in enumerate(zip(self.rows, flight.plans, strict=True)):
            there = flight.where[place].shard
            if plan.shard is not None and there is not None:
                own = rows.cache.gather(plan.shard.slots, there.slots).requires_grad_()
                found.append(RowPart(place, own, at_home=True, sharded=True))
        return found

    # --- frozen tables ----------------------------------------------------------------------

    def _say_frozen(self, step: int, frozen: frozenset[int]) -> None:
        """Tell the other ranks which tables a step leaves as they are; `_check_frozen` listens.

        Over the host group, beside the step's work: nobody waits for it.
        """
        if self.world.size > 1:
            own = torch.zeros(len(self.tables), dtype=torch.uint8)
            own[list(frozen)] = 1
            what = f"the frozen tables of step {step}"
            self._agreed = host_link(self.world).start_all_gather(own, PLANNING, what)

    def _check_frozen(self) -> None:
        """PlanError, on all ranks, where they do not freeze the same tables in the open step.

        Comes before the step's first exchange that depends on it.
        """
        said, self._agreed = self._agreed, None
        if said is None:
            return
        by_rank = said().view(self.world.size, -1).bool()
        differ = (by_rank != by_rank[0]).any(0).nonzero().flatten().tolist()
        if differ:
            ranks = by_rank[:, differ[0]].nonzero().flatten().tolist()
            raise PlanError(
                f"table {self.tables[differ[0]].name!r} is frozen on rank(s) "
                f"{', '.join(map(str, ranks))} and not on the others: freeze() and "
                "requires_grad_(False) are called by all ranks before the same step"
            )

    def _choices(self, group: int, step: OpenStep, sums: RowSums) -> list[RowChoice]:
        """What of a group's rows is updated, and as which step of their tables; the gradients of
        frozen rows become zero, so that nothing that looks at gradients counts them."""
        members = self.groups[group].tables
        counts = [0 if table in step.frozen else self.counts[table] + 1 for table in members]
        if len(set(counts)) == 1:
            return [RowChoice(counts[0])]
        tables = self.engine.tables_of_sums(step.flight, group)
        kinds = [None if at is None else torch.tensor(counts)[at.long()] for at in tables]
        for kind, found in zip(kinds, (sums.replicated[group], sums.sharded[group]), strict=True):
            if kind is not None and found is not None:
                frozen = (kind == 0).nonzero().flatten()
                found.index_fill_(0, frozen.to(found.device), 0.0)
        return [
            RowChoice(
                count, *(None if k is None else (k == count).nonzero().flatten() for k in kinds)
            )
            for count in sorted(set(counts) - {0})
        ]

    # --- gradients --------------------------------------------------------------------------

    def summed(self, step: OpenStep, gradients: Sequence[Tensor | None]) -> RowSums:
        """Row gradients summed over the ranks, then multiplied once by 1 / W if it is a mean."""
        engine, flight, size = self.engine, step.flight, self.world.size
        self._check_frozen()
        self._end_left()
        flight.after = engine.streams.mark(COMPUTE)
        with engine.syncing(flight):
            sums = engine.start_sum(flight, gradients)()
            if size > 1 and self.settings.gradient_reduction == "mean":
                for gradient in sums.tensors():
                    gradient.mul_(1.0 / size)
            groups = range(len(self.groups))
            step.choices = [
                self._choices(group, step, sums) if step.trains[group] else [] for group in groups
            ]
            if step.guard is not None or self.settings.on_nonfinite != "off":
                step.finite = self._finite(step, sums)
        engine.streams.after(COMPUTE, (flight.after,))
        return sums

    def _finite(self, step: OpenStep, sums: RowSums) -> Tensor:
        """Whether all sums, also those that other homes have, are finite: bool `[1]`."""
        own = [torch.isfinite(found).all() for found in sums.tensors()]
        device = self.world.device
        finite = torch.stack(own).all() if own else torch.ones((), dtype=torch.bool, device=device)
        finite = finite.reshape(1)
        if step.guard is None or self.world.size == 1:
            return finite
        what = f"finite sums of step {step.number}"
        said = self.engine.link.all_gather(finite.to(torch.int64), PLANNING, what)
        return said.flatten().min().reshape(1).bool()

    @torch.no_grad()
    def gradient_norm(self, norm_type: float) -> Tensor:
        """The `norm_type`-norm of the step's row gradients, each row once; float64 on the device.

        Every row's part in float64, scaled to whole numbers and added up as such: the same number
        whatever the order of the rows and whoever has them.
        """
        step, device = self.current, self.world.device
        parts = [] if step is None else [p for p in step.parts if p.rows.grad is not None]
        powers: dict[bool, list[Tensor]] = {False: [], True: []}
        for part in parts:
            rows = part.rows.grad.as_subclass(Tensor).double().abs()
            if math.isinf(norm_type):
                powers[part.at_home].append(rows.amax(1) if len(rows) else rows.new_zeros(0))
            else:
                powers[part.at_home].append(rows.pow(norm_type).sum(1))
        none = torch.zeros(0, dtype=torch.float64, device=device)
        shared, own = (torch.cat([none, *powers[home]]) for home in (False, True))
        homes = step is not None and step.guard is not None and self.world.size > 1
        most = _most(torch.cat((shared, own)))
        if homes:
            most = self._of_all(most.reshape(1), "the largest row gradient").max()
        if math.isinf(norm_type) or step is None:
            return most
        count = max(1, sum(plan.all_distinct for plan in step.flight.plans))
        exponent = torch.frexp(most).exponent.clamp(min=-900)
        shift = 61 - math.ceil(math.log2(count)) - exponent
        whole = [
            torch.ldexp(values, shift).round().to(torch.int64).sum() for values in (shared, own)
        ]
        if homes:
            whole[1] = self._of_all(whole[1].reshape(1), "sums of squares").sum()
        total = torch.ldexp((whole[0] + whole[1]).double(), -shift)
        return torch.where(torch.isfinite(most), total, most).pow(1 / norm_type)

    def _of_all(self, value: Tensor, what: str) -> Tensor:
        """One number of every rank."""
        return self.engine.link.all_gather(value, PLANNING, what).flatten()

    @torch.no_grad()
    def apply(self, lr: float) -> None:
        """One optimizer step on the rows of the current step, if it has gradients.

        Raises NonFiniteLossError with `on_nonfinite="stop"`, once it is known that the gradients of
        a step were not finite; nothing was applied since.
        """
        self._judge(0)
        self._check_frozen()
        step = self.current
        if step is None or not step.ready() or step.leaves is None:
            return
        on, enabled = self.settings.on_nonfinite, None
        if on == "skip" and step.finite is not None and not bool(step.finite):
            self.skipped += 1
            log.warning("step %d was left out: its row gradients are not finite", step.number)
            self._leave(step)
            return
        counted = tuple(at for at in range(len(self.counts)) if at not in step.frozen)
        if on == "stop" and step.finite is not None:
            enabled = self._enabled = self._enabled & step.finite
            self._note(step.number, counted, enabled)
        engine, flight = self.engine, step.flight
        flight.after = engine.streams.mark(COMPUTE)
        with engine.whole():
            with engine.applying(flight):
                engine.apply(flight, step.sums(), lr, step.choices or [], enabled)
            engine.streams.after(COMPUTE, (flight.after,))
        for table in counted:
            self.counts[table] += 1
        self.statistics.add(flight, self.rows)
        self._record(flight)
        self._leave(step)
        self._judge(int(engine.streams.asynchronous))

    def _record(self, flight: Flight) -> None:
        """Tell the clock what the stages of a step took since it was told last."""
        if flight.spans:
            times = {"spans": flight.spans, "waits": flight.waits, "marks": flight.marks}
            self._unrecorded.append(
                Flight(flight.step, flight.batch, [], free=flight.free, **times)
            )
            flight.spans, flight.waits, flight.marks = [], [], []
        self.record_all(_RECORD_DELAY * self.engine.streams.asynchronous)

    def record_all(self, keep: int = 0) -> StageClock:
        """The clock, told of all steps but the last `keep`."""
        while len(self._unrecorded) > keep:
            record(self.clock, self._unrecorded.popleft(), self.engine.streams)
        return self.clock

    def _leave(self, step: OpenStep) -> None:
        """The step's gradients are done with."""
        step.close()
        self.show_leaves([])

    def _note(self, step: int, counted: tuple[int, ...], enabled: Tensor) -> None:
        """Bring `enabled` of a step to the host, for which nobody waits; see `_judge`."""
        streams = self.engine.streams
        there = torch.empty(1, dtype=torch.bool, pin_memory=streams.asynchronous)
        there.copy_(enabled, non_blocking=True)
        self._judged.append((step, counted, there, streams.mark(COMPUTE)))

    def _judge(self, keep: int) -> None:
        """Look whether steps were applied, but for the last `keep` of them."""
        while len(self._judged) > keep:
            step, _, there, mark = self._judged[0]
            self.engine.link.settle("the step's end", mark)
            if not bool(there):
                for _, counted, *_ in self._judged:  # they counted, before anybody knew
                    for table in counted:
                        self.counts[table] -= 1
                self._judged = [(step, (), there, mark)]
                raise NonFiniteLossError(
                    f"step {step}: row gradients are not finite, and nothing was applied from "
                    "there on (on_nonfinite='stop'): the tables are those before it; save them, or "
                    "go on from a checkpoint"
                )
            self._judged.pop(0)

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks why this one will not come."""
        record_failure(self.world.store, self.world.rank, error)

    def summary(self) -> dict[str, Any]:
        """What was counted so far; called by all ranks."""
        self.require_open()
        clock = self.record_all()
        parts = (self.world, self.rows, self.engine.counters, clock, self.engine.placement)
        values = self.statistics.summary(*parts) | {"steps": self.steps}
        return values | {"warm_start_rows": max(self.engine.warmed, 0)}

    # --- the end ----------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise PlanError once closed."""
        if self.closed:
            raise PlanError(f"the {self.name} is closed: make a new one")

    def close(self) -> None:
        """Stop planning and let go of the tables; safe to call twice, on one rank alone too.

        While an exception is handled, the other ranks, which may not come, are not waited for long.
        """
        limit_s = STOP_S if sys.exc_info()[0] is None else LEAVING_S
        for stream in self.streams:
            stream.close(limit_s)
        for runner in self.leaving:
            runner.ended(limit_s)
        self.leaving.clear()
        self.closed = True
        if self.current is not None:
            self.current.close()
            self.current = None
        self.engine.close()


def _most(values: Tensor) -> Tensor:
    """The largest of non-negative float64 values `[n]`, 0 of none; infinite where one is NaN."""
    if not len(values):
        return values.new_zeros(())
    most = values.max()
    return torch.where(torch.isnan(most), torch.full_like(most, math.inf), most)
