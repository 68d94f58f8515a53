"""The drop-in collections: TorchRec's, over cached rows."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from distcache.comm.link import agree_on, on_first, together
from distcache.comm.world import current_world, has_group, require_group
from distcache.embedding.ids import IdReader, checked_configs, lookups_of
from distcache.embedding.settings import CacheSettings, Recipe, check_names
from distcache.embedding.step import CollectionTables, OpenStep
from distcache.engine.gradients import to_device
from distcache.engine.tracing import tracing
from distcache.engine.whole import Part
from distcache.errors import ConfigError, DataError, DistcacheError, PlanError
from distcache.layout import group_tables
from distcache.optim import RowUpdate, by_table
from distcache.store.table_files import (
    Stored,
    find_weights,
    read_safetensors,
    write_tables,
)

log = logging.getLogger(__name__)

# -----------------------------------------------------------------------------
# When the tables of a collection are made: as soon as its ranks are known.
#
# A collection that is made before `init_process_group` (in a module's `__init__`, say) does not
# know yet who trains with it. It waits; the first use of any collection that waits makes the tables
# of all of them, in the order in which they were made: that order is the same on every rank, the
# order in which a model uses them need not be.

_waiting: list[weakref.ref[Membership]] = []
"""Those that have no tables yet, in the order in which they were made."""


class Membership:
    """Who trains the tables of a collection, and `made`, the tables once that is known.

    Where torch.distributed is initialised they are made at once, by all ranks of the group;
    otherwise at the first use, by all ranks that there are then, or by this process alone. It does
    not hold the collection, so that one that nobody uses is gone at the same time on all ranks.
    """

    def __init__(
        self, recipe: Recipe, process_group: dist.ProcessGroup | None, timeout_s: float
    ) -> None:
        self._recipe, self._timeout_s = recipe, timeout_s
        self.made: CollectionTables | None = None
        self._alone, self._closed, self._error = False, False, ""
        if process_group is not None or has_group():
            self._join(process_group)
        else:
            _waiting.append(weakref.ref(self))

    @property
    def tables(self) -> CollectionTables:
        """The tables; makes them, and those of all collections that wait, if need be.

        Called by all ranks. Raises ConfigError where this is one of several ranks that have no
        process group, or where a group of several ranks came after the tables were made for this
        process alone; PlanError once closed.
        """
        name = self._recipe.name
        if self._closed:
            raise PlanError(f"the {name} is closed: make a new one")
        if self.made is None:
            require_group(
                "the first use of a cached collection (a forward, a look-ahead, state_dict, "
                "load_state_dict)"
            )
            while _waiting:
                member = _waiting.pop(0)()
                if member is not None and member.made is None and not member._closed:
                    member._join(None)
        elif self._alone and has_group() and dist.get_world_size() > 1:
            raise ConfigError(
                f"this {name} was used before init_process_group and trains alone, but now there "
                f"are {dist.get_world_size()} ranks, whose tables would drift apart: call "
                "torch.distributed.init_process_group before its first use (a forward, a "
                "look-ahead, state_dict, load_state_dict)"
            )
        if self.made is None:
            raise PlanError(f"the tables of this {name} could not be made: {self._error}")
        return self.made

    def _join(self, process_group: dist.ProcessGroup | None) -> None:
        """Make the tables; by all ranks of the group."""
        self._alone = not has_group()
        try:
            world = current_world(self._recipe.device, process_group, self._timeout_s)
            self.made = CollectionTables(world, self._recipe)
        except Exception as error:
            self._error = str(error)
            raise

    def close(self) -> None:
        """Let go of the tables, or of the wish to have any."""
        self._closed = True
        if self.made is not None:
            self.made.close()


# -----------------------------------------------------------------------------
# The optimizer of a collection's rows, as `torch.optim` has it, and clipping with it.


class RowOptimizer(torch.optim.Optimizer):
    """Applies the row gradients of a step; its parameters are the step's row leaves.

    One parameter `[U, D]` for each width of table: the distinct rows of the step's global batch,
    whose `.grad` is the gradient to apply, the same on every rank, once the last backward pass of
    the step is over. `param_groups[0]` has the rate, `lr`, and `weight_decay`; where tables have
    their own, there is one group for each, in the order of tables, and the parameters, which are of
    all tables, are those of the first. `step()` changes the cached rows; a step without gradients
    changes nothing and does not count.
    """

    def __init__(self, member: Membership, recipe: Recipe) -> None:
        """The optimizer of the tables that `member` has or will have, of `recipe`."""
        self._member, self._update = member, recipe.update
        names = [spec.name for spec in recipe.lookups.specs]
        self._named = [[name] for name in names] if recipe.by_table else [names]
        kinds = recipe.updates[: len(self._named)]
        groups = [{"lr": own.lr, "weight_decay": own.weight_decay, "params": []} for own in kinds]
        groups[0]["params"] = recipe.leaves
        self.param_groups: list[dict[str, Any]] = []
        super().__init__(groups, {})
        self.param_groups[0]["params"] = recipe.leaves  # whose members each step changes

    def _updates(self) -> list[RowUpdate]:
        """The optimizer of each table, with its rate."""
        found = list[RowUpdate]()
        for names, group in zip(self._named, self.param_groups, strict=True):
            lr, decay, own = float(group["lr"]), float(group["weight_decay"]), self._update
            if (lr, decay) != (own.lr, own.weight_decay):
                own = replace(own, lr=lr, weight_decay=decay)
            found += [own] * len(names)
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the rows of the step whose backward is done; called by all ranks.

        Raises PlanError before the last micro-batch, or without any backward.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._member.tables.apply(self._updates())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the row gradients gathered so far; they are always set to None."""
        tables = self._member.made
        if tables is not None and tables.current is not None:
            tables.current.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the group that the optimizer is made with; raises ConfigError for another."""
        if len(self.param_groups) == len(self._named):
            raise ConfigError("a RowOptimizer has the rows of its collection and no other group")
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise PlanError: the rows are not the optimizer's to copy."""
        raise PlanError(
            "a RowOptimizer can be neither copied nor pickled: save its state_dict(), and load "
            "that into the one of a new collection"
        )

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Whole-table state in original ids, after a flush; called by all ranks.

        `state[table]`: `step` (steps applied) and views of the store named as in torch.optim
        (`sum` `[rows, D]` or `[rows, 1]`; `exp_avg`, `exp_avg_sq`), which change as training goes
        on (copies, on several nodes); `param_groups`: `lr`, `weight_decay` and what schedulers
        keep, `params` the table names.
        """
        tables = self._member.tables
        state: dict[str, dict[str, Any]] = {}
        for index, (spec, (_, values)) in enumerate(tables.views(states=True)):
            state[spec.name] = {"step": torch.tensor(tables.counts[index])}
            for name, columns in self._update.state_columns(spec.dim).items():
                if values is not None:
                    state[tables.tables[index].name][name] = values[:, columns]
        pairs = zip(self.settings(), self._named, strict=True)
        return {
            "state": state,
            "param_groups": [{**group, "params": list(names)} for group, names in pairs],
        }

    def settings(self) -> list[dict[str, Any]]:
        """Of each group of parameters all but these."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]

    def take_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take what `settings` gave."""
        self._check(groups)
        for group, found in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in found.items() if k != "params"})

    def _check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if len(groups) != len(self.param_groups):
            raise ConfigError(
                f"{len(groups)} param_groups, but this optimizer has {len(self.param_groups)}: one "
                "for each table where their rates differ, when the collection is made"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; called by all ranks.

        Raises ConfigError for state of other tables, another optimizer or other shapes, before
        anything changes.
        """
        tables, state = self._member.tables, state_dict["state"]
        self._check(state_dict["param_groups"])
        names = [table.name for table in tables.tables]
        if set(state) != set(names):
            raise ConfigError(f"optimizer state of tables {sorted(state)}, not {sorted(names)}")
        parts: list[Part] = []
        for index, table in enumerate(tables.tables):
            columns = self._update.state_columns(table.dim)
            found, keeps = sorted(state[table.name]), sorted({"step", *columns})
            if found != keeps:
                raise ConfigError(
                    f"table {table.name!r}: optimizer state {found}, but "
                    f"{type(self._update).__name__} keeps {keeps}"
                )
            for name, at in columns.items():
                want, got = (table.rows, at.stop - at.start), tuple(state[table.name][name].shape)
                if want != got:
                    raise ConfigError(f"{table.name}.{name}: shape {got}, must be {want}")
                parts.append((index, at, state[table.name][name]))
        tables.replace(parts, is_state=True)
        tables.counts = [int(state[name]["step"]) for name in names]
        self.take_settings(state_dict["param_groups"])


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    ebc: CachedCollection,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip dense gradients and the step's row gradients by their common norm, which is returned.

    As `torch.nn.utils.clip_grad_norm_` over `parameters` and all tables on the device: each row
    of the global batch counts once, whoever has its gradient, and the norm of the rows is the same
    number in every placement. Call it after the last backward pass (and after
    `GradScaler.unscale_`), on all ranks.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type:g}: give a number above 0, or inf")
    ebc.reduce()
    tables, step = ebc.tables, ebc.tables.current
    dense = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    dense = [parameter for parameter in dense if parameter.grad is not None]
    none = torch.zeros((), dtype=torch.float64, device=tables.world.device)
    norms = [none if step is None else step.view.norm(norm_type)]
    if dense:
        grads = [parameter.grad for parameter in dense]
        norms.append(torch.nn.utils.get_total_norm(grads, norm_type).to(norms[0]))
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be "
            "clipped: set error_if_nonfinite=False to scale by it anyway"
        )
    rows = [] if step is None else step.view.params
    torch.nn.utils.clip_grads_with_norm_([*dense, *rows], max_norm, total)
    return total


# -----------------------------------------------------------------------------
# What the drop-in collections have in common: all but what comes out of a lookup.


class CachedCollection(nn.Module):
    """Tables in host memory, a cache of rows on the device, behind one of TorchRec's interfaces.

    A collection says under which name its tables are in a `state_dict`, and forms the output of
    `forward` from the step and the micro-batch that `_open` finds.
    """

    _tables_key: ClassVar[str]
    """The name of the tables in a `state_dict`, before that of a table."""

    _config: ClassVar[type[BaseEmbeddingConfig]]
    """What a table is described by."""

    _pooled: ClassVar[bool] = True
    """Whether bags come out, rather than the row of every id."""

    _is_weighted: bool = False
    """Whether the weights of ids are read."""

    def _make(
        self,
        tables: Sequence[Any],
        device: torch.device | str | None,
        optimizer: RowUpdate | Mapping[str, RowUpdate],
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        settings: dict[str, Any],
    ) -> None:
        """What `__init__` does after nn.Module's; raises what the collections say of theirs."""
        name = type(self).__name__
        kinds = list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
        if not all(isinstance(kind, RowUpdate) for kind in kinds):
            raise ConfigError(
                f"optimizer={optimizer!r}: give one of distcache.optim.SGD, Adagrad, "
                "RowWiseAdagrad, Adam ... with its settings, such as "
                "distcache.optim.Adagrad(lr=0.01), or {table: one} for each table"
            )
        check_names(settings, name)
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s!r}: give seconds above 0")
        chosen = CacheSettings(**settings)
        configs, where = checked_configs(tables, self._config), _concrete(device)
        lookups = lookups_of(configs)
        leaves = [
            torch.zeros(0, lookups.specs[at].dim, dtype=chosen.dtype, device=where).requires_grad_()
            for at, *_ in group_tables(lookups.specs)
        ]
        updates = by_table(optimizer, [spec.name for spec in lookups.specs])
        recipe = Recipe(configs, lookups, updates, chosen, where, name, self._pooled, leaves)
        recipe.check_sizes()
        self._recipe = recipe
        self.reader = IdReader(recipe.lookups, self._is_weighted)
        self._member = Membership(recipe, process_group, timeout_s)
        self.optimizer = RowOptimizer(self._member, recipe)
        self._frozen: set[str] = set()
        self.is_aside = False
        """While set, `state_dict` and `load_state_dict` pass over the tables."""
        self.trainable = nn.Parameter(torch.empty(0, device=recipe.device))
        """Empty: its `requires_grad` says whether the tables train."""

    @property
    def tables(self) -> CollectionTables:
        """The tables; made now, by all ranks, if they are not there yet."""
        return self._member.tables

    @property
    def device(self) -> torch.device:
        """Where the cache lies and the embeddings come out."""
        return self._recipe.device

    def _open(self, features: KeyedJaggedTensor) -> tuple[OpenStep, int]:
        """The step, with its rows on the device, and the micro-batch that `features` is."""
        tables = self.tables
        try:
            return self._locate(tables, features)
        except DistcacheError as error:
            tables.failed(error)
            raise

    def _locate(
        self, tables: CollectionTables, features: KeyedJaggedTensor
    ) -> tuple[OpenStep, int]:
        if not isinstance(features, KeyedJaggedTensor):
            raise DataError(f"{type(features).__name__} is no KeyedJaggedTensor")
        trains = self.training and torch.is_grad_enabled()
        current = tables.current
        for by_content in (False, trains):  # another batch may have the same ids
            for stream in tables.streams:
                if stream.claims(features, by_content):
                    return stream.open_next(self._frozen_now())
            for micro, read in enumerate(current.reads if current is not None else []):
                if read.is_of(features) and read.is_unchanged(features, self.reader.read):
                    return current, micro
        for stream in tables.streams:
            if trains and stream.awaits:
                raise stream.altered()
        tables.end_current()
        read = self.reader.read(features)
        planned = tables.plan_inline(read, "train" if torch.is_grad_enabled() else "eval")
        return tables.open(planned, [read], self._frozen_now()), 0

    # --- training ---------------------------------------------------------------------------

    def step(self) -> None:
        """Apply the step's row gradients: `optimizer.step()`."""
        self.optimizer.step()

    def reduce(self) -> None:
        """Sum the step's row gradients over the ranks, if backward has not done so.

        The end of the last backward pass does it; a rank whose loss did not depend on the
        embeddings, so that backward did not come here, calls this instead. Raises PlanError
        before the last micro-batch.
        """
        tables = self.tables
        if tables.current is not None:
            tables.current.ready(without_backward=True)

    def freeze(self, *tables: str) -> None:
        """From the next step on, leave these tables as they are; by all ranks before the same step.

        Their rows get no gradient, no update and no step count, until `unfreeze`. All tables of a
        collection are frozen by `requires_grad_(False)`, also of a module around it or of its
        parameters. Raises ConfigError for a table that is not there.
        """
        self._frozen |= self._known(tables)

    def unfreeze(self, *tables: str) -> None:
        """Train these tables again, from the next step on; see `freeze`."""
        self._frozen -= self._known(tables)

    def _known(self, names: Iterable[str]) -> set[str]:
        known = [spec.name for spec in self._recipe.lookups.specs]
        for name in names:
            if name not in known:
                raise ConfigError(f"no table is named {name!r}: there are {', '.join(known)}")
        return set(names)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The tables that the next step will leave as they are."""
        frozen = self._frozen_now()
        return tuple(s.name for at, s in enumerate(self._recipe.lookups.specs) if at in frozen)

    def _frozen_now(self) -> frozenset[int]:
        """The frozen tables by index: what a step is opened with."""
        specs, all_of_them = self._recipe.lookups.specs, not self.trainable.requires_grad
        named = (at for at, spec in enumerate(specs) if all_of_them or spec.name in self._frozen)
        return frozenset(named)

    def stage_ms(self) -> dict[str, float]:
        """Milliseconds per step of each stage so far, and of the loop's `wait`; local."""
        return self.tables.record_all().mean_ms()

    @contextmanager
    def trace(self, folder: str | PathLike[str]) -> Iterator[None]:
        """Write the stages of all ranks meanwhile to `folder`/trace.json, for ui.perfetto.dev.

        `with ebc.trace("runs/mine"):` around a loop, entered and left by all ranks; also what an
        error or a Ctrl-C ends is there. `trace.json.gz` beyond 64 MiB. Raises ConfigError where the
        folder cannot be written.
        """
        tables, asked = self.tables, (f"trace({str(folder)!r})", "folder")
        watchers, streams = tables.record_all().watchers, tables.engine.streams
        seldom, streams.timed_every = streams.timed_every, 1
        with tracing(tables.world, Path(folder), watchers.append, asked):
            try:
                yield
            finally:
                tables.record_all()
                watchers.pop()
                streams.timed_every = seldom

    def summary(self) -> dict[str, Any]:
        """Hit rates, rows and bytes moved, memory and stage times so far, named as in a run's
        `summary.json`; called by all ranks."""
        return self.tables.summary()

    def flush(self) -> None:
        """Bring every changed row to host memory; called by all ranks."""
        self.tables.flush()

    def export(
        self,
        folder: str | PathLike[str],
        form: str = "safetensors",
        rows: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write tables to files, from rank 0's node; called by all ranks.

        `form`: `safetensors`, or `parquet` with columns `id` and `vector`; `rows`: of Parquet, the
        tables that are written and their ids, int64, ascending and distinct; None: all. Raises
        DistcacheError where files cannot be written, PlanError on several nodes, none of which has
        whole tables: export a checkpoint there.
        """
        tables = self.tables
        self._known(rows or ())
        tables.flush()

        def write() -> None:
            found = {
                spec.name: Stored.of(tables.whole.local(index)[0])
                for index, spec in enumerate(tables.tables)
                if rows is None or spec.name in rows
            }
            write_tables(Path(folder), form, found, rows)

        on_first(tables.world, write)

    def mark(self, changed: Mapping[str, np.ndarray] | None = None) -> int:
        """A mark at this step, for `changed_since`; called by all ranks between two steps.

        The last four are kept in memory, each a bit for every row. To keep one over a resume, save
        its `changed_since` with the checkpoint, and give that as `changed`, on any number of ranks.
        Raises ConfigError for ids that are in no table, or not the same on all ranks.
        """
        tables = self.tables
        changed = {name: np.asarray(ids, np.int64) for name, ids in (changed or {}).items()}
        sums = {name: hashlib.sha256(ids.tobytes()).hexdigest() for name, ids in changed.items()}
        agree_on(tables.world, {"changed": sorted(sums.items())})
        self._known(changed)
        for spec in self._recipe.lookups.specs:
            ids = changed.get(spec.name, np.empty(0, np.int64))
            if len(ids) and not 0 <= ids.min() <= ids.max() < spec.rows:
                raise ConfigError(
                    f"changed: table {spec.name!r} has ids 0 to {spec.rows - 1}, not "
                    f"{ids.min()} to {ids.max()}"
                )
        tables.flush()
        return tables.engine.mark(changed)

    def changed_since(self, mark: int) -> dict[str, np.ndarray]:
        """The ids of each table, int64, ascending, of the rows named by steps that were applied, or
        written by hand, since `mark`: the `rows` that `export` takes. Called by all ranks.

        A row counts that was named with a gradient of zero; frozen tables and steps that were left
        out have none. Raises PlanError for a mark that is not kept.
        """
        self.tables.flush()
        return self.tables.engine.changed_since(mark)

    def init_from(
        self, folder: str | PathLike[str], names: Mapping[str, str] | None = None
    ) -> None:
        """Let tables have the weights in the `*.safetensors` of a folder, which every node reads
        block by block; called by all ranks. Optimizer state stays.

        Table `t` is tensor `t` or `t.weight`, or one whose name ends with `.t.weight`;
        `names={"t": "u"}`: look for u. Rows and tables that are not in the files stay as they are;
        the log of rank 0 lists them. Raises ConfigError for another width or more rows, and
        DataError for damaged files, on all ranks.
        """
        tables, found, said = self.tables, dict[int, Stored](), ""

        def find() -> None:
            nonlocal said
            weights, said = find_weights(read_safetensors(Path(folder)), tables.tables, names or {})
            found.update(weights)

        together(tables.world, find)
        tables.fill(found)
        if tables.world.is_first:
            log.info("from %s: %s", folder, said)

    def close(self) -> None:
        """Stop planning and let go of the tables; safe to call twice."""
        self._member.close()

    # --- nn.Module --------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The empty parameter whose `requires_grad` freezes; none without `recurse`.

        DDP asks module by module, without `recurse`, for what it must reduce: it would wait for a
        gradient that this one never gets.
        """
        if recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Whole tables in original ids, after a flush, as views of the store (on several nodes
        copies, one on each); by all ranks."""
        if self.is_aside:
            return
        for table, (weight, _) in self.tables.views():
            destination[f"{prefix}{self._tables_key}.{table.name}.weight"] = weight

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take whole tables; by all ranks. Keys and errors as nn.Module reports them."""
        if self.is_aside:
            return
        found: dict[int, Tensor] = {}
        expected = set()
        for index, table in enumerate(self._recipe.lookups.specs):
            key = f"{prefix}{self._tables_key}.{table.name}.weight"
            expected.add(key)
            value, want = state_dict.get(key), (table.rows, table.dim)
            if key not in state_dict:
                missing_keys.append(key)
            elif not isinstance(value, Tensor) or tuple(value.shape) != want:
                got = getattr(value, "shape", type(value).__name__)
                error_msgs.append(f"size mismatch for {key}: {got} in the checkpoint, not {want}")
            else:
                found[index] = value
        unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in expected]
        self.tables.replace([(index, slice(None), value) for index, value in found.items()])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """`.to()` and the like: the cache stays where it is, so they may only ask for that."""
        dtype, device = self._recipe.settings.dtype, self._recipe.device
        probe = fn(torch.empty(0, dtype=dtype, device=device))
        if probe.device != device or probe.dtype != dtype:
            raise ConfigError(
                f"the cache lies on {device} in {dtype} and cannot become {probe.device}, "
                f"{probe.dtype}: make {type(self).__name__} with device= and dtype="
            )
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise PlanError: the tables are shared memory that other ranks hold too."""
        raise PlanError(
            f"a {type(self).__name__} can be neither copied nor pickled: save its state_dict(), "
            "and load that into a new one"
        )

    def extra_repr(self) -> str:
        """One line for each table."""
        return "\n".join(
            f"({table.name}): {table.rows} x {table.dim}, {table.pooling}"
            for table in self._recipe.lookups.specs
        )


def _concrete(device: torch.device | str | None) -> torch.device:
    """The device with its index; None is torch's default device."""
    chosen = torch.get_default_device() if device is None else torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={chosen}: a cache lies on 'cpu' or 'cuda'")
    return chosen


# -----------------------------------------------------------------------------
# `CachedEmbeddingBagCollection`: TorchRec's EmbeddingBagCollection over cached rows.


class CachedEmbeddingBagCollection(CachedCollection, EmbeddingBagCollectionInterface):
    """Whole tables in host memory, a cache of rows on the device; trains as if all were there.

    Takes the place of `torchrec.EmbeddingBagCollection`: `KeyedJaggedTensor` in, `KeyedTensor`
    out, the same key order and names, the same `state_dict`. Its tables are neither parameters
    nor buffers: DDP neither sees nor broadcasts them; `step()` (or `optimizer.step()`) updates
    them, never backward. Read batches through `distcache.lookahead(batches, ebc)`; a batch that
    comes otherwise is planned when it comes: slower, with the same result.

    Every rank of the process group makes it, calls it, steps it, and asks for its `state_dict`, in
    the same order. With W ranks each sees the sum of all ranks' row gradients, times 1/W for
    `gradient_reduction="mean"` (what DDP does for the dense part).
    """

    _tables_key, _config = "embedding_bags", EmbeddingBagConfig

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        optimizer: RowUpdate | Mapping[str, RowUpdate],
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        **settings: Any,
    ) -> None:
        """`tables`, `is_weighted`, `device` as in TorchRec; the device does not change later.

        `optimizer`: one of `distcache.optim`, with its settings, or one for each table by name,
        which differ in `lr` and `weight_decay` alone. `process_group`: whose ranks train together
        (all, where torch.distributed is initialised; else this process alone); groups of its own
        are made from it. `timeout_s`: longest wait for another rank, seconds.

        Settings by keyword: at most one of `rows` (slots per rank over all tables), `ratio` (of
        each width's rows) and `bytes` (default: 1.5 % of them, at least 32 MiB); `lookahead="auto"`
        (8 to 64, by the first batch) and `prefetch=1`, optimizer steps that ids are known, and rows
        may move, ahead;
        `policy="lookahead"|"lfu"|"lru"|"frequency"|"static"`, with
        `tail="lfu"|"lru"|"frequency"` and `half_life="auto"|steps`;
        `statistics`, a folder of distcache.analyze or distcache.preprocess or a `Statistics`, with
        `warm_start` and `split` as the keys of group `cache` (`batch_size`: samples of an
        optimizer step over all ranks, for `split="by_curve"` and `policy="static"`);
        `schedule="overlapped"|"serial"`: rows move beside the steps, or between them;
        `store_access="staged"|"zero_copy"`: through buffers, or read and written in host memory;
        `reduction="ordered"|"native"`, whose bits do not or may depend on the cache;
        `gradient_reduction="mean"|"sum"`; `dtype=torch.float32|torch.float64`; `seed=0` of the
        initial rows; `on_bad_id="error"|"hash"` (modulo the table's rows).

        Raises ConfigError, on every rank, and MemoryTooSmallError where host or device memory
        does not hold the tables or the cache.
        """
        super().__init__()
        self._is_weighted = is_weighted
        self._make(tables, device, optimizer, process_group, timeout_s, settings)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configs."""
        return self._recipe.configs

    def is_weighted(self) -> bool:
        """Whether ids come with weights."""
        return self._is_weighted

    @property
    def embedding_names(self) -> list[str]:
        """The keys of the `KeyedTensor`: `feature`, or `feature@table` for a shared feature."""
        return list(self.reader.lookups.names)

    @torch.compiler.disable
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings `[b, sum of widths]`; called by all ranks.

        Raises PlanError for a batch that is not the one that `lookahead` gave out next, DataError
        for ids or keys that do not fit, StepTooLargeError when the cache does not hold the step.
        """
        step, micro = self._open(features)
        return KeyedTensor(
            keys=self.embedding_names,
            length_per_key=list(self.reader.lookups.dims),
            values=step.pooled(micro),
        )


# -----------------------------------------------------------------------------
# `CachedEmbeddingCollection`: TorchRec's EmbeddingCollection over cached rows.


class CachedEmbeddingCollection(CachedCollection, EmbeddingCollectionInterface):
    """Whole tables in host memory, a cache of rows on the device; the row of every id comes out.

    Takes the place of `torchrec.EmbeddingCollection` (sequence embeddings, nothing is pooled):
    `KeyedJaggedTensor` in, a dictionary of `JaggedTensor`s out, with the same keys and the same
    `state_dict`; weights of ids are not read, as in TorchRec. All else is as in
    `CachedEmbeddingBagCollection`: `distcache.lookahead(batches, ec)` reads batches ahead,
    `step()` (or `optimizer.step()`) updates the tables, and all ranks do these together. Unlike
    TorchRec's, its tables may differ in width.
    """

    _tables_key, _config, _pooled = "embeddings", EmbeddingConfig, False

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        optimizer: RowUpdate | Mapping[str, RowUpdate],
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        **settings: Any,
    ) -> None:
        """`tables`, `device`, `need_indices` as in TorchRec; the device does not change later.

        `need_indices`: the ids come along, as the weights of the `JaggedTensor`s. The other
        arguments, and what is raised, are those of `CachedEmbeddingBagCollection`.
        """
        super().__init__()
        self._need_indices = need_indices
        self._make(tables, device, optimizer, process_group, timeout_s, settings)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs."""
        return self._recipe.configs

    def need_indices(self) -> bool:
        """Whether ids come along with their rows."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """The width of all tables; raises ConfigError where they differ."""
        widths = sorted({config.embedding_dim for config in self._recipe.configs})
        if len(widths) > 1:
            raise ConfigError(f"embedding_dim(): the tables have several widths, {widths}")
        return widths[0]

    def embedding_names_by_table(self) -> list[list[str]]:
        """The keys of the output, by table: `feature`, or `feature@table` for a shared feature."""
        return get_embedding_names_by_table(self._recipe.configs)

    @torch.compiler.disable
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The rows of every feature's ids, `values` `[n, D]` with the ids' lengths; by all ranks.

        Raises PlanError for a batch that is not the one that `lookahead` gave out next, DataError
        for ids or keys that do not fit, StepTooLargeError when the cache does not hold the step.
        """
        step, micro = self._open(features)
        ids, rows, device = step.reads[micro].ids, step.rows(micro), self._recipe.device
        given, names = features.lengths_or_none(), self.reader.lookups.names
        dtype = torch.int64 if given is None else given.dtype
        by_lookup = ids.offsets.diff().view(len(names), ids.batch_size)
        ends = torch.zeros(len(names), ids.batch_size + 1, dtype=torch.int64)
        torch.cumsum(by_lookup, 1, out=ends[:, 1:])
        lengths, offsets = (to_device(part.to(dtype), device) for part in (by_lookup, ends))
        indices: Sequence[Tensor | None] = [None] * len(rows)
        if self._need_indices:
            indices = to_device(ids.values, device).split([len(part) for part in rows])
        return {
            name: JaggedTensor(rows[at], indices[at], lengths[at], offsets[at])
            for at, name in enumerate(names)
        }
