"""One optimizer step of a collection: autograd's hooks, and the step that is open.

All that concerns rows is the engine's. Here is when its exchanges happen: a step opens when the
first of its batches comes through the model, its row gradients are summed at the end of the
backward pass in which the last has taken part, and `RowOptimizer.step` applies them.
"""

from __future__ import annotations

import logging
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distcache.comm.link import (
    PLANNING,
    agree_on_versions,
    host_link,
    require_equal,
    run_on_all_ranks,
)
from distcache.comm.rendezvous import ErrorReports, barrier
from distcache.comm.world import World
from distcache.data.batch import Batch, check_ids
from distcache.embedding.ids import ReadIds, as_batch, initial_change
from distcache.embedding.open_step import EarlierSteps, OpenStep
from distcache.embedding.settings import CollectionConfig, library_words
from distcache.embedding.weights import DRAWN_BYTES, TableRows, TableWeight
from distcache.engine.full_tables import FullTables, Part
from distcache.engine.groups import TableSettings
from distcache.engine.movement import RowChoice
from distcache.engine.pipeline import STOP_S
from distcache.engine.planning import planner_threads
from distcache.engine.step import APPLY, StageClock, StepContext, record
from distcache.engine.step_rows import RowSums, choices_of
from distcache.engine.tables import CachedTables, all_of
from distcache.errors import NonFiniteLossError, PlanError, on_all_ranks
from distcache.layout import TableSpec
from distcache.parallel.base import StepStatistics
from distcache.planner.victims import WINDOWS, Policy, auto_lookahead
from distcache.stopping import DelayedInterrupt
from distcache.store.memory import describe_bytes
from distcache.store.rows import RowStore
from distcache.streams import COMPUTE, DeviceEvent

if TYPE_CHECKING:
    from distcache.embedding.stream import BatchReader, LookaheadIterator

log = logging.getLogger(__name__)

KEPT_BYTES = 256 << 20
"""Most bytes of whole batches that a look-ahead keeps on a rank for a window beyond the least."""

_RECORD_DELAY = 2
"""Steps after which stages are timed where the device works on: earlier the host would wait."""

LEAVING_S = 5.0
"""Longest wait for threads whose steps are of no use, seconds: at the interpreter's end, where they
may be waiting for other ranks, which look for this one's failure every second or after three; and
for a look-ahead that nobody holds, which ranks that leave theirs at the same step do in turn."""


ALONE_S = 20.0
"""How long rank 0 waits for any other rank to ask for whole tables too, seconds. All are at the
same step: if none comes in this time, it is most likely a loop's `if rank == 0:` that asks."""

_ALL_ASK = (
    "rows lie on all devices, so call it on all ranks, outside `if rank == 0:`, and save on one"
)


# -----------------------------------------------------------------------------
# The tables of a collection over the engine, and the one step that is open.


class CollectionTables:
    """The engine's tables behind one collection, and `current`, the step that was opened last.

    Called by all ranks of `world` in the same order, but for what says otherwise. `counts`: steps
    applied to each table (one that is frozen does not count); `skipped`: steps that were left out
    because their gradients were not finite. The parameters of the current step lie in the
    configuration's `leaves`.
    """

    def __init__(
        self, world: World, config: CollectionConfig, initial: Sequence[Tensor] | None = None
    ) -> None:
        """`initial`: weights of the tables, `[rows, D]`, of which rank 0's count; None: by seed."""
        lookups, self.settings = config.lookups, config.settings
        self.world, self.tables = world, list(lookups.specs)
        self._lookups = [self.tables[table] for table in lookups.tables]
        agree_on_versions(world)
        self.current: OpenStep | None = None
        self.counts = [0] * len(self.tables)
        self.skipped = 0
        self.earlier, self._host = EarlierSteps(self), host_link(world)
        # Around forward, autograd's hooks and `step`, and wherever else ranks wait for each other.
        store = world.store if world.size > 1 else None
        self.reports = ErrorReports(store, world.rank, config.title, self._is_training)
        self._frozen_of_all: Callable[[], Tensor] | None = None
        self._enabled = torch.ones(1, dtype=torch.bool, device=world.device)
        self._judged: list[tuple[str, tuple[int, ...], Tensor, DeviceEvent]] = []
        self._streams: list[weakref.ref[LookaheadIterator]] = []
        self.leaving: list[BatchReader] = []
        """Behind look-aheads that nobody holds any more; may still be ending."""
        self._unrecorded: deque[StepContext] = deque()
        self._window_is_open = self.settings.lookahead == "auto"
        self._is_flushed = True
        """Whether the stores have every row as the last step left it."""
        self._exposed: list[TableRows] = []
        self._begin(config, ())
        self._initialise(config, initial)

    def _begin(self, config: CollectionConfig, stores: Sequence[RowStore]) -> None:
        """Make what trains the rows of `stores`, or of new ones."""
        world, tables, settings, update = self.world, self.tables, self.settings, config.update
        # Statistics may lie elsewhere on each rank: what they say is compared, by the engine.
        own: dict[str, Any] = {"the collection": config.name, "optimizer": update}
        own |= {"optimizers": config.updates if len(config.updates) > 1 else None}
        own |= {"the features": config.lookups.features, "in backward": config.in_backward}
        own |= {"the order of tables": [table.name for table in tables]}
        own |= {f"table {table.name!r}": table for table in tables}
        own |= {f.name: getattr(settings, f.name) for f in fields(settings)}
        for where in ("statistics", "cluster"):
            del own[where]
        require_equal(world, own | {"device": world.device.type})
        features = [feature for table in tables for feature in table.features]
        self.config = config
        with library_words():
            slots, placement, popularity = config.decide_rows(world)
            engine = TableSettings(
                slots=slots,
                lookahead=settings.window,
                prefetch=settings.prefetch,
                policy=Policy.of(settings),
                reduction=settings.reduction,
                seed=settings.seed or 0,
                dtype=settings.dtype,
                fingerprint=zlib.crc32(repr(own).encode()),
                schedule=settings.schedule,
                placement=placement,
                access=settings.store_access,
                pooled=config.pooled,
                planner_threads=planner_threads("auto", world),
            )
            parts = (world, tables, features, update, engine)
            rest = (popularity, self._checked, stores, config.updates)
            self.engine = CachedTables(*parts, *rest)
        self.full_tables = self.engine.full_tables
        self.statistics = StepStatistics(self.engine)
        self.clock = self.statistics.clock

    def _initialise(self, config: CollectionConfig, drawn: Sequence[Tensor] | None) -> None:
        """Initial rows, where they are not those that stores have by themselves."""
        seed, world = self.settings.seed or 0, self.world
        for index, weight in enumerate(drawn or ()):
            self.full_tables.spread(index, weight)
        if drawn is not None:
            return
        if world.is_first and self.settings.init != "seed" and self.settings.seed is None:
            log.info(
                "initial rows of the %s are distcache's, by seed=0: its tables take more than %s "
                "(init='torch' draws them as TorchRec), or it was on 'meta' when it was made (then "
                "reset_parameters() does)",
                *(config.name, describe_bytes(DRAWN_BYTES)),
            )

        def change_all() -> None:  # once on each node
            for index, table_config in enumerate([] if world.local_rank else config.configs):
                change = initial_change(table_config, index, seed)
                if change is not None:
                    self.full_tables.change_initial(index, seed, change)

        run_on_all_ranks(world, change_all)

    @torch.inference_mode(False)
    def take_update(self, config: CollectionConfig) -> None:
        """From now on rows, which had no optimizer, are updated as `config` says, with new state;
        between two steps."""
        self.let_go("giving them an optimizer")
        self.record_all()
        stores = self.engine.release()
        for store in stores:
            width = config.update.state_width(store.layout.dim)
            if width:
                store.add_state(width, config.update.initial_state(store.layout.dim))
        self._begin(config, stores)
        self.config.show()

    @property
    def steps(self) -> int:
        """Optimizer steps applied so far, to the table that had most."""
        return max(self.counts)

    def _checked(self, batch: Batch) -> Batch:
        """`batch` with every id inside its table; DataError names the one that is not."""
        rows, names = zip(*((table.rows, table.name) for table in self._lookups), strict=True)
        ids = check_ids(batch.ids, rows, names, on_bad_id=self.settings.on_bad_id)
        return replace(batch, ids=ids)

    # --- plans ------------------------------------------------------------------------------

    @property
    def streams(self) -> list[LookaheadIterator]:
        """The look-aheads that are alive and have not ended, the latest first."""
        known = reversed(self._streams)
        return [one for ref in known if (one := ref()) is not None and not one.ended]

    def start_stream(self, stream: LookaheadIterator, source: BatchReader) -> None:
        """`stream` is about to plan ahead: the others halt, planning goes on from the device."""
        self.halt()
        alive = self.streams[::-1]
        alive += [] if stream in alive else [stream]
        self._streams = [weakref.ref(one) for one in alive]
        if self._window_is_open:
            self._choose_window(source.first_sizes())
            self._window_is_open = False

    def _choose_window(self, first: tuple[int, int]) -> None:
        """Fix L by the ids and the bytes that the first plan's batches have on all ranks."""
        ids, kept = (
            max(sizes) for sizes in zip(*run_on_all_ranks(self.world, lambda: first), strict=True)
        )
        prefetch, steps = self.settings.prefetch, WINDOWS[0]
        # Where no window decides which rows leave, a deep one only keeps batches waiting.
        if Policy.of(self.settings).uses_window:
            most = auto_lookahead(ids, prefetch)
            held = [w for w in WINDOWS if w <= most and kept * (w + prefetch + 1) <= KEPT_BYTES]
            steps = max(held, default=steps)
        self.engine.look_ahead(steps)
        if self.world.is_first:
            log.info(
                "lookahead='auto' is %d: a step has up to %d ids on a rank, in batches of %s",
                *(steps, ids, describe_bytes(kept)),
            )

    def plan_inline(self, reads: Sequence[ReadIds], kind: str) -> StepContext:
        """Plan one step now (L = 0), with running look-aheads halted before; to be opened next."""
        self.halt()
        with library_words():
            return self.engine.now(as_batch(reads, 0, kind))

    def halt(self) -> None:
        """Stop every look-ahead's planner; its plans that have not moved are made again later."""
        self._end_left()
        for stream in self.streams:
            stream.halt()

    def _end_left(self) -> None:
        """Wait for the look-aheads that were left; PeerError for one that does not end."""
        while self.leaving:
            reader = self.leaving[-1]
            if not reader.has_ended(reader.timeout_s + LEAVING_S):
                raise reader.not_halted()
            self.leaving.pop()

    # --- steps ------------------------------------------------------------------------------

    def open(
        self, context: StepContext, reads: list[ReadIds], frozen: frozenset[int] = frozenset()
    ) -> OpenStep:
        """Make a planned step the current one, with its rows on the device.

        `frozen`: tables, by index, that it will not change, the same on all ranks: PlanError later
        where they are not.
        """
        self.end_current()
        with torch.inference_mode(False), torch.no_grad():
            leaves = self.engine.open(context)
            # Whoever sums dense gradients (DDP) issues collectives of another group until backward
            # has ended. NCCL wants one order of both on all ranks: ours come before, or after that.
            if self.engine.streams.asynchronous:
                self.engine.settle(context)
            self.engine.count(context)
            self.current = OpenStep(self, context, reads, leaves, frozen)
        self.reports.position += 1
        if self.world.size > 1:  # `_check_frozen` listens; meanwhile nobody waits
            own = torch.zeros(len(self.tables), dtype=torch.uint8)
            for table in frozen:
                own[table] = 1
            what = f"the frozen tables of step {context.step}"
            self._frozen_of_all = self._host.start_all_gather(own, PLANNING, what)
        return self.current

    def _check_frozen(self) -> None:
        """PlanError, on all ranks, where they do not freeze the same tables in the open step.

        Comes before the step's first exchange that depends on it.
        """
        said, self._frozen_of_all = self._frozen_of_all, None
        if said is None:
            return
        by_rank = said().view(self.world.size, -1).bool()
        differ = (by_rank != by_rank[0]).any(0).nonzero().flatten().tolist()
        if differ:
            ranks = by_rank[:, differ[0]].nonzero().flatten().tolist()
            error = PlanError(
                f"table {self.tables[differ[0]].name!r} is frozen on rank(s) "
                f"{', '.join(map(str, ranks))} and not on the others: freeze() and "
                "requires_grad_(False) are called by all ranks before the same step"
            )
            raise on_all_ranks(error)

    def end_current(self) -> None:
        """The current step ends; PlanError if its gradients were neither applied nor dropped."""
        self._check_frozen()  # a step without any gradient has not asked
        step = self.current
        if step is None or (step.leaves is None and not step.context.spans):  # all is told
            self.current = None
            return
        if self.earlier.pending and len(step.reads) > 1:
            raise PlanError(
                f"step {step.context.step} was read as {len(step.reads)} micro-batches "
                f"(accumulate={len(step.reads)}), and another batch came before ebc.step() had "
                "applied their row gradients: evaluate, and read other batches, only between two "
                "optimizer steps"
            )
        if self.earlier.pending:
            raise PlanError(
                f"step {step.context.step} has row gradients that were neither applied nor "
                "dropped: call ebc.step() (or ebc.optimizer.zero_grad()) before the next batch; to "
                "add up the gradients of k batches read them with lookahead(batches, ebc, "
                "accumulate=k)"
            )
        step.leave()
        self._record(step.context)
        if step.recorded:
            self.earlier.add(step)
            self.config.show()
        else:
            step.close()
        self.current = None

    def of_any_rank(self, value: bool) -> bool:
        """Whether it is true on any rank."""
        if self.world.size == 1:
            return value
        said = torch.tensor([value], dtype=torch.uint8)
        what = "whether several steps are one"
        return bool(self._host.start_all_gather(said, PLANNING, what)().any())

    def drop(self) -> None:
        """Forget the gradients so far."""
        for step in self.earlier.with_open():
            step.drop()

    def sum_up(self, step: OpenStep, gradients: Sequence[Tensor | None]) -> None:
        """Row gradients summed over the ranks, then multiplied once by 1 / W if it is a mean."""
        engine, context, size = self.engine, step.context, self.world.size
        self._check_frozen()
        self._end_left()
        context.after = engine.streams.record_event(COMPUTE)
        with engine.syncing(context):
            sums = engine.start_sum(context, gradients)()
            if size > 1 and self.settings.gradient_reduction == "mean":
                for gradient in all_of(sums):
                    gradient.mul_(1.0 / size)
            step.owners = [None] * len(engine.groups)
            differ = len(self.config.parameters.groups) > 1
            for at, group in enumerate(engine.groups):
                kinds = {(self.counts[table], table in step.frozen) for table in group.tables}
                if step.trains[at] and (len(kinds) > 1 or (differ and len(group.tables) > 1)):
                    frozen = [table in step.frozen for table in group.tables]
                    step.owners[at] = step.view.owners(at, sums, frozen)
            if step.view.guard is not None or self.settings.on_nonfinite != "off":
                step.finite = step.view.all_finite(sums)
            on_cpu = not engine.streams.asynchronous  # a GPU would have to wait for the flag
            if on_cpu and self.settings.on_nonfinite != "off" and not bool(step.finite):
                step.nonfinite_cause = self._nonfinite_cause(step, sums, gradients)
        engine.streams.wait_events(COMPUTE, (context.after,))
        for leaf in step.leaves or []:
            leaf.grad = None  # the sums take its place
        step.view.take(sums, step.finite)

    def _nonfinite_cause(
        self, step: OpenStep, sums: RowSums, gradients: Sequence[Tensor | None]
    ) -> str:
        """Return the tables and ranks of gradients that are not finite, for a message. Called by
        all ranks, inside `syncing`."""
        names = set[str]()
        for at, group in enumerate(self.engine.groups):
            owners = step.owners[at]
            if owners is None:
                owners = step.view.owners(at, sums, [False] * len(group.tables))
            for places, rows in zip(owners, sums[at], strict=True):
                if places is not None and rows is not None:
                    bad = ~torch.isfinite(rows.flatten(1)).all(1).cpu()
                    names |= {self.tables[group.tables[i]].name for i in places[bad].unique()}
        is_source = any(g is not None and not bool(torch.isfinite(g).all()) for g in gradients)
        by_rank = torch.tensor([is_source], dtype=torch.uint8)
        flags = self._host.start_all_gather(by_rank, PLANNING, "gradients that are not finite")()
        ranks = ", ".join(map(str, flags.flatten().nonzero().flatten().tolist()))
        tables = ", ".join(sorted(names)) or "that other ranks update"
        return f" (tables {tables}; from the batch of rank {ranks})"

    def _is_training(self) -> bool:
        """Return True if a training step is open, in which the other ranks wait for this one."""
        return any(step.recorded for step in self.earlier.with_open())

    def summed(self) -> None:
        """The current step's gradients are summed: rows may be updated inside backward."""
        if self.config.in_backward:
            self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """One optimizer step on the rows of the current step, if it has gradients, at the rates of
        its parameters' groups.

        Raises NonFiniteLossError with `on_nonfinite="stop"`, once it is known that the gradients of
        a step were not finite; nothing was applied since.
        """
        self._judge(0)
        step = self.earlier.joined()
        self._check_frozen()
        if step is None or not step.ready():
            return
        context = step.context
        on_nonfinite = self.settings.on_nonfinite
        if on_nonfinite == "skip" and step.finite is not None and not bool(step.finite):
            self.skipped += 1
            log.warning(
                f"step {context.step} was left out: its row gradients are not finite"
                f"{step.nonfinite_cause}"
            )
            self._end(step)
            return
        counted = tuple(sorted(set(range(len(self.counts))) - step.frozen))
        engine, streams = self.engine, self.engine.streams
        kinds = [
            None if table in step.frozen else (update, self.counts[table] + 1)
            for table, update in enumerate(self.config.parameters.updates(engine.update))
        ]
        choices = [
            choices_of(owners, [kinds[table] for table in group.tables])
            for owners, group in zip(step.owners, engine.groups, strict=True)
        ]
        self._is_flushed = False
        with DelayedInterrupt(), engine.error_scope:
            self._update(step, choices, counted)
        self._judge(int(streams.asynchronous))

    def _update(
        self, step: OpenStep, choices: Sequence[Sequence[RowChoice]], counted: tuple[int, ...]
    ) -> None:
        """Apply the sums of `step` to its rows, and end it; what ends half-way leaves no state of
        any step. `counted`: the tables whose steps it counts."""
        engine, context, enabled = self.engine, step.context, None
        streams = engine.streams
        if self.settings.on_nonfinite == "stop" and step.finite is not None:
            enabled = self._enabled = self._enabled & step.finite
            there = torch.empty(1, dtype=torch.bool, pin_memory=streams.asynchronous)
            there.copy_(enabled, non_blocking=True)  # for which nobody waits; see `_judge`
            name = f"{context.step}{step.nonfinite_cause}"
            self._judged.append((name, counted, there, streams.record_event(COMPUTE)))
        context.after = streams.record_event(COMPUTE)
        with engine.stage(APPLY, context):
            engine.apply(context, step.view.sums(), choices, enabled)
        engine.return_rows(context)
        streams.wait_events(COMPUTE, (context.after,))
        for table in counted:
            self.counts[table] += 1
        self.statistics.add(context)
        self._record(context)
        self._end(step)
        self.reports.withdraw()

    def _end(self, step: OpenStep) -> None:
        """The open step was applied or left out: its rows are others."""
        step.close()
        self.earlier.forget()
        if step.joined:  # its batches may come again one by one
            self.current = None

    def _judge(self, keep: int) -> None:
        """Look whether steps were applied, but for the last `keep` of them."""
        while len(self._judged) > keep:
            name, _, there, mark = self._judged[0]
            self.engine.link.settle("the step's end", mark)
            if not bool(there):
                for _, counted, *_ in self._judged:  # they counted, before anybody knew
                    for table in counted:
                        self.counts[table] -= 1
                self._judged = [(name, (), there, mark)]
                error = NonFiniteLossError(
                    f"step {name}: row gradients are not finite, and nothing was applied from "
                    "there on (on_nonfinite='stop'): the tables are those before it; save them, or "
                    "go on from a checkpoint"
                )
                raise on_all_ranks(error)
            self._judged.pop(0)

    # --- what it took -----------------------------------------------------------------------

    def _record(self, context: StepContext) -> None:
        """Tell the clock what the stages of a step took since it was told last."""
        if context.spans:
            told = StepContext(
                context.step, context.batch, [], free=context.free, timed=context.timed
            )
            told.spans, told.waits, told.marks = context.spans, context.waits, context.marks
            self._unrecorded.append(told)
            context.spans, context.waits, context.marks = [], [], []
        self.record_all(_RECORD_DELAY * self.engine.streams.asynchronous)

    def record_all(self, keep: int = 0) -> StageClock:
        """The clock, told of all steps but the last `keep`."""
        while len(self._unrecorded) > keep:
            record(self.clock, self._unrecorded.popleft(), self.engine.streams)
        return self.clock

    def summary(self) -> dict[str, Any]:
        """What was counted so far; called by all ranks."""
        self.record_all()
        values = {"steps": self.steps, "lookahead": self.engine.settings.lookahead}
        return self.statistics.summary() | values | {"warm_start_rows": max(self.engine.warmed, 0)}

    # --- whole tables -----------------------------------------------------------------------

    def flush(self) -> None:
        """Bring every changed row to the store of its home's node."""
        with self.reports:
            self._end_left()
            self.engine.flush(self.steps)
        self._is_flushed = True

    def views(
        self, states: bool = False
    ) -> Iterator[tuple[TableSpec, tuple[Tensor | None, Tensor | None]]]:
        """Flush; then each table with its weights and state, see `FullTables.views`. Raises
        PeerError on rank 0, and changes nothing, where no other rank comes within `ALONE_S`."""
        self.barrier()
        self.flush()
        return self.full_tables.views(states)

    def barrier(
        self, asked: str = "state_dict()", way_out: str = _ALL_ASK, limit_s: float | None = None
    ) -> None:
        """Let rank 0 see whether it is alone with what it `asked` for; see `rendezvous.barrier`."""
        world = self.world
        limit = min(ALONE_S if limit_s is None else limit_s, world.timeout_s)
        with self.reports:
            barrier(world.store, world.rank, world.size, limit, asked, way_out)

    def replace(self, parts: Sequence[Part], is_state: bool = False) -> None:
        """Let columns of whole tables be `parts`, see `FullTables.replace`."""
        self.let_go().replace(parts, is_state)
        self._know([] if is_state else [index for index, *_ in parts])

    def saved(self, scratch: Path) -> dict[str, Any]:
        """Flush; then `FullTables.state`, for a checkpoint; `scratch`: see there."""
        self.flush()
        return self.full_tables.state(scratch)

    def settle_steps(self) -> None:
        """Count the steps that were applied, before they are saved. Raises NonFiniteLossError for
        one that was not, unless that was told before: the tables are those before it."""
        told = bool(self._judged) and not self._judged[0][1]
        try:
            self._judge(0)
        except NonFiniteLossError:
            if not told:
                raise

    @contextmanager
    def loading(self, scratch: Path) -> Iterator[dict[str, Any]]:
        """What `saved` gave, to be filled inside; between two steps."""
        self.let_go()
        state = self.full_tables.state(scratch, filled=False)
        yield state
        self.full_tables.load(state)
        for index, table in enumerate(self.tables):
            self.full_tables.note_range(index, range(table.rows))
        self._know(range(len(self.tables)))

    def require_between_steps(self, work: str) -> None:
        """Raise PlanError where row gradients wait to be applied, before `work`."""
        if self.earlier.pending:
            raise PlanError(f"row gradients wait: call ebc.step() or zero_grad() before {work}")

    def let_go(self, work: str = "loading") -> FullTables:
        """Between two steps: bring all rows to the stores, which may change, and plan none ahead:
        the next step reads them anew."""
        self.require_between_steps(work)
        with suppress(NonFiniteLossError):
            self._judge(0)
        self._judged.clear()  # of steps that what is loaded takes the place of
        self._enabled = torch.ones_like(self._enabled)
        self.end_current()
        self.earlier.forget()
        self.halt()
        self.flush()
        self.engine.forget()
        return self.full_tables

    # --- weights as parameters, see `embedding.weights` -----------------------------------------

    @torch.inference_mode(False)
    def weights(self) -> list[TableWeight]:
        """The tables as parameters. Raises PlanError on several nodes, none of which has one."""
        if self.world.nodes.count > 1:
            raise PlanError(
                f"the weights of table {self.tables[0].name!r} lie on {self.world.nodes.count} "
                "nodes, each of which has part of its rows: read state_dict(), and write by "
                "load_state_dict(), init_from or an init_fn in its config"
            )
        places = range(len(self.tables))
        self._exposed = [TableRows(self, at, self.full_tables.local(at)[0]) for at in places]
        return [rows.parameter() for rows in self._exposed]

    def read_weights(self) -> None:
        """Let the rows in host memory be those of the last step; called by all ranks."""
        if not self._is_flushed:
            self.barrier("a table's weight", _ALL_ASK)
            self.flush()

    def begin_write(self) -> bool:
        """Before a weight is written; whether this rank writes, for all of its node. Called by all
        ranks. Raises PlanError inside a step."""
        self.barrier("writing a table's weight", _ALL_ASK)
        self._judge(0)
        self.let_go("writing a weight")
        return not self.world.local_rank

    def end_write(self, index: int) -> None:
        """Weights of table `index` were written; called by all ranks."""
        run_on_all_ranks(self.world, lambda: None)
        self.full_tables.note_range(index, range(self.tables[index].rows))

    def look_at_weights(self) -> None:
        """Before rows are read: PlanError where weights were written unnoticed; local."""
        for rows in self._exposed:
            if rows.is_written():
                raise PlanError(
                    f"the weight of table {self.tables[rows.index].name!r} was written past "
                    "torch's functions, and cached rows may be newer or older: write by copy_, "
                    "fill_ and the like, or load a state_dict"
                )

    def _know(self, tables: Container[int]) -> None:
        """Whatever was written to the weights of these tables before is of no matter."""
        for rows in self._exposed:
            if rows.index in tables:
                rows.note()

    # --- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Stop planning and let go of the tables; safe to call twice, on one rank alone too.

        While an exception is handled, the other ranks, which may not come, are not waited for long.
        """
        limit_s = STOP_S if sys.exc_info()[0] is None else LEAVING_S
        for stream in self.streams:
            stream.close(limit_s)
        for reader in self.leaving:
            reader.has_ended(limit_s)
        self.leaving.clear()
        self.earlier.forget()
        if self.current is not None:
            self.current.close()
            self.current = None
        self.engine.close()
