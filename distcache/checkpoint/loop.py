"""`distcache.save` and `distcache.load`: checkpoints of a user's own training loop.

A loop that stops after any step continues as if it had not stopped. Tables and their optimizer
state are stored once, in original ids, for any number of ranks. All other values are each rank's
own; those that are equal on all ranks are stored once.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from distcache.checkpoint.files import (
    differences,
    file_world,
    find_checkpoints,
    local_result,
    make_checkpoint_folder,
    max_table_bytes,
    read_values,
    remove_checkpoint,
    suggest_intact,
    write_checkpoint,
)
from distcache.checkpoint.manifest import MANIFEST, Manifest
from distcache.checkpoint.reader import BlockReader
from distcache.checkpoint.writer import TABLES, as_bytes, compact_on_cpu
from distcache.comm.link import require_equal, run_on_all_ranks, run_on_rank0
from distcache.comm.world import World
from distcache.data.own import load_plain
from distcache.embedding import step as embedding_step
from distcache.embedding.collection import CachedCollection
from distcache.embedding.optimizer import RowOptimizer, RowsAndDense
from distcache.embedding.settings import library_words
from distcache.errors import ConfigError

logger = logging.getLogger(__name__)

_UNFINISHED = re.compile(r"__\d+_0\.distcp|\.shared-\w+|\.manifest")
"""Files of a save that did not end. A folder that also has `.metadata` may be DCP's own."""

_ALL_RANKS = "all ranks write and read a checkpoint, so call it on all, outside `if rank == 0:`"


def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of a training loop between two steps. All ranks call this.

    `path`: a folder of its own for each checkpoint, such as `checkpoints/step_00001000`; `model`:
    the model, in DDP or not, whose cached collections are saved with their tables and optimizers;
    `optimizers`: of the dense part; `step`: number of trained steps; `extra`: other values of this
    rank that the loop needs (states of schedulers, scalers, generators, the position of a loader):
    numbers, texts, tensors, and lists and dictionaries of these. Arrays are loaded as tensors.
    Random states of torch, Python and NumPy are saved too. A look-ahead may be open. The loader is
    then as many batches ahead of the loop, so keep its state beside each batch.

    Raises ConfigError, before anything is written, for a folder that is not empty and for values
    that could not be read without running code; PeerError on rank 0 if the other ranks do not call
    it; DistcacheError if the checkpoint cannot be written, after removing what was written.
    """
    folder = Path(path)
    loop = _Loop(model, optimizers)
    with loop.joined("distcache.save") as world:
        own_values = local_result(world, lambda: loop.own_values(extra or {}))
        description = loop.describe()
        require_equal(world, {"path": str(folder), "step": step} | description)
        run_on_rank0(world, lambda: _require_free(folder))
        make_checkpoint_folder(world, folder)
        try:
            values = loop.tables(lambda tables: tables.saved(folder.parent))
        except BaseException:
            if world.is_first:
                remove_checkpoint(folder)
            raise
        digests = {
            name: hashlib.sha256(value.numpy()).digest() for name, value in own_values.items()
        }
        by_rank = run_on_all_ranks(world, lambda: digests)
        for name, value in own_values.items():
            is_common = all(other.get(name) == digests[name] for other in by_rank)
            values[name if is_common else f"own.{world.rank}.{name}"] = value
        header = {"step": int(step), "loop": {"like": description, "ranks": world.size}}
        write_checkpoint(folder, values, header, world)


def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    missing_ok: bool = False,
) -> tuple[int, dict[str, Any]]:
    """Load what `save` wrote to `path`, or the newest of `path/step_*`, and return (step, extra).

    All ranks call this before the loop, with a model and optimizers as they were saved. Tensors in
    `extra` are on the CPU. On another number of ranks, tables, dense part and optimizers are
    loaded, random states stay as they are, and `extra` has the values that were equal on all ranks;
    a warning says so. `missing_ok`: return (0, {}) if there is no checkpoint of any name.

    Raises ConfigError if there is none, or it is one of another loop, with both values; DataError
    for damaged lists, before anything has changed, and for a damaged block of a table, after which
    the tables have no valid values until another load.
    """
    loop = _Loop(model, optimizers)
    with loop.joined("distcache.load", math.inf) as world:
        require_equal(world, {"path": str(path)} | loop.describe())
        folder = run_on_rank0(world, lambda: _find(Path(path), missing_ok))
        if folder is None:
            return 0, {}
        with suggest_intact(folder, world):
            return _load_from(folder, loop, world)


def _load_from(folder: Path, loop: _Loop, world: World) -> tuple[int, dict[str, Any]]:
    """Load the checkpoint in `folder`, see `load`."""
    manifest: Manifest = run_on_rank0(world, lambda: Manifest.read(folder))
    ranks = _require_same_loop(folder, manifest, loop.describe())

    def read() -> tuple[BlockReader, dict[str, Any]]:
        reader = BlockReader(folder, manifest)
        return reader, _read_own_values(reader, world, ranks)

    reader, own_values = local_result(world, read)
    others = [name for name in reader.values.state_dict_metadata if not name.startswith(TABLES)]
    with ExitStack() as stack:
        values = loop.tables(lambda tables: stack.enter_context(tables.loading(folder.parent)))
        read_values(reader, values, others, world)
    loop.load_own_values(own_values)
    step = manifest.header["step"]
    if world.is_first:
        logger.info("going on at step %s from %s", f"{step:,}", folder)
    prefix = "extra."
    extra = {
        name.removeprefix(prefix): value
        for name, value in own_values.items()
        if name.startswith(prefix)
    }
    return step, extra


# --------------------------------------------------------------------------------------------------
# Values of a loop, and their names: `tables.<collection>.<table>.<value>`, `rows.<collection>`,
# `dense`, `optimizer.<number>`, `extra.<key>`, `random`; of one rank `own.<rank>.<name>`.


class _Loop:
    """Model and optimizers of a loop. Raises ConfigError if they cannot be in a checkpoint."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = _unwrap(model)
        self._all_collections = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(module, CachedCollection) and module.reader.lookups.specs
        }
        # Copies read the tables of another collection. Tables are saved once, under the first name.
        first_names: dict[Any, str] = {}
        for name, collection in self._all_collections.items():
            first_names.setdefault(collection._lazy_tables, name)
        self._collections = {name: self._all_collections[name] for name in first_names.values()}
        if not self._collections:
            raise ConfigError("the model has no cached tables: torch.save is enough for it")
        optimizers = [
            optimizer.dense if isinstance(optimizer, RowsAndDense) else optimizer
            for optimizer in optimizers
        ]
        for number, optimizer in enumerate(optimizers):
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"optimizers[{number}] is a {type(optimizer).__name__}, no "
                    "torch.optim.Optimizer: give its state_dict() in extra"
                )
        row_optimizers = [module.optimizer for module in self._collections.values()]
        self._optimizers = [
            optimizer
            for optimizer in optimizers
            if not any(optimizer is rows for rows in row_optimizers)
        ]
        if any(isinstance(optimizer, RowOptimizer) for optimizer in self._optimizers):
            raise ConfigError("optimizers has that of a collection which is not in the model")

    @contextmanager
    def joined(self, caller: str, limit_s: float | None = None) -> Iterator[World]:
        """Wait for the main threads of all ranks, and yield their world, of `file_world`.

        `caller`: name of the public function. Raises PeerError on rank 0 if it is alone for
        `limit_s` seconds, at most a collection's `timeout_s`.
        """
        collections = list(self._collections.values())
        collections[0]._lazy_tables.barrier(caller, _ALL_RANKS, limit_s)
        tables = [table for collection in collections for table in collection.tables.tables]
        nbytes = max_table_bytes((table.rows, table.dim) for table in tables)
        with library_words(), file_world(collections[0].tables.world, nbytes) as files:
            yield files

    @contextmanager
    def _dense_part(self) -> Iterator[nn.Module]:
        """Yield the model; its `state_dict` has the dense part only inside."""
        for collection in self._all_collections.values():
            collection.is_aside = True
        try:
            yield self._model
        finally:
            for collection in self._all_collections.values():
                collection.is_aside = False

    def _dense_state(self) -> dict[str, Any]:
        with self._dense_part() as model:
            return dict(model.state_dict())

    def describe(self) -> dict[str, str]:
        """Return texts that a checkpoint and a loop have to share, by name."""
        texts: dict[str, str] = {}
        for path, collection in self._collections.items():
            tables = collection.tables
            update = replace(tables.engine.update, lr=0.0)  # the rate may change
            for table in tables.tables:
                dtype = str(tables.settings.dtype)
                if table.dtype is not None:
                    dtype = f"{table.dtype} updated in {dtype}"
                texts[f"table {_joined(path, table.name)}"] = (
                    f"{table.rows} x {table.dim}, {dtype}, {update}"
                )
            if len(collection.optimizer.param_groups) > 1:
                texts[_joined(path, "optimizer")] = "rates by table"
        for name, value in self._dense_state().items():
            is_tensor = isinstance(value, Tensor)
            texts[name] = f"{list(value.shape)}, {value.dtype}" if is_tensor else "no tensor"
        for number, optimizer in enumerate(self._optimizers):
            groups = [group["params"] for group in optimizer.param_groups]
            sizes = [f"{len(group)} ({sum(p.numel() for p in group):,} values)" for group in groups]
            kind = type(optimizer).__name__
            texts[f"optimizers[{number}]"] = f"{kind}, parameters: {' + '.join(sizes)}"
        return texts

    def own_values(self, extra: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return all values but the tables, as this rank has them, as bytes.

        Raises ConfigError for values that could not be read again.
        """
        values = {"random": _pack("the random state", _random_state())}
        values["dense"] = _pack("model.state_dict()", self._dense_state())
        for path, collection in self._collections.items():
            tables = collection.tables
            tables.require_between_steps("saving")
            tables.settle_steps()
            names = [table.name for table in tables.tables]
            rows: dict[str, Any] = {
                "steps": dict(zip(names, tables.counts, strict=True)),
                "groups": collection.optimizer.settings(),
            }
            values[f"rows.{path}"] = _pack("the groups of a collection's optimizer", rows)
        for number, optimizer in enumerate(self._optimizers):
            name = f"optimizers[{number}]"
            values[f"optimizer.{number}"] = _pack(name, optimizer.state_dict())
        for key, value in extra.items():
            values[f"extra.{key}"] = _pack(f"extra[{key!r}]", value)
        return values

    def load_own_values(self, values: Mapping[str, Any]) -> None:
        """Load the values of `own_values`, except for `extra`."""
        with self._dense_part() as model:
            model.load_state_dict(values["dense"])
        for path, collection in self._collections.items():
            rows = values[f"rows.{path}"]
            tables = collection.tables
            tables.counts = [rows["steps"][table.name] for table in tables.tables]
            collection.optimizer.load_settings(rows["groups"])
        for number, optimizer in enumerate(self._optimizers):
            optimizer.load_state_dict(values[f"optimizer.{number}"])
        if "random" in values:  # not on another number of ranks
            _set_random_state(values["random"])

    def tables(
        self, values_of: Callable[[embedding_step.CollectionTables], Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return the values that `values_of` returns for each collection's tables, by their names
        in the model."""
        values: dict[str, Tensor] = {}
        for path, collection in self._collections.items():
            prefix = f"{TABLES}{path}." if path else TABLES
            for name, value in values_of(collection.tables).items():
                values[prefix + name.removeprefix(TABLES)] = value
        return values


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and `torch.compile`."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inner = getattr(model, "_orig_mod", None)  # of torch.compile
        model = model.module if inner is None else inner
    return model


def _joined(path: str, name: str) -> str:
    """Return the name of a part of the module at `path`, which is empty for the model itself."""
    return f"{path}.{name}" if path else name


def _pack(name: str, value: Any) -> Tensor:
    """Return a value as bytes that are read without running code, its tensors on the CPU.

    `name`: for errors. Raises ConfigError.
    """
    file = io.BytesIO()
    try:
        tensors = tree_map_only(np.ndarray, torch.from_numpy, value)
        torch.save(tree_map_only(Tensor, compact_on_cpu, tensors), file)
        load_plain(file.getvalue())
    except Exception as error:  # pickling of users' values raises anything
        raise ConfigError(
            f"{name} is nothing that a checkpoint can have, which holds numbers, texts, tensors, "
            f"and lists and dictionaries of these alone: {error}"
        ) from error
    return as_bytes(file.getvalue())


def _random_state() -> dict[str, Any]:
    """Return the states of this rank's generators; of CUDA's if this process uses CUDA."""
    generator = np.random.get_state(legacy=False)["bit_generator"]
    if generator != "MT19937":
        raise ConfigError(
            f"np.random's bit generator is {generator}, and a checkpoint has the state of MT19937 "
            "alone: call np.random.set_bit_generator(np.random.MT19937(seed))"
        )
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }


def _set_random_state(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    random.setstate(states["python"])
    np.random.set_state(tuple(states["numpy"]))


# --------------------------------------------------------------------------------------------------
# Checks of a folder.


def _require_free(folder: Path) -> None:
    """Raise ConfigError unless `folder` is missing, empty, or has only an unfinished save."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    if not folder.exists() or (folder.is_dir() and all(map(_UNFINISHED.fullmatch, names))):
        return
    problem = "a checkpoint already" if MANIFEST in names else "no empty folder"
    raise ConfigError(
        f"{folder} is {problem}, and nothing is overwritten: give each checkpoint a folder of its "
        "own, such as f'checkpoints/step_{step:08d}', and remove those that you do not need"
    )


def _find(path: Path, missing_ok: bool) -> Path | None:
    """Return the newest checkpoint in `path`; None if there is none and that is `missing_ok`."""
    if folders := find_checkpoints(path):
        return folders[0]
    others = sorted(manifest.parent.name for manifest in path.glob(f"*/{MANIFEST}"))
    if missing_ok and not others:
        return None
    names = f" as step_<number>, but {', '.join(others[:8])}" if others else ""
    raise ConfigError(
        f"{path} holds no complete checkpoint{names}: give what distcache.save was given, or "
        "the folder that has it as step_<number>; missing_ok=True begins at step 0 without one"
    )


def _require_same_loop(folder: Path, manifest: Manifest, description: Mapping[str, str]) -> int:
    """Return the number of ranks that wrote a checkpoint.

    Raises ConfigError if it is one of a run, or of a loop with another description.
    """
    saved = manifest.header.get("loop")
    if saved is None:
        raise ConfigError(
            f"{folder} is a checkpoint of a run, not of distcache.save: resume it with "
            "trainer.resume"
        )
    if changes := differences(saved["like"], description, "not there"):
        raise ConfigError(
            f"{folder} is a checkpoint of another loop: {changes}. Make the model and optimizers "
            "as they were"
        )
    return saved["ranks"]


def _read_own_values(reader: BlockReader, world: World, ranks: int) -> dict[str, Any]:
    """Return all values but the tables: those equal on all ranks, and those of this rank.

    `ranks`: number of ranks that saved them. On another number of ranks the values of the first
    one are returned, without random states, and of `extra` only those equal on all ranks.
    """
    names = [name for name in reader.values.state_dict_metadata if not name.startswith(TABLES)]
    same_ranks = ranks == world.size
    prefix = f"own.{world.rank if same_ranks else 0}."
    stored_names = {name: name for name in names if not name.startswith("own.")}
    own_names = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    if not same_ranks:
        dropped = [name for name in own_names if name.startswith("extra.")]
        for name in dropped:
            del own_names[name]
        if world.is_first:
            keys = ", ".join(name.removeprefix("extra.") for name in dropped)
            logger.warning(
                "saved on %d ranks, loaded on %d: random states stay as they are%s",
                ranks,
                world.size,
                f", and extra has no {keys}, each rank's own" if keys else "",
            )
    stored_names |= own_names
    if not same_ranks:
        stored_names.pop("random", None)
    return {
        name: load_plain(reader.read_value(stored).numpy().tobytes())
        for name, stored in stored_names.items()
    }
