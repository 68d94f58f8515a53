"""What all modules of the drop-in have: tables in host memory, a cache of rows, and their step."""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn

from distcache.comm.link import require_equal, run_on_all_ranks, run_on_rank0
from distcache.embedding.flag import make_flag
from distcache.embedding.ids import IdReader, KeyedJaggedTensor, checked_configs, lookups_of
from distcache.embedding.lazy_tables import LazyTables
from distcache.embedding.open_step import OpenStep
from distcache.embedding.optimizer import RowOptimizer, resolve_optimizer
from distcache.embedding.settings import (
    CacheSettings,
    CollectionConfig,
    NoUpdate,
    StepParameters,
    check_names,
    concrete_device,
    library_words,
)
from distcache.embedding.step import CollectionTables
from distcache.embedding.weights import TableViews
from distcache.engine.tracing import tracing
from distcache.errors import ConfigError, DataError, PlanError
from distcache.optim import by_table
from distcache.store.table_files import Stored, find_weights, read_safetensors, write_tables

if TYPE_CHECKING:
    from distcache.embedding.stream import LookaheadIterator

log = logging.getLogger(__name__)

EAGER_ONLY = (
    "rows are planned and moved outside of graphs; to export the model, export "
    "distcache.to_torchrec(model)"
)
"""Reason for which no graph of torch.compile or torch.export has a lookup inside."""

# -----------------------------------------------------------------------------
# What the drop-in collections have in common: all but what comes out of a lookup.


class CachedCollection(nn.Module):
    """Tables in host memory, a cache of rows on the device, behind one of TorchRec's interfaces.

    A collection says under which name its tables are in a `state_dict`, and forms the output of
    `forward` from the step and the micro-batch that `_open` finds. A copy (`copy.deepcopy`, of
    which weight averaging and teachers are made) reads the tables of the first, and trains nothing.
    """

    _tables_key: ClassVar[str]
    """The name of the tables in a `state_dict`, before that of a table."""

    _config_type: ClassVar[type]
    """What a table is described by."""

    _takes: ClassVar[type] = KeyedJaggedTensor
    """What ids come in."""

    _pooled: ClassVar[bool] = True
    """Whether bags come out, rather than the row of every id."""

    _copied: tuple[Any, ...] = ()
    """That whose tables these are, where this is a copy."""

    def _make(
        self,
        tables: Sequence[Any],
        device: torch.device | str | None,
        optimizer: Any,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        settings: dict[str, Any],
    ) -> None:
        """What `__init__` does after nn.Module's; raises what the collections say of theirs."""
        name = type(self).__name__
        kind, given = (settings.pop(f"optimizer_{what}", None) for what in ("type", "kwargs"))
        update, in_backward = resolve_optimizer(optimizer, kind, given)
        check_names(settings, name)
        if not (isinstance(timeout_s, int | float) and timeout_s > 0):
            raise ConfigError(f"timeout_s={timeout_s!r}: give seconds above 0")
        numbers = {key: v.item() for key, v in settings.items() if isinstance(v, np.generic)}
        chosen = CacheSettings(**settings | numbers)
        configs, where = checked_configs(tables, self._config_type), concrete_device(device)
        lookups = lookups_of(configs)
        keys = [self._key_of(spec.name) for spec in lookups.specs]
        updates = by_table(update, [spec.name for spec in lookups.specs])
        parts = (configs, lookups, updates, in_backward, chosen, where, name, self._pooled)
        config = CollectionConfig(*parts, StepParameters(keys, updates))
        config.check_sizes()
        config.show()
        self.reader = IdReader(lookups, self._pooled)
        waits = device is None or where.type == "meta" or not lookups.specs
        self._lazy_tables = LazyTables(config, process_group, timeout_s, waits)
        self.optimizer = RowOptimizer(self._lazy_tables)
        self._frozen = set[str]()
        self._views: tuple[Mapping[str, Tensor], TableViews] | None = None
        self._dtype = chosen.dtype
        """That in which embeddings come out."""
        self.is_aside = False
        """While set, `state_dict` and `load_state_dict` pass over the tables."""
        self.trainable = make_flag(where)
        """Empty: its `requires_grad` says whether the tables train."""

    def _key_of(self, table: str) -> str:
        """The name of a table in a `state_dict`."""
        return f"{self._tables_key}.{table}.weight"

    @property
    def _config(self) -> CollectionConfig:
        return self._lazy_tables.config

    @property
    def tables(self) -> CollectionTables:
        """The tables; made now, by all ranks, if they are not there yet."""
        self._take_device()
        self._lazy_tables.trainable = self.trainable
        return self._lazy_tables.tables

    @property
    def device(self) -> torch.device:
        """Where the cache lies and the embeddings come out."""
        return self._lazy_tables.config.device

    def fused_optimizer(self) -> RowOptimizer:
        """The optimizer, by the name that it has in TorchRec's fused collections."""
        return self.optimizer

    def _table_views(self) -> nn.ModuleDict:
        """The tables by name, each with its `weight`; none of them among this module's own."""
        self._take_device()
        weights = self._lazy_tables.expose()
        if self._views is None or self._views[0] is not weights:
            self._views = weights, TableViews(weights)
        return self._views[1]

    def reset_parameters(self) -> None:
        """Let each config's `init_fn` fill its table anew; not on 'meta'. Called by all ranks."""
        self._take_device()
        if self.device.type == "meta":
            return
        if self._lazy_tables.made is None:
            self._lazy_tables.draw()
            return
        views = self._table_views()
        with torch.no_grad():
            for config in self._config.configs:
                if config.init_fn is not None:
                    config.init_fn(views[config.name].weight)

    def _open(self, features: KeyedJaggedTensor) -> tuple[OpenStep, int]:
        """The step, with its rows on the device, and the micro-batch that `features` is."""
        tables = self.tables
        if not isinstance(features, self._takes):
            raise DataError(f"{type(features).__name__} is no {self._takes.__name__}")
        tables.look_at_weights()
        return self._locate(tables, features)

    def _pool(self, features: Any, weighted: bool) -> Tensor:
        """Return the bags of `features`, `[b, sum of widths]`.

        `weighted`: multiply rows by the weights that come with the ids.
        """
        reads_alone = self._only_reads
        with self._lazy_tables.forward(self._trains and not reads_alone):
            step, micro = self._open(features)
            weights = None
            if weighted:
                weights = self.reader.weights(step.reads[micro], features, self.device)
            # Opening a step may take the optimizer of `apply_optimizer_in_backward`.
            reads_alone = reads_alone and self._only_reads
            pooled = step.pooled(micro, weights, reads_alone=reads_alone)
        self._refuse_gradients([pooled])
        return pooled

    def _locate(
        self, tables: CollectionTables, features: KeyedJaggedTensor
    ) -> tuple[OpenStep, int]:
        if self.reader.is_remapped and self.training and tables.world.size > 1:
            raise ConfigError(
                "TorchRec's managed collisions map ids on each rank by the ids of that rank alone: "
                f"on {tables.world.size} ranks one row would stand for different ids. Train on one "
                "rank, or map ids to rows before the batches come to the model"
            )
        found = self._find(tables, features)
        if found is not None:
            where, micro = found
            opened = isinstance(where, OpenStep)
            return (where, micro) if opened else where.open_next(tables, self._frozen_now())
        tables.end_current()
        read = self.reader.read(features)
        recorded = torch.is_grad_enabled() and not self._only_reads
        planned = tables.plan_inline([read], "train" if recorded else "eval")
        return tables.open(planned, [read], self._frozen_now()), 0

    def _find(
        self, tables: CollectionTables, features: KeyedJaggedTensor
    ) -> tuple[LookaheadIterator | OpenStep, int] | None:
        """The look-ahead whose next batch `features` is, or the step and the micro-batch that it is
        of. Raises PlanError in training where a look-ahead gave out another batch."""
        trains = self._trains and not self._only_reads
        for by_content in (False, trains):  # another batch may have the same ids
            for stream in tables.streams:
                if stream.match(features, by_content):
                    return stream, 0
            for step, micro in tables.earlier.lookups():
                read = step.reads[micro]
                if read.is_of(features) and read.is_unchanged(features, self.reader.read):
                    return step, micro
        for stream in tables.streams:
            if trains and stream.outstanding:
                raise stream.mismatch_error()
        return None

    # --- training ---------------------------------------------------------------------------

    def step(self) -> None:
        """Apply the step's row gradients: `optimizer.step()`."""
        if self._copied:
            raise self._reads_alone("step")
        self.optimizer.step()

    def reduce(self) -> None:
        """Sum the step's row gradients over the ranks, if backward has not done so.

        The end of the last backward pass does it; a rank whose loss did not depend on the
        embeddings, so that backward did not come here, calls this instead. Raises PlanError
        before the last micro-batch.
        """
        tables = self.tables
        with tables.reports:
            step = tables.earlier.joined()
            if step is not None:
                step.ready(without_backward=True)

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
        known = [spec.name for spec in self._config.lookups.specs]
        for name in names:
            if name not in known:
                raise ConfigError(f"no table is named {name!r}: there are {', '.join(known)}")
        return set(names)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The tables that the next step will leave as they are."""
        frozen = self._frozen_now()
        return tuple(s.name for at, s in enumerate(self._config.lookups.specs) if at in frozen)

    def _frozen_now(self) -> frozenset[int]:
        """The frozen tables by index: what a step is opened with."""
        specs = self._config.lookups.specs
        if not (self._copied or (self,))[0].trainable.requires_grad:
            return frozenset(range(len(specs)))
        frozen = self._frozen | self._lazy_tables.frozen()
        named = [at for at, spec in enumerate(specs) if spec.name in frozen] if frozen else ()
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
                spec.name: Stored.of(tables.full_tables.local(index)[0])
                for index, spec in enumerate(tables.tables)
                if rows is None or spec.name in rows
            }
            write_tables(Path(folder), form, found, rows)

        run_on_rank0(tables.world, write)

    def mark(self, changed: Mapping[str, np.ndarray] | None = None) -> int:
        """A mark at this step, for `changed_since`; called by all ranks between two steps.

        The last four are kept in memory, each a bit for every row. To keep one over a resume, save
        its `changed_since` with the checkpoint, and give that as `changed`, on any number of ranks.
        Raises ConfigError for ids that are in no table, or not the same on all ranks.
        """
        tables = self.tables
        changed = {name: np.asarray(ids, np.int64) for name, ids in (changed or {}).items()}
        sums = {name: hashlib.sha256(ids.tobytes()).hexdigest() for name, ids in changed.items()}
        require_equal(tables.world, {"changed": sorted(sums.items())})
        self._known(changed)
        for spec in self._config.lookups.specs:
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

        run_on_all_ranks(tables.world, find)
        whole = tables.let_go()
        for index, source in found.items():
            whole.fill(index, source)
        if tables.world.is_first:
            log.info("from %s: %s", folder, said)

    def load_table(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        """Let the weights of table `name` be `tensor`; called by all ranks between two steps.

        `rows`: the slice of rows that `tensor` `[n, D]` has, all by default. Optimizer state stays.
        Raises ConfigError for an unknown table, `rows` that are no ascending slice, values that are
        no real numbers and another shape, and PlanError inside a step and for a slice on several
        nodes.
        """
        self._known([name])
        specs = self._config.lookups.specs
        index = [spec.name for spec in specs].index(name)
        part = slice(None) if rows is None else rows
        try:
            values = torch.as_tensor(tensor).detach()
            bounds = slice.indices(part, specs[index].rows)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"load_table({name!r}): give a tensor and rows=slice(first, end), not "
                f"rows={rows!r} and a {type(tensor).__name__} ({error})"
            ) from error
        if bounds[2] < 1 or values.is_complex() or values.is_meta:
            raise ConfigError(
                f"load_table({name!r}): rows={rows!r} and values of {values.dtype} on "
                f"{values.device}: give an ascending slice and real numbers on a device"
            )
        count = len(range(*bounds))
        if tuple(values.shape) != (count, specs[index].dim):
            raise ConfigError(
                f"load_table({name!r}): a tensor of shape {list(values.shape)} for {count} rows of "
                f"width {specs[index].dim}: give one of shape [{count}, {specs[index].dim}]"
            )
        if rows is None:
            self.tables.replace([(index, slice(None), values)])
            return
        with torch.no_grad():
            self._table_views()[name].weight[rows] = values

    def close(self) -> None:
        """Stop planning and let go of the tables, of which a copy has none; safe to call twice."""
        if not self._copied:
            self._lazy_tables.close()

    # --- copies -----------------------------------------------------------------------------

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedCollection:
        """A module over the same tables, which reads what they are then, and trains nothing."""
        copied = type(self).__new__(type(self))
        own = vars(self) | {"_views": None, "_copied": ()}
        shared = (own[name] for name in ("_lazy_tables", "reader", "optimizer", "_frozen"))
        memo.update({id(self): copied} | {id(one): one for one in shared})
        vars(copied).update(copy.deepcopy(own, memo), _copied=self._copied or (self,))
        if not self._lazy_tables.was_copied:
            self._lazy_tables.was_copied = True
            log.warning(
                "a copy of a %s has no tables of its own: it reads those of the first, which go on "
                "training. To keep them as they are, use distcache.save, or copy its state_dict()",
                type(self).__name__,
            )
        return copied

    @property
    def _only_reads(self) -> bool:
        """Whether nothing trains the tables through this module: a copy, or no optimizer."""
        return bool(self._copied) or type(self._lazy_tables.config.updates[0]) is NoUpdate

    def _refuse_gradients(self, outputs: Sequence[Tensor]) -> None:
        """Let a backward pass raise that reaches outputs of a module that cannot train."""
        if not self._only_reads:
            return

        def refuse(gradient: Tensor) -> None:
            with library_words(self._config):
                raise self._reads_alone("be trained") if self._copied else NoUpdate().missing()

        if self._copied:
            is_frozen = not self.trainable.requires_grad
        else:
            is_frozen = len(self._frozen_now()) == len(self._config.lookups.specs)
        if self._trains and not is_frozen:
            for values in outputs:
                values.requires_grad_(True).register_hook(refuse)

    def _reads_alone(self, what: str) -> PlanError:
        return PlanError(
            f"a copy (copy.deepcopy) of a {type(self).__name__} cannot {what}: it reads the tables "
            "of the first, which has the steps. Call it after eval() or in torch.no_grad(), or "
            "freeze it by requires_grad_(False); to train other tables make another collection"
        )

    # --- tools that need stock modules --------------------------------------------------------

    def _stock_needed(self, tool: str) -> ConfigError:
        """Return the error for a tool that needs tables as parameters, in stock modules."""
        return ConfigError(
            f"{tool} does not take a {type(self).__name__}, whose rows lie in host memory and in a "
            "cache: give it distcache.to_torchrec(model), the same model with stock modules"
        )

    def _refuse_export(self) -> None:
        """Raise ConfigError if torch.export traces the model."""
        if torch.compiler.is_exporting():
            raise self._stock_needed("torch.export")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Quantizers give each module a `qconfig`: None to those whose class they do not know, which
        they leave as they are. Raises ConfigError, because the tables would stay as they are too.
        """
        if name == "qconfig" and value is None:
            raise self._stock_needed("quantization of a whole model")
        super().__setattr__(name, value)

    # --- nn.Module --------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return what nn.Module keeps under `name`.

        Python also comes here after a property has raised AttributeError. nn.Module would report
        that the property is missing, so it is computed again, which raises its own error.
        """
        attribute = inspect.getattr_static(type(self), name, None)
        if isinstance(attribute, property):
            return attribute.__get__(self)
        return super().__getattr__(name)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The empty parameter whose `requires_grad` freezes; in its place the tables, once
        `apply_optimizer_in_backward` was called on some, for TorchRec's filters of parameters.

        None without `recurse`: DDP asks so, module by module, for what it must reduce, and would
        wait for a gradient that this one never gets. A module around sees the empty one, because
        DDP would broadcast tables.
        """
        weights = {} if self._copied else self._lazy_tables.weights
        if recurse and any(hasattr(own, "_in_backward_optimizers") for own in weights.values()):
            start = f"{prefix}." if prefix else ""
            yield from ((start + self._key_of(name), own) for name, own in weights.items())  # type: ignore[misc]
        elif recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The empty parameter, never a table, of which an optimizer would have state."""
        return iter([self.trainable] if recurse else [])

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Whole tables in original ids, after a flush, as views of the store (on several nodes
        copies, one on each); by all ranks."""
        if self.is_aside or not self._config.lookups.specs:
            return
        if self.device.type == "meta":
            found = dict(self._lazy_tables.expose())
        else:
            views = self.tables.views()
            found = {table.name: _alone(own) for table, (own, _) in views if own is not None}
        for name, weight in found.items():
            destination[prefix + self._key_of(name)] = weight

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
        for index, table in enumerate(self._config.lookups.specs):
            key = prefix + self._key_of(table.name)
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
        if expected:
            self.tables.replace([(index, slice(None), value) for index, value in found.items()])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """`.to()` and the like: they may say where the cache will lie; once it is made, they may
        only ask for what is so."""
        dtype, device = self._dtype, self.device
        try:
            probe = fn(torch.empty(0, dtype=dtype, device=device))
        except NotImplementedError:  # 'meta' has no data that could be copied, nor is there any
            probe = fn(torch.empty(0, dtype=dtype, device="cpu"))
            self.trainable = make_flag("cpu").requires_grad_(self.trainable.requires_grad)
        if probe.dtype != dtype or (probe.device != device and self._lazy_tables.made is not None):
            way = "with device=, or move it before its first use"
            way = "with dtype=" if probe.dtype != dtype else way
            raise ConfigError(
                f"the cache lies on {device} in {dtype} and cannot become {probe.device}, "
                f"{probe.dtype}: make {type(self).__name__} {way}"
            )
        super()._apply(fn, recurse)
        if self.trainable.device != device:
            self._lazy_tables.move(concrete_device(self.trainable.device))
        return self

    def _take_device(self) -> None:
        """Take the device of the flag, where that was made anew on one as wrappers of models on
        'meta' do."""
        where = self.trainable.device
        if self.device.type == "meta" and where.type != "meta":
            self._lazy_tables.move(concrete_device(where))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise PlanError: the tables are shared memory that other ranks hold too."""
        raise PlanError(
            f"a {type(self).__name__} cannot be pickled (copy.deepcopy gives a module over the "
            "same tables): save its state_dict(), and load that into a new one, or pickle "
            "distcache.to_torchrec(model), the same model with stock modules"
        )

    def extra_repr(self) -> str:
        """One line for each table."""
        return "\n".join(
            f"({table.name}): {table.rows} x {table.dim}, {table.pooling}"
            for table in self._config.lookups.specs
        )


def _alone(rows: Tensor) -> Tensor:
    """`rows` `[n, D]` of a store, whose storage is that of no other table: libraries take tensors
    of one storage for one tensor, and torch.save writes whole storages."""
    return torch.from_numpy(rows.view(torch.uint8).numpy()).view(rows.dtype)


def is_traced(features: Any) -> bool:
    """Whether torch.fx is tracing the model."""
    return isinstance(features, torch.fx.Proxy)


def as_node(collection: nn.Module, features: Any, *others: Any) -> Any:
    """The call of a collection in a graph that torch.fx traces: one node, whatever is inside."""
    name = features.tracer.path_of_module(collection)
    return features.tracer.create_proxy("call_module", name, (features, *others), {})
