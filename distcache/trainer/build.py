"""From the config to the parts of a run: data, tables, dense model, optimizer and parallel mode."""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distcache.checkpoint.files import file_world
from distcache.comm.link import require_equal, run_on_all_ranks, run_on_rank0
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.data.batch import BatchSource
from distcache.data.criteo import CriteoArrays, CriteoSource, CriteoSpec
from distcache.data.criteo_folder import KAGGLE_ROWS
from distcache.data.files import InputFile, read_json, write_json
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.engine.groups import SHARDED
from distcache.engine.planning import planner_threads
from distcache.errors import ConfigError, DataError
from distcache.layout import TableSpec
from distcache.models import build_model, initialise
from distcache.optim import LearningRate, RowUpdate, row_update
from distcache.parallel.base import Parallel
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.planner.victims import Policy
from distcache.sizing.resolve import (
    expected_rows,
    request_of,
    resolve_ahead,
    resolve_placement,
    resolve_prefetch,
    resolve_slots,
)
from distcache.sizing.slots import warn_if_too_small

if TYPE_CHECKING:
    from distcache.parallel.hybrid import HybridSpec

log = logging.getLogger(__name__)


def compute_threads(config: Config, world: World) -> int:
    """Return the threads of one torch operation on this rank: `trainer.threads`, or a choice.

    `auto`: $OMP_NUM_THREADS if it is set, unless to 1 for several local ranks, as torchrun does by
    itself. Otherwise 1 with a GPU, where torch's operations on the host are short and the planner
    and the mover need the cores; without one, the rank's share of the cores of the job.
    Raises ConfigError for more threads than cores, because these would wait for one another.
    """
    given, cores = config.trainer.threads, len(os.sched_getaffinity(0))
    if given != "auto":
        if int(given) > cores:
            raise ConfigError(
                f"trainer.threads={given} is more than the {cores} core(s) that this process may "
                f"use: give at most {cores}, or auto"
            )
        return int(given)
    outside = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if outside.isdigit() and (int(outside) > 1 or world.local_size == 1):
        return int(outside)
    if world.device.type == "cuda":
        return 1
    return max(1, cores // world.local_size)


def dtype_of(config: Config) -> torch.dtype:
    """`trainer.dtype` as torch's."""
    return getattr(torch, config.trainer.dtype)


def replays(config: Config) -> bool:
    """Whether a GPU replays the dense part from a graph; `auto`: where that is one of ours."""
    given = config.trainer.cuda_graph
    return given == "true" or (given == "auto" and config.data.name != "own")


def build_source(config: Config) -> BatchSource:
    """The data of group `data`. Raises ConfigError where pyarrow is missing."""
    data, dtype = config.data, dtype_of(config)
    own: dict[str, Any] = {"seed": config.trainer.seed, "dtype": dtype, "paths": data.path or ""}
    own["held_out"] = 1 / 7 if data.held_out is None else data.held_out
    if data.name == "synthetic":
        return SyntheticSource(_settings(SyntheticSpec, data, own))
    if data.name == "parquet":
        try:
            from distcache.data.parquet import ParquetSource, ParquetSpec
        except ImportError as error:
            raise ConfigError(
                f"data=parquet needs pyarrow ({error}): pip install pyarrow"
            ) from error
        own["weight_columns"], own["held_out_paths"] = data.weight_columns or {}, data.held_out_path
        own["shuffle_rows"] = data.shuffle_rows if data.shuffle else 0
        return ParquetSource(_settings(ParquetSpec, data, own))
    if data.name == "interactions":
        from distcache.data.interactions import InteractionsSource, InteractionsSpec

        own["sampling"] = data.negative_sampling
        return InteractionsSource(_settings(InteractionsSpec, data, own))
    folder = Path(data.path or "").is_dir()
    own["table_rows"] = data.table_rows or (() if folder else KAGGLE_ROWS)
    spec = _settings(CriteoSpec, data, own)
    return CriteoArrays(spec) if folder else CriteoSource(spec)


DATA_FILES = "data_files.json"
"""In a run folder: bytes and digest of each file of the data, by its absolute path."""


def verify_files(
    files: Sequence[InputFile], world: World, folder: Path, earlier: Path | None = None
) -> None:
    """Compare the content of `files` with what `DATA_FILES` of `folder`, or of the run folder in
    which the checkpoint `earlier` lies, says of them, and write that of `folder`. Called by all
    ranks: those of a node share its files. Raises DataError for a file that is not as it was, or
    differs between nodes."""

    def read() -> dict[int, str]:
        found = dict[int, str]()
        for at in range(world.local_rank, len(files), world.local_size):
            with files[at].open() as stream:
                found[at] = hashlib.file_digest(stream, "blake2b").hexdigest()
                files[at].check_unchanged(stream)
        return found

    require_equal(world, {f"bytes of {file.path}": file.bytes for file in files})
    with file_world(world, sum(file.bytes for file in files)) as patient:
        found = run_on_all_ranks(patient, read)
    seen = [{part[at] for part in found if at in part} for at in range(len(files))]
    if differ := [file.path for file, own in zip(files, seen, strict=True) if len(own) > 1]:
        raise DataError(f"{differ[0]} is not the same file on all nodes")

    def compare() -> None:
        pairs = zip(files, seen, strict=True)
        now = {str(file.path.absolute()): [file.bytes, *own] for file, own in pairs}
        known: dict[str, list] = {}
        for place in (folder, *([] if earlier is None else [earlier, *earlier.parents[:2]])):
            was = read_json(place / DATA_FILES) or {}
            if changed := [path for path in now if was.get(path, now[path]) != now[path]]:
                more = f" (and {len(changed) - 1} more files)" if len(changed) > 1 else ""
                raise DataError(
                    f"{changed[0]}{more} is not what it was when {place / DATA_FILES} was written: "
                    "bring the old file back or, where the change is meant, remove that one"
                )
            known |= was
        log.info("data.verify: %d files read, %d as before", len(now), len(known.keys() & now))
        if now.keys() - (read_json(folder / DATA_FILES) or {}).keys():
            write_json(folder / DATA_FILES, known | now)

    run_on_rank0(world, compare)


def _settings(kind: type, group: Any, own: Mapping[str, Any]) -> Any:
    """Settings of a part: the fields that it has of `own` and of a group of the config tree."""
    known = vars(group) | dict(own)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: known[name] for name in names if name in known})


def build_tables(config: Config, source: BatchSource) -> list[TableSpec]:
    """One table for each categorical feature: `t_<feature>`, in feature order."""
    model, rows = config.model, source.table_rows
    dims = model.table_dims or [model.embedding_dim] * len(rows)
    if len(dims) != len(rows):
        wrong = f"model.table_dims has {len(dims)} widths for {len(rows)} tables"
        raise ConfigError(f"{wrong} (data.table_rows)")
    return [
        TableSpec(f"t_{feature}", count, dim, (feature,), model.pooling)
        for feature, count, dim in zip(source.features, rows, dims, strict=True)
    ]


def build_dense(config: Config, tables: Sequence[TableSpec], dense_features: int) -> nn.Module:
    """The dense model of group `model` with its initial weights, on the CPU.

    `model(dense [b, dense_features], pooled [b, sum of widths]) -> logits [b]`.
    """
    want, widths = config.model, [table.dim for table in tables for _ in table.features]
    layers = want.dense_arch, want.over_arch, want.cross_layers, want.cross_rank
    model = build_model(want.name, dense_features, widths, *layers)
    return initialise(model, config.trainer.seed, dtype_of(config))


def optimizer_spec(config: Config) -> RowUpdate:
    """The optimizer of group `optim`, the same in every mode; its rates are set per step."""
    given = {key: value for key, value in vars(config.optim).items() if value is not None}
    return row_update(**given | {"betas": tuple(config.optim.betas)})


def build_rates(config: Config) -> Callable[[int], tuple[float, float]]:
    """The dense and the embedding learning rate as a function of the training step."""
    optim = config.optim
    dense, embedding = (
        LearningRate(base, optim.warmup_steps, optim.decay_start, optim.decay_steps)
        for base in (optim.dense_lr, optim.embedding_lr)
    )
    return lambda step: (dense(step), embedding(step))


def build_parallel(
    config: Config, world: World, tables: Sequence[TableSpec], model: nn.Module, source: BatchSource
) -> Parallel:
    """The model and its tables in `parallel.mode`; called by all ranks.

    Raises ConfigError, also where the ranks' data differ, or MemoryTooSmallError before anything is
    allocated.
    """
    # Ranks that read other files would train on a mixture of both, and agree on every step.
    require_equal(world, dict(source.identity))
    if config.parallel.mode == "hybrid":
        from distcache.parallel.hybrid import HybridParallel  # loads TorchRec and FBGEMM

        return HybridParallel(world, hybrid_spec(config, world, tables, source), model)
    config = resolve_ahead(config, world, source, tables)
    cache, trainer, popularity, slots = config.cache, config.trainer, None, ()
    if config.parallel.mode == "data":
        slots, popularity = resolve_slots(config, world, tables, source)
    counted = None if popularity is None else popularity.statistics
    placement = resolve_placement(config, world, (tables, slots, counted), source, model)
    homes = 1
    if placement.kind == SHARDED:
        homes = world.size
        if getattr(source, "hot", None) is None:  # the rows of hot batches stay as they are
            popularity = request_of(config, tables).of_all_homes(world, slots, popularity)
    held = [count * homes for count in slots]  # rows that the devices hold together
    settings = CachedSettings(
        mode=config.parallel.mode,
        slots=tuple(slots),
        lookahead=cache.lookahead,
        prefetch=resolve_prefetch(config, source, tables, held),
        policy=Policy.of(cache),
        reduction=cache.reduction,
        seed=trainer.seed,
        dtype=dtype_of(config),
        on_bad_id=config.data.on_bad_id,
        validate=trainer.validate_plans,
        fingerprint=zlib.crc32(repr(sorted(source.identity.items())).encode()),
        schedule=trainer.schedule,
        amp=trainer.amp,
        cuda_graph=replays(config),
        placement=placement,
        access=config.store.access,
        planner_threads=planner_threads(trainer.planner_threads, world),
    )
    features, spec = tuple(source.features), optimizer_spec(config)
    mode = CachedParallel(world, tables, features, model, spec, settings, popularity)
    if config.parallel.mode == "data" and world.is_first:
        named, batch = expected_rows(config, source, tables, 1), config.data.global_batch_size
        warn_if_too_small(named, mode.groups, settings.slots, batch)
    return mode


def hybrid_spec(
    config: Config, world: World, tables: Sequence[TableSpec], source: BatchSource
) -> HybridSpec:
    """The settings of mode `hybrid`."""
    from distcache.parallel.hybrid import HybridSpec

    return HybridSpec(
        tables=tuple(tables),
        features=tuple(source.features),
        optimizer=optimizer_spec(config),
        seed=config.trainer.seed,
        sharding=config.parallel.sharding,
        weighted=config.data.weighted or bool(config.data.weight_columns),
        local_batch_size=-(-config.data.global_batch_size // world.size),
        on_bad_id=config.data.on_bad_id,
        agree_on_sizes=config.data.name == "own",
        amp=config.trainer.amp,
    )
