"""`distcache.fit`: train a model of your own on data of your own, in any of the parallel modes."""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn

from distcache.checkpoint.state import Start, TrainerState, load_checkpoint
from distcache.comm.link import agree_on_versions, require_equal, run_on_all_ranks, run_on_rank0
from distcache.comm.rendezvous import ErrorReports
from distcache.comm.world import World, close_world, current_world, open_world
from distcache.config.checks import as_words, check_own, refuse_if
from distcache.config.keys import flat_settings
from distcache.config.tree import Config
from distcache.data.batch import Batch, BatchCheck
from distcache.data.own import (
    STATELESS,
    Draws,
    OwnBatches,
    digest_of,
    eval_batches,
    read_position,
)
from distcache.errors import ConfigError, DataError, StepTooLargeError
from distcache.layout import TableSpec, lookup_names
from distcache.sizing.resolve import most_ahead, opens_window
from distcache.train import is_restart, new_run_dir, run_dir_of_job, run_folder
from distcache.trainer import build
from distcache.trainer.record import Progress
from distcache.trainer.schedule import Schedule
from distcache.trainer.trainer import Loop, Run, TrainResult, find_starts, identity_of

logger = logging.getLogger(__name__)

_ARGUMENTS = {"parallel.mode": "parallel", "optim.name": "optimizer"}
"""Keys that `distcache.fit` takes as arguments, by these names."""

_OF_LOADERS = (
    "data.global_batch_size", "data.on_bad_id", "data.batching", "data.hot_rows", "data.phase_rate",
)  # fmt: skip
"""Keys of group `data` that are read, or refused by what they mean, where loaders bring batches."""

_BATCH = "data.global_batch_size"

_unnamed_runs = itertools.count()
"""Calls without `run.dir` so far, by which ranks that torchrun starts again find their folders."""


@dataclass(frozen=True)
class OwnSource:
    """What the parts of a run ask of a source, for data that are drawn in order.

    Nothing is known of the data but their last batch, which a run that goes on compares.
    `ids_per_step`: of the first batch of the rank that looks up most; None where nobody asked.
    `global_batch_size`: batches are of any size.
    """

    features: tuple[str, ...]
    table_rows: tuple[int, ...]
    ids_per_step: int | None = None
    steps_per_epoch: None = None
    global_batch_size: int = 0
    identity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnRun(Run):
    """A `Run` whose batches come from `train` on each rank, and evaluations from `evaluate`.

    Ends after the same step on all ranks: when the first rank's data end, at `trainer.steps`, or at
    a stop. `eval_count`: batches of an evaluation, equal on all ranks.
    """

    train: OwnBatches = field(kw_only=True)
    evaluate: Iterable[Any] | None = field(default=None, kw_only=True)
    eval_draws: Draws = field(kw_only=True)
    eval_count: int = field(default=0, kw_only=True)

    def load(self, start: Start, files: World) -> None:
        """See `Run.load`, with the loader open, which goes on after the last trained batch, torch's
        generators from where they were. Raises ConfigError where the loaders cannot, or bring
        another such batch."""
        if start.manifest is None:
            run_on_all_ranks(self.world, self.train.open)
            return
        world, was = self.world, start.manifest.header["run"]["world_size"]
        own = {_key(rank): b"" for rank in (range(was) if was != world.size else [world.rank])}
        load_checkpoint(start, self.mode, files, own)
        where = f"step {start.state.step:,} was saved by {was} rank(s), here are {world.size}"
        found, moved = list[dict[str, Any]](), was != world.size

        def resume() -> tuple[list, tuple[int, int] | None]:
            found.extend(map(read_position, own.values()))
            if moved:
                _check_moved(found, self.train.stateful, f"{where}: resume on {was}, or")
            self.train.resume(found[0])
            self.train.open()
            last = self.train.last
            return [one.get("last") for one in found], last and self._digest(last)

        by_rank, now = zip(*run_on_all_ranks(world, resume), strict=True)
        saved = by_rank[0] if moved else [one for (one,) in by_rank]
        if moved or None not in saved:  # None: no batch has been trained
            self._compare(where, _summed(saved), _summed(now))
        if "random" in found[0]:
            self._set_generators(found[0]["random"], start.state.step, moved)

    def own_state(self, state: TrainerState) -> dict[str, bytes]:
        """The position of this rank's loader, the digest of its slice of the last batch, and the
        states of torch's generators."""
        batch, more = state.batch or self.train.last, {}
        if batch is not None:
            states = {name: own.get_state() for name, own in _generators(self.world).items()}
            more = {"last": self._digest(batch), "random": states}
        return {_key(self.world.rank): self.train.position(state.step, more)}

    def _digest(self, batch: Batch) -> tuple[int, int]:
        """Of a batch as it is trained, where ids may be hashed."""
        check = BatchCheck(self.tables, self.train.lookups, self.config.data.on_bad_id)
        return digest_of(check(batch))

    def _compare(self, where: str, was: tuple[int, int], now: tuple[int, int]) -> None:
        """Raise ConfigError, or warn, where the last global batch is another one."""
        if was == now:
            return
        sizes = f", of {now[0]} samples, than was trained, of {was[0]}"
        differ = f"{where}, whose loaders give another global batch before it"
        differ += sizes if now[0] != was[0] else " than was trained"
        remedy = "all ranks together must bring the same samples. Give such loaders"
        if self.train.stateful:
            remedy = f"{self.train.name}.load_state_dict led to another place: {STATELESS}"
        refuse_if(
            self.config.trainer.resume_data == "same",
            f"{differ}: {remedy}, or go on with these by trainer.resume_data=any",
        )
        if self.world.is_first:
            logger.warning(differ)

    def _set_generators(self, saved: Mapping[str, Tensor], step: int, moved: bool) -> None:
        """Put torch's generators where they were, or begin them anew on another number of ranks;
        but not the CPU's where the loader draws from it, and has drawn again what it had."""
        seed, world = self.config.trainer.seed, self.world
        for name, generator in _generators(world).items():
            if name == "cpu" and self.train.draws_random:
                continue
            if moved:
                generator.manual_seed(zlib.crc32(f"{seed}/{step}/{world.rank}".encode()))
            elif name in saved:
                generator.set_state(saved[name])
        if moved and world.is_first:
            logger.warning(
                "on another number of ranks torch's generators, as of dropout, begin anew, from "
                "trainer.seed=%d, step %d and rank", seed, step,
            )  # fmt: skip

    def schedule(self, start: TrainerState) -> Schedule:
        """Until the data end, or `trainer.steps`."""
        want = self.config.trainer
        return Schedule(start.step, want.steps, want.eval_every, self.eval_count)

    def walk(self, loop: Loop) -> None:
        """Train until the end; then evaluate, where the last evaluation is of an earlier state."""
        try:
            loop.run(self._batches(loop.schedule))
        except StepTooLargeError as error:  # the loaders say how large a batch is, not a key
            error.reword({_BATCH: "the batch size of your loaders"})
            raise
        self.train.close()
        stopped = loop.stop.agreed(self.world) is not None
        if not (loop.done or loop.bad or stopped or loop.schedule.nothing_to_train):
            self._refuse_empty()
        late = loop.evaluation is None and loop.bad is None and self.eval_count > 0
        if late and not stopped:
            loop.run(self._evaluation(self._width()))

    def _refuse_empty(self) -> NoReturn:
        """Raise DataError for a run without a batch. Collective."""
        drawn = run_on_all_ranks(self.world, lambda: self.train.dense_features is not None)
        ranks = ", ".join(str(rank) for rank, some in enumerate(drawn) if not some)
        raise DataError(
            f"nothing was trained: the loader of rank {ranks} has no batch; give each rank one "
            "with items (an iterator that was read before has none)"
        )

    def progress(self, schedule: Schedule) -> Progress:
        """See `Run.progress`; with the steps that the loaders know of."""
        return super().progress(replace(schedule, steps=schedule.steps or self._expected()))

    def _batches(self, schedule: Schedule) -> Iterator[Batch]:
        """Training and evaluation batches in the order of `schedule`."""
        training, evaluation = self.train.batches(schedule.first_step), iter(())
        for kind, index in schedule.order():
            if kind == "eval" and index == 0:
                evaluation = self._evaluation(self.train.dense_features or 1)
            batch = next(training if kind == "train" else evaluation, None)
            if batch is None:
                return
            yield batch

    def _width(self) -> int:
        """Dense features of a batch, as some rank knows them. Collective.

        A rank that has not trained looks into its first evaluation item.
        """

        def known() -> int | None:
            if self.train.dense_features is None:
                for batch in eval_batches(self.evaluate or (), self.train.lookups, 1, 0):
                    return batch.dense.shape[1] or None
            return self.train.dense_features

        return max((width for width in run_on_all_ranks(self.world, known) if width), default=1)

    def _evaluation(self, width: int) -> Iterator[Batch]:
        train, items = self.train, self.evaluate or ()
        self.eval_draws.begin_again()  # each of the same samples
        return eval_batches(items, train.lookups, self.eval_count, width, train.dense_features)

    def _expected(self) -> int | None:
        """Steps until the first rank's end, where all loaders know their lengths."""
        lengths = run_on_all_ranks(self.world, lambda: length_of(self.train))
        return None if None in lengths else min(lengths)


def _key(rank: int) -> str:
    return f"loader.{rank}"


def _generators(world: World) -> dict[str, torch.Generator]:
    """torch's generators that this rank's model may draw from."""
    found = {"cpu": torch.default_generator}
    if world.device.type == "cuda":
        found["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    return found


def _summed(digests: Iterable[tuple[int, int] | None]) -> tuple[int, int]:
    """`digest_of` a global batch from those of its slices."""
    sizes, sums = zip((0, 0), *filter(None, digests), strict=True)
    return sum(sizes), sum(sums) % (1 << 64)


def _check_moved(positions: Sequence[Mapping[str, Any]], stateful: bool, back: str) -> None:
    """Raise ConfigError, which begins with `back`, unless loaders go on on other ranks than those
    of the `positions`."""
    refuse_if(
        stateful and positions[0]["loader"] is not None,
        f"{back} give loaders without state_dict, which are read again: that of these is each "
        "rank's own",
    )
    places = sorted({(own["epoch"], own["items"]) for own in positions})
    refuse_if(
        len(places) > 1,
        f"{back} begin anew with loaders of one length: the ranks were at different (pass, batch) "
        f"{places}",
    )


def length_of(items: Any) -> int | None:
    """How many items there are, where that is known without reading them."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None


def count_evaluation(world: World, loader: Iterable[Any] | None, limit: int | None) -> int:
    """Batches of an evaluation: those of the rank with the most, at most `limit`. Collective.

    A loader that does not know its length is read once to count, unless there is a limit.
    """

    def count() -> int:
        if loader is None:
            return 0
        if iter(loader) is loader:
            raise ConfigError(
                "eval_loader is an iterator, which can be read once: pass an object that makes a "
                "new iterator each time, such as a DataLoader or a list"
            )
        length = length_of(loader)
        if length is None:
            return limit if limit is not None else sum(1 for _ in loader)
        return length if limit is None else min(length, limit)

    return max(run_on_all_ranks(world, count))


def share_weights(model: torch.nn.Module, world: World) -> None:
    """Give all ranks rank 0's parameters and buffers. Collective."""
    for value in (*model.parameters(), *model.buffers()):
        whole = value.detach().cpu()
        dist.broadcast(whole, src=0, group=world.host_group)
        value.detach().copy_(whole)


def table_specs(tables: Sequence[Any]) -> list[TableSpec]:
    """`TableSpec`s as they are, TorchRec's `EmbeddingBagConfig`s as `TableSpec`s. ConfigError for
    none, and for two of one name, by which checkpoints have them."""
    listed = isinstance(tables, Iterable)
    refuse_if(not listed, f"tables={tables!r} is no list: give [table, ...]")
    found = list[TableSpec]()
    for table in tables:
        if not isinstance(table, TableSpec):
            table = TableSpec.of_config(table)
        twice = table.name in [own.name for own in found]
        refuse_if(twice, f"two tables are named {table.name!r}: give each a name of its own")
        found.append(table)
    refuse_if(not found, "tables is empty: give at least one table")
    return found


def with_lookups(tables: Sequence[TableSpec]) -> tuple[list[TableSpec], dict[str, str]]:
    """Return the tables, each read by lookups of its own (`lookup_names`), and the feature that
    each lookup reads. Raises ConfigError for two lookups of one name."""
    names = lookup_names(tables)
    features = [feature for table in tables for feature in table.features]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    refuse_if(
        bool(twice),
        f"tables= have two lookups named {twice[:1]}: name a feature once in each table, and no "
        "feature as feature@table",
    )
    places = iter(names)
    renamed = [
        replace(table, features=tuple(next(places) for _ in table.features)) for table in tables
    ]
    return renamed, dict(zip(names, features, strict=True))


def _refuse_tables_inside(model: nn.Module) -> None:
    """ConfigError for a model that has tables of the drop-in which train: their steps, rates and
    rows in checkpoints would be nobody's here."""
    drop_in = sys.modules.get("distcache.embedding.collection")  # imported if there is one
    kind = () if drop_in is None else drop_in.CachedCollection
    for name, own in model.named_modules():
        if isinstance(own, kind) and len(own.frozen) < len(own.reader.lookups.specs):
            raise ConfigError(
                f"model.{name} is a {type(own).__name__}, whose rows distcache.fit does not train: "
                "give its table in tables=, and read its embeddings from `pooled`; or freeze it by "
                "requires_grad_(False); or train in a loop of your own, see distcache.lookahead"
            )


def own_config(parallel: str, optimizer: str, given: Mapping[str, Any], tables: int) -> Config:
    """The config tree with the `given` values (by dotted key, of `flat_settings`) over its
    defaults. Raises ConfigError."""
    config = Config()
    config.data.name = config.model.name = "own"
    config.data.table_rows = [1] * tables
    config.model.dense_arch = config.model.over_arch = []
    config.parallel.mode, config.optim.name = parallel, optimizer
    config.trainer.eval_steps = "all"
    config.run.dir = "runs"  # `fit` names a folder in it
    _check_own_keys(given)
    tree = OmegaConf.structured(config)
    for key, value in given.items():
        OmegaConf.update(tree, key, value)
    whole: Any = OmegaConf.to_object(tree)
    if _BATCH not in given:
        _check_without_batch(whole)
    return as_words(whole)


def _check_own_keys(keys: Collection[str]) -> None:
    """ConfigError for keys of what is given otherwise: tables, model, data, mode, optimizer."""
    for key in sorted(keys):
        section = key.partition(".")[0]
        argument = f"settings[{key!r}]: give it as the argument {_ARGUMENTS.get(key)}="
        refuse_if(key in _ARGUMENTS, argument)
        refuse_if(
            section == "model" or key == "run.sweep_ranks",
            f"settings[{key!r}] means nothing to a model of your own: leave it out (widths, rows "
            "and pooling are those of its tables)",
        )
        refuse_if(
            section == "data" and key not in _OF_LOADERS,
            f"settings[{key!r}] means nothing to batches of your own loader: leave it out (of "
            f"group data it knows {', '.join(_OF_LOADERS[:2])})",
        )


def _check_without_batch(config: Config) -> None:
    """ConfigError for keys that a prediction decides, which needs to know how large a step is."""
    cache = config.cache
    given = cache.replicated_rows is not None or cache.replicated_share is not None
    predicted = {
        "placement": ("auto",) if given else ("auto", "mixed"),
        "split": ("by_curve",),
        "policy": ("static",),
    }
    for key, values in predicted.items():
        refuse_if(
            config.parallel.mode == "data" and getattr(cache, key) in values,
            f"cache.{key}={getattr(cache, key)} is decided by what a step is expected to need, "
            "and loaders do not say how large their batches are: give "
            f"settings['{_BATCH}'], the samples of a step over all ranks",
        )


_OWN = ("cache.statistics", "trainer.resume", "trainer.log_level")
"""Settings that each rank may have its own of: where it finds a folder, what it says."""


def fit(
    loader: Iterable[Any],
    tables: Sequence[Any],
    model: nn.Module,
    *,
    parallel: str = "data",
    optimizer: str = "adagrad",
    eval_loader: Iterable[Any] | None = None,
    epochs: int = 1,
    settings: Mapping[str, Any] | None = None,
    world: World | None = None,
) -> TrainResult:
    """Train `model` over `tables` on this rank's `loader`; every rank of the job calls this.

    `loader`: any iterable of (dense `[b, F]`, ids, labels `[b]`), ids a KeyedJaggedTensor or
    (values, offsets) or (values, offsets, weights); a step's global batch is what all ranks bring
    to it, and the first rank whose loader ends, ends the run. With `state_dict` and
    `load_state_dict` it resumes where it was, else by reading again what was trained, also on
    another number of ranks that bring the same global batches; either way the last batch is read
    again and compared.
    `tables`: `TableSpec`s or TorchRec's `EmbeddingBagConfig`s; several may read one feature.
    `model(dense [b, F], pooled [b, sum of widths]) -> logits [b]`, pooled in the order of tables
    and of the features of each; all ranks start from rank 0's weights. `parallel`: `data`,
    `resident`, `host` or `hybrid`; `optimizer`: a value of the key `optim`.
    `eval_loader`: held-out items, all of them (or `trainer.eval_steps` batches), at the end and
    every `trainer.eval_every` steps. `settings`: keys of the command line, such as
    `{"cache.rows": 10_000, "optim.dense_lr": 0.01}`, but not what the arguments say (mode and
    optimizer, model, tables, data); with `data.global_batch_size` where a prediction decides
    (`cache.placement` `auto` or `mixed`, `cache.split=by_curve`, `cache.policy=static`).

    Leaves a run folder (`run.dir`, by default `runs/<time>-<mode>`, a new one for each call) and
    returns its summary. With the `run.dir` of a run that has ended nothing is trained: a warning
    says so, and the result is that of the run. Without `world`
    its ranks are those of torch.distributed where that is initialised (in groups of their own, on
    the current device; they are gone when this returns), else those of the job that torchrun's
    environment describes, or this one. Raises ConfigError, also where ranks differ in settings or
    package versions, and DataError, with the way out.
    """
    specs, mapped = table_specs(tables), isinstance(settings or {}, Mapping)
    refuse_if(not mapped, f"settings={settings!r} is no mapping of keys to values")
    is_module = isinstance(model, nn.Module)
    refuse_if(not is_module, f"model={model!r} is no torch.nn.Module of (dense, pooled)")
    given = flat_settings(settings or {})
    config = own_config(parallel, optimizer, given, len(specs))
    check_own(config)
    lone = config.trainer.eval_every is not None and eval_loader is None
    refuse_if(lone, "trainer.eval_every is set, but there is no eval_loader to evaluate on")
    _refuse_tables_inside(model)
    specs, lookups = with_lookups(specs)
    train = OwnBatches(loader, lookups, epochs, keep=most_ahead(config.cache))
    own_world, leave = (world, False) if world is not None else (_join(config), True)
    with torch.random.fork_rng(devices=[]):  # training draws the same without it
        eval_draws = Draws(None if eval_loader is loader else eval_loader)
    with ExitStack() as stack:
        if leave:
            stack.push(lambda kind, *_: _leave(own_world, orderly=kind is None))
        stack.callback(eval_draws.give_back)
        stack.callback(train.close)
        # Entered last, left first: what comes after may wait for threads, other ranks for this.
        stack.enter_context(ErrorReports(own_world.store, own_world.rank))
        agree_on_versions(own_world, parallel == "hybrid")
        require_equal(own_world, _compared(config, specs, model))
        steps = config.trainer.eval_steps
        count = count_evaluation(own_world, eval_loader, None if steps == "all" else steps)
        if "run.dir" not in given:
            name = f"fit/{next(_unnamed_runs)}"
            config.run.dir = run_on_rank0(
                own_world, lambda: run_dir_of_job(new_run_dir(parallel), name)
            )
        run_dir = Path(config.run.dir)
        begun = stack.enter_context(run_folder(config, own_world, is_restart()))
        share_weights(model, own_world)
        source: Any = OwnSource(tuple(lookups), tuple(spec.rows for spec in specs))
        identity = identity_of(config, own_world, source, specs)
        starts = find_starts(config, own_world, run_dir, identity)
        begin = next(starts), starts
        if opens_window(config) or parallel == "hybrid":  # whose kernels are made for weights
            ids, weighted = zip(*run_on_all_ranks(own_world, train.first_look), strict=True)
            source = replace(source, ids_per_step=max(ids))
            config.data.weighted = any(weighted)
        mode = build.build_parallel(config, own_world, specs, model, source)
        run = OwnRun(
            config, own_world, run_dir, source, specs, mode, begin, begun,
            train=train, evaluate=eval_loader, eval_count=count, eval_draws=eval_draws,
        )  # fmt: skip
        result = run.go(build.build_rates(config))
        if result.notice and own_world.is_first:  # also where nobody has configured logging
            advice = "give another run.dir, or run.overwrite=True to train anew"
            warnings.warn(f"{result.notice}; {advice}", stacklevel=2)
        return result


def _leave(world: World, orderly: bool) -> None:
    """Leave a world that this module has opened, whatever becomes of the wait for other ranks."""
    try:
        close_world(world, orderly)
    except BaseException:
        close_world(world, orderly=False)
        raise


def _compared(config: Config, tables: Sequence[TableSpec], model: nn.Module) -> dict[str, Any]:
    """What all ranks give alike: tables, the model's shapes, and settings by key, but those of a
    rank's own place."""
    found: dict[str, Any] = {f"table {table.name!r}": table for table in tables}
    found |= {f"the shape of {name}": list(p.shape) for name, p in model.named_parameters()}
    found["the order of tables"] = [table.name for table in tables]
    for section in fields(config):
        own = getattr(config, section.name)
        if section.name != "run":
            found |= {f"{section.name}.{f.name}": getattr(own, f.name) for f in fields(own)}
    return {key: value for key, value in found.items() if key not in _OWN}


def _join(config: Config) -> World:
    """The world of a process that has one or of torchrun's environment."""
    trainer = config.trainer
    if not dist.is_initialized():
        return open_world(trainer.device, trainer.backend, trainer.timeout_s)
    device = torch.device("cpu")
    if trainer.device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return current_world(device, timeout_s=trainer.timeout_s)
