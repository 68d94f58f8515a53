"""`distcache.save` and `distcache.load`: a loop of one's own that stops after any step and goes on
as if it had not.

A checkpoint has the format of a run's. Tables and their optimizer state lie in it once, in
original ids, whatever the ranks. Of all else each rank has its own, and what is the same on all of
them is written once.
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
    fill,
    finished,
    make_room,
    naming_intact,
    remove,
    write_checkpoint,
)
from distcache.checkpoint.manifest import MANIFEST, Manifest
from distcache.checkpoint.reader import BlockReader
from distcache.checkpoint.writer import TABLES, as_bytes, in_memory
from distcache.comm.link import agree_on, on_first, together
from distcache.comm.world import World
from distcache.data.own import load_plain
from distcache.embedding import step as embedding_step
from distcache.embedding.collection import CachedCollection
from distcache.embedding.optimizer import RowOptimizer, RowsAndDense
from distcache.embedding.settings import library_words
from distcache.errors import ConfigError

logger = logging.getLogger(__name__)

_LEFT = re.compile(r"__\d+_0\.distcp|\.shared-\w+|\.manifest")
"""Files of a save that did not end; with `.metadata` they may be torch's own checkpoint."""

_ON_ALL = "all ranks write and read a checkpoint, so call it on all, outside `if rank == 0:`"


def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of a training loop between two steps; called by all ranks.

    `path`: a folder of its own for each checkpoint, such as `checkpoints/step_00001000`; `model`:
    with its cached collections, whose tables and optimizers are saved along, DDP around it or not;
    `optimizers`: of the dense part; `step`: how many are done; `extra`: whatever else the
    loop goes on from, each rank's own (states of schedulers, scalers, generators, the position of
    a loader): numbers, texts, tensors, and lists and dictionaries of these; arrays come back as
    tensors. Random states of torch, Python and NumPy are saved too. A look-ahead may be open: then
    a loader stands as many batches ahead of the loop, so keep its state beside each batch.

    Raises ConfigError, before anything is written, for a path that is taken and for values that
    could not be read without running code, PeerError on rank 0 where it is alone, and
    DistcacheError where it cannot be written: then nothing is left of it.
    """
    folder, loop = Path(path), _Loop(model, optimizers)
    with loop.joined("distcache.save") as world:
        own = dict[str, Tensor]()
        together(world, lambda: own.update(loop.own_values(extra or {})))
        like = loop.described()
        agree_on(world, {"path": str(folder), "step": step} | like)
        on_first(world, lambda: _require_free(folder))
        make_room(world, folder)
        try:
            values = loop.tables(lambda tables: tables.saved(folder.parent))  # after a flush
        except BaseException:
            if world.is_first:
                remove(folder)
            raise
        sums = {name: hashlib.sha256(value.numpy()).digest() for name, value in own.items()}
        by_rank = together(world, lambda: sums)
        for name, value in own.items():
            alike = all(found.get(name) == sums[name] for found in by_rank)
            values[name if alike else f"own.{world.rank}.{name}"] = value
        told = {"like": like, "ranks": world.size}
        write_checkpoint(folder, values, {"step": int(step), "loop": told}, world)


def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    missing_ok: bool = False,
) -> tuple[int, dict[str, Any]]:
    """Take back what `save` wrote to `path`, or the newest of `path/step_*`; (step, extra).

    Called by all ranks, with a model and optimizers as they were saved, before the loop. Tensors
    in `extra` come back on the CPU. At another number of ranks tables, dense part and optimizers
    are loaded; random states stay as they are, and of `extra` comes what was the same on all ranks:
    a warning says so. `missing_ok`: without a checkpoint there, of any name, (0, {}).

    Raises ConfigError where there is none or it is one of something else, naming both, and
    DataError where it is damaged as far as its lists tell, before anything has changed; DataError
    for a damaged block of a table, after which the tables are nobody's until another load.
    """
    loop = _Loop(model, optimizers)
    with loop.joined("distcache.load", math.inf) as world:
        agree_on(world, {"path": str(path)} | loop.described())
        folder = on_first(world, lambda: _find(Path(path), missing_ok))
        if folder is None:
            return 0, {}
        with naming_intact(folder, world):
            return _load_from(folder, loop, world)


def _load_from(folder: Path, loop: _Loop, world: World) -> tuple[int, dict[str, Any]]:
    """Do what `load` does with the checkpoint in `folder`."""
    manifest: Manifest = on_first(world, lambda: Manifest.read(folder))
    told = _compare(folder, manifest, loop.described())
    readers, own = list[BlockReader](), dict[str, Any]()

    def read() -> None:
        readers.append(BlockReader(folder, manifest))
        own.update(_read_own(readers[0], world, told["ranks"]))

    together(world, read)
    others = [n for n in readers[0].values.state_dict_metadata if not n.startswith(TABLES)]
    with ExitStack() as stack:
        of = loop.tables(lambda own: stack.enter_context(own.loading(folder.parent)))
        fill(readers[0], of, others, world)
    loop.take(own)
    if world.is_first:
        logger.info("going on at step %s from %s", f"{manifest.header['step']:,}", folder)
    extra = {k.removeprefix("extra."): v for k, v in own.items() if k.startswith("extra.")}
    return manifest.header["step"], extra


# -----------------------------------------------------------------------------
# The parts of a loop, and their names: `tables.<collection>.<table>.<value>`, `rows.<collection>`,
# `dense`, `optimizer.<number>`, `extra.<key>`, `random`; of one rank `own.<rank>.<name>`.


class _Loop:
    """What of a loop a checkpoint has. Raises ConfigError for what it cannot have."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
            inner = getattr(model, "_orig_mod", None)  # of torch.compile
            model = model.module if inner is None else inner
        self._model = model
        named = model.named_modules()
        self._found = {
            name: m
            for name, m in named
            if isinstance(m, CachedCollection) and m.reader.lookups.specs  # and not tables=[]
        }
        first = {m._member: name for name, m in reversed(self._found.items())}
        self._collections = {  # their tables once, without those that copies read
            name: m for name, m in self._found.items() if first[m._member] == name
        }
        if not self._collections:
            raise ConfigError("the model has no cached tables: torch.save is enough for it")
        optimizers = [own.dense if isinstance(own, RowsAndDense) else own for own in optimizers]
        for at, optimizer in enumerate(optimizers):
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"optimizers[{at}] is a {type(optimizer).__name__}, no torch.optim.Optimizer: "
                    "give its state_dict() in extra"
                )
        own = [collection.optimizer for collection in self._collections.values()]
        self._optimizers = [one for one in optimizers if not any(one is of for of in own)]
        if any(isinstance(one, RowOptimizer) for one in self._optimizers):
            raise ConfigError("optimizers has that of a collection which is not in the model")

    @contextmanager
    def joined(self, asked: str, limit_s: float | None = None) -> Iterator[World]:
        """The ranks, whose main threads meet; PeerError on rank 0 where it is alone for `limit_s`
        seconds, a collection's `timeout_s` at most."""
        collections = list(self._collections.values())
        collections[0]._member.meet(asked, _ON_ALL, limit_s)
        tables = [table for one in collections for table in one.tables.tables]
        nbytes = sum(24 * table.rows * table.dim for table in tables)
        with library_words(), file_world(collections[0].tables.world, nbytes) as files:
            yield files

    def _dense(self, taken: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`state_dict` of the model's dense part, which takes those values first."""
        for collection in self._found.values():
            collection.is_aside = True
        try:
            if taken is not None:
                self._model.load_state_dict(taken)
            return self._model.state_dict()
        finally:
            for collection in self._found.values():
                collection.is_aside = False

    def described(self) -> dict[str, str]:
        """What a checkpoint and a loop have in common, in words."""
        found: dict[str, str] = {}
        for path, collection in self._collections.items():
            own = collection.tables
            how = replace(own.engine.update, lr=0.0)
            for table in own.tables:
                name, dtype = ".".join(filter(None, (path, table.name))), own.settings.dtype
                dtype = dtype if table.dtype is None else f"{table.dtype} updated in {dtype}"
                found[f"table {name}"] = f"{table.rows} x {table.dim}, {dtype}, {how}"
            if len(collection.optimizer.param_groups) > 1:
                found[".".join(filter(None, (path, "optimizer")))] = "rates by table"
        for name, value in self._dense().items():
            plain = isinstance(value, Tensor)
            found[name] = f"{list(value.shape)}, {value.dtype}" if plain else "no tensor"
        for at, optimizer in enumerate(self._optimizers):
            groups = [group["params"] for group in optimizer.param_groups]
            parts = [f"{len(own)} ({sum(p.numel() for p in own):,} values)" for own in groups]
            kind = type(optimizer).__name__
            found[f"optimizers[{at}]"] = f"{kind}, parameters: {' + '.join(parts)}"
        return found

    def own_values(self, extra: Mapping[str, Any]) -> dict[str, Tensor]:
        """All but the tables, as this rank has it. Raises ConfigError for what could not be read
        again."""
        found = {"random": _packed("the random state", _random_state())}
        found["dense"] = _packed("model.state_dict()", dict(self._dense()))
        for path, collection in self._collections.items():
            collection.tables.require_between_steps("saving")
            collection.tables.settle_steps()
            own, groups = collection.tables, collection.optimizer.settings()
            steps = {table.name: n for table, n in zip(own.tables, own.counts, strict=True)}
            of_rows = {"steps": steps, "groups": groups}
            found[f"rows.{path}"] = _packed("the groups of a collection's optimizer", of_rows)
        for at, optimizer in enumerate(self._optimizers):
            found[f"optimizer.{at}"] = _packed(f"optimizers[{at}]", optimizer.state_dict())
        for key, value in extra.items():
            found[f"extra.{key}"] = _packed(f"extra[{key!r}]", value)
        return found

    def tables(
        self, of: Callable[[embedding_step.CollectionTables], Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The values that `of` gives of each collection's tables, by their names in the model."""
        found: dict[str, Tensor] = {}
        for path, collection in self._collections.items():
            under = f"{TABLES}{path}." if path else TABLES
            values = of(collection.tables)
            found |= {under + name.removeprefix(TABLES): own for name, own in values.items()}
        return found

    def take(self, own: Mapping[str, Any]) -> None:
        """Take what `own_values` gave, but `extra`."""
        self._dense(own["dense"])
        for path, collection in self._collections.items():
            found, tables = own[f"rows.{path}"], collection.tables
            tables.counts = [found["steps"][table.name] for table in tables.tables]
            collection.optimizer.load_settings(found["groups"])
        for at, optimizer in enumerate(self._optimizers):
            optimizer.load_state_dict(own[f"optimizer.{at}"])
        if "random" in own:
            _set_random_state(own["random"])


def _packed(what: str, value: Any) -> Tensor:
    """A value as bytes that are read without running code, its tensors on the CPU."""
    file = io.BytesIO()
    try:
        arrays = tree_map_only(np.ndarray, torch.from_numpy, value)
        torch.save(tree_map_only(Tensor, in_memory, arrays), file)
        load_plain(file.getvalue())
    except Exception as error:  # whatever pickling makes of what users give
        raise ConfigError(
            f"{what} is nothing that a checkpoint can have, which holds numbers, texts, tensors, "
            f"and lists and dictionaries of these alone: {error}"
        ) from error
    return as_bytes(file.getvalue())


def _random_state() -> dict[str, Any]:
    """Of this rank's generators; the CUDA one's where this process uses CUDA."""
    found = np.random.get_state(legacy=False)["bit_generator"]
    if found != "MT19937":
        raise ConfigError(
            f"np.random's bit generator is {found}, and a checkpoint has the state of MT19937 "
            "alone: call np.random.set_bit_generator(np.random.MT19937(seed))"
        )
    kind, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    numpy, own = [kind, np.asarray(keys).tolist(), *rest], random.getstate()
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": own, "numpy": numpy}


def _set_random_state(found: Mapping[str, Any]) -> None:
    torch.set_rng_state(found["torch"])
    if found["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
    random.setstate(found["python"])
    np.random.set_state(tuple(found["numpy"]))


# -----------------------------------------------------------------------------
# Where a checkpoint may be made, and whether one is of this loop.


def _require_free(folder: Path) -> None:
    """Raise ConfigError unless nothing is there but what a save left that did not end."""
    names = [own.name for own in folder.iterdir()] if folder.is_dir() else []
    if not folder.exists() or (folder.is_dir() and all(map(_LEFT.fullmatch, names))):
        return
    what = "a checkpoint already" if MANIFEST in names else "no empty folder"
    raise ConfigError(
        f"{folder} is {what}, and nothing is overwritten: give each checkpoint a folder of its "
        "own, such as f'checkpoints/step_{step:08d}', and remove those that you do not need"
    )


def _find(path: Path, missing_ok: bool) -> Path | None:
    if folders := finished(path):
        return folders[0]
    others = sorted(own.parent.name for own in path.glob(f"*/{MANIFEST}"))
    if missing_ok and not others:
        return None
    names = f" as step_<number>, but {', '.join(others[:8])}" if others else ""
    raise ConfigError(
        f"{path} holds no complete checkpoint{names}: give what distcache.save was given, or "
        "the folder that has it as step_<number>; missing_ok=True begins at step 0 without one"
    )


def _compare(folder: Path, manifest: Manifest, now: Mapping[str, str]) -> dict[str, Any]:
    """What the manifest tells of the loop. Raises ConfigError where it is not this one."""
    told = manifest.header.get("loop")
    if told is None:
        raise ConfigError(
            f"{folder} is a checkpoint of a run, not of distcache.save: resume it with "
            "trainer.resume"
        )
    if wrong := differences(told["like"], now, "not there"):
        raise ConfigError(
            f"{folder} is a checkpoint of another loop: {wrong}. Make the model and optimizers as "
            "they were"
        )
    return told


def _read_own(reader: BlockReader, world: World, ranks: int) -> dict[str, Any]:
    """All but the tables: what all ranks had alike, and what this rank had. At another number of
    ranks the first rank's, but no random state and of `extra` only what was alike."""
    names = [name for name in reader.values.state_dict_metadata if not name.startswith(TABLES)]
    found = {name: name for name in names if not name.startswith("own.")}
    same = ranks == world.size
    mine = f"own.{world.rank if same else 0}."
    own = {name.removeprefix(mine): name for name in names if name.startswith(mine)}
    if not same:
        left = [name.removeprefix("extra.") for name in own if name.startswith("extra.")]
        own = {name: at for name, at in own.items() if not name.startswith("extra.")}
        for values in (own, found):
            values.pop("random", None)
        if world.is_first:
            logger.warning(
                "saved on %d ranks, loaded on %d: random states stay as they are%s",
                ranks,
                world.size,
                f", and extra has no {', '.join(left)}, each rank's own" if left else "",
            )
    packed = {name: reader.whole(at) for name, at in (found | own).items()}
    return {name: load_plain(value.numpy().tobytes()) for name, value in packed.items()}
