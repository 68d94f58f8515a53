"""State of a training run in a checkpoint: identity, position, digests, and its values.

A run resumes from a checkpoint if both have the same identity.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcache.checkpoint.files import differences, fill
from distcache.checkpoint.manifest import Manifest
from distcache.checkpoint.reader import BlockReader
from distcache.checkpoint.writer import BLOCK_BYTES, TABLES, as_bytes
from distcache.comm.link import on_first, together
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.engine.whole import CHANGED, ChangedRows
from distcache.errors import ConfigError, DistcacheError
from distcache.layout import TableSpec
from distcache.parallel.base import Parallel
from distcache.popularity.hot_cold import Phase

logger = logging.getLogger(__name__)

AUTO_BYTES = 4 << 30
"""`run.digest=auto` hashes the state when all tables together have at most this many bytes."""


def chain_loss(previous: bytes, loss: float) -> bytes:
    """d(t) = SHA-256(d(t-1), bits of the loss as little-endian float64); d before step 0 is empty.

    Chained, so that one digest speaks for every loss up to its step.
    """
    return hashlib.sha256(previous + struct.pack("<d", loss)).digest()


_PENDING = 256
"""Losses that a chain leaves for later at most."""


class LossChain:
    """`chain_loss` over all losses so far; hashes many at once, not one between two steps."""

    def __init__(self, digest: bytes = b"") -> None:
        self._digest, self._pending = digest, list[float]()

    def add(self, loss: float) -> None:
        """Go on with the loss of one more step."""
        self._pending.append(loss)
        if len(self._pending) == _PENDING:
            self.digest()

    def digest(self) -> bytes:
        """That of all losses so far."""
        for loss in self._pending:
            self._digest = chain_loss(self._digest, loss)
        self._pending.clear()
        return self._digest


def state_digest(
    choice: str, mode: Parallel, tables: Sequence[TableSpec], dtype: torch.dtype, world: World
) -> str | None:
    """SHA-256 over every table's weights in original id order, then the dense parameters in order;
    None where `choice`, `run.digest` (`true`, `false` or `auto`), does not ask for it.

    Hashed are the values' bytes in `dtype`, row after row; nothing else. Call after `flush`, on
    all ranks; every rank gets the hexadecimal digest. `world`: of `file_world`.
    """
    whole = sum(table.rows * table.dim for table in tables) * dtype.itemsize
    if choice == "false" or (choice == "auto" and whole > AUTO_BYTES):
        return None
    sha = hashlib.sha256()

    def update(values: Tensor) -> None:
        sha.update(values.detach().to("cpu", dtype).reshape(-1).contiguous().numpy().data)

    for index, table in enumerate(tables):
        rows = max(1, BLOCK_BYTES // (table.dim * dtype.itemsize))
        for start in range(0, table.rows, rows):
            block = mode.table_block(index, start, min(start + rows, table.rows))
            if world.is_first:
                if block is None:
                    raise DistcacheError(f"rank 0 got no rows of table {table.name!r} to hash")
                update(block)
    for parameter in mode.dense_state().values():
        if world.is_first:
            update(parameter)
    return on_first(world, sha.hexdigest)


ONE_FORMAT = frozenset({"data", "resident", "host"})
"""Modes that write the same values and so read one another's checkpoints."""

HYBRID_HAS = frozenset({"sgd", "adagrad", "rowwise_adagrad"})
"""Optimizers whose rows have the same state in `hybrid` as in the modes of `ONE_FORMAT`."""


Identity = Mapping[str, Any]
"""What a checkpoint and the run that resumes it have in common: what `KEYS` has, and

`tables`: (name, rows, dim) of each, and the dtype of weights that have one of their own;
`steps_per_epoch`: training steps of an epoch, or None;
`data`: the pairs of the source's `identity`, sorted.
"""

KEYS = {
    "mode": "parallel.mode",
    "world_size": "torchrun --nproc-per-node",
    "dtype": "trainer.dtype",
    "optimizer": "optim",
    "seed": "trainer.seed",
    "global_batch_size": "data.global_batch_size",
}
"""Where a user sets each of these."""


def most_bytes(identity: Identity) -> int:
    """Of all tables and their state, at most: Adam's in float64."""
    return sum(3 * 8 * rows * dim for _, rows, dim, *_ in identity["tables"])


@dataclass(frozen=True)
class TrainerState:
    """Where training stands: `step` steps are done; `loss_digest` chains their losses; `phase`:
    among hot and cold batches, where these come apart; `batch`: this rank's slice of the last of
    these steps, where this process ran it."""

    step: int = 0
    loss_digest: bytes = b""
    phase: Phase | None = None
    batch: Batch | None = field(default=None, compare=False)

    def header(self) -> dict[str, Any]:
        """The state as JSON values, for a manifest."""
        phase = self.phase and vars(self.phase)
        return {"step": self.step, "loss_digest": self.loss_digest.hex(), "phase": phase}


@dataclass(frozen=True)
class Start:
    """Where a run begins: at `state`, which the checkpoint in `folder` has; at the beginning where
    there is none."""

    state: TrainerState = TrainerState()
    folder: Path | None = None
    manifest: Manifest | None = None


def capture(
    mode: Parallel, extra: Mapping[str, bytes], beside: bool, since: int | None = None
) -> dict[str, Any]:
    """What a checkpoint has of `mode`, after a flush, as tensors, and the `extra` values of this
    rank; by all ranks. `beside`: as of now, however it changes, but for the tables; `since`: of
    these the rows alone, where that is less, that changed since this mark."""
    found: dict[str, Any] = {}
    for name, value in (mode.state_dict(since) | dict(extra)).items():
        if not isinstance(value, Tensor | ChangedRows):
            value = as_bytes(value)
        elif beside and not name.startswith((TABLES, CHANGED)):
            value = value.detach().cpu().clone()
        found[name] = value
    return found


def compare(folder: Path, identity: Identity, world: World, same_data: bool = True) -> Start:
    """The checkpoint in `folder`, its run compared with `identity`; all ranks call this, before
    they make tables. `world`: of `file_world`.

    `same_data`: whether the data must be those of the checkpoint; where they need not be, a warning
    says what differs. Raises ConfigError where it is one of another run, naming both values, and
    DataError where it is damaged as far as its list of files tells; what these hold is compared
    with their checksums when it is loaded.
    """
    manifest: Manifest = on_first(world, lambda: Manifest.read(folder))
    saved = manifest.header
    require_same_run(folder, saved, identity)
    epoch = "steps of an epoch (data.samples, data.path)"
    was = dict(map(tuple, saved["run"]["data"])) | {epoch: saved["run"]["steps_per_epoch"]}
    now = dict(identity["data"]) | {epoch: identity["steps_per_epoch"]}
    other = differences(was, now, "not set")
    if other and same_data:
        raise ConfigError(
            f"{folder} is a checkpoint of training on other data: {other}. Give the data it was "
            "made with; if other data are meant, set trainer.resume_data=any, which goes on at the "
            "same step of these"
        )
    if other and world.is_first:
        logger.warning("resuming on other data than those of %s: %s", folder, other)
    phase = None if other else saved["phase"]  # other data have other phases
    digest = bytes.fromhex(saved["loss_digest"])
    state = TrainerState(saved["step"], digest, Phase(**phase) if phase else None)
    return Start(state, folder, manifest)


def load_checkpoint(
    start: Start, mode: Parallel, world: World, extra: dict[str, bytes] | None = None
) -> None:
    """Put the checkpoint of `start`, of `compare`, into `mode`; all ranks call this, with a world
    of `file_world`.

    `extra`: names of values of this rank alone, which are put there. Raises ConfigError for values
    that one of checkpoint and run does not have, before anything is changed, and DataError where a
    block is not as it was written: then the mode is nobody's, until another load.
    """
    folder, manifest, readers = start.folder, start.manifest, list[BlockReader]()
    if folder is None or manifest is None:
        return
    together(world, lambda: readers.append(BlockReader(folder, manifest)))
    (reader,), values = readers, mode.blank_state() | (extra or {})
    given = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    tensors = {name: value for name, value in values.items() if name not in given}
    fill(reader, tensors, given, world)

    def read() -> None:
        for name, blank in given.items():
            data = reader.whole(name).numpy().tobytes()
            given[name] = data if isinstance(blank, bytes) else json.loads(data)

    together(world, read)
    if extra is not None:
        extra.update({name: given.pop(name) for name in extra})
    mode.load_state_dict(tensors | given)
    if world.is_first:
        logger.info("read step %s from %s", f"{start.state.step:,}", folder)


def require_same_run(folder: Path, header: Mapping[str, Any], identity: Identity) -> None:
    """Raise ConfigError where a checkpoint, by its header, does not belong to this run."""
    if "run" not in header:
        raise ConfigError(f"{folder} is a checkpoint of a loop: it is read by distcache.load")
    saved, optimizer = header["run"], identity["optimizer"]
    modes = {saved["mode"], identity["mode"]}
    alike = modes <= ONE_FORMAT or optimizer in HYBRID_HAS
    free = ("mode", "world_size") if alike else ()
    found = [
        {key: run[name] for name, key in KEYS.items() if name not in free}
        | {f"model.{key}": value for key, value in run["model"].items()}
        | {"the number of tables": len(run["tables"])}
        | {
            f"table {number}": " ".join(["{} with {} rows x {}".format(*own), *own[3:]])
            for number, own in enumerate(run["tables"])
        }
        for run in (saved, identity)
    ]
    wrong = [differences(*found, "not there")]
    moved = len(modes) > 1 or saved["world_size"] != identity["world_size"]
    if "hybrid" in modes and not alike and moved:
        wrong.append(
            f"optim={optimizer} has another state of rows in hybrid than elsewhere, and "
            f"only {', '.join(sorted(HYBRID_HAS))} go on in another mode or number of ranks"
        )
    if any(wrong):
        raise ConfigError(
            f"{folder} is a checkpoint of another run: {'; '.join(filter(None, wrong))}. Set what "
            "it was made with, or begin anew by trainer.resume=never with another run.dir (from "
            "its weights by trainer.init_from)"
        )
