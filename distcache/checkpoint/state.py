"""State of a training run in a checkpoint: identity, position, digests, and values of its mode.

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

from distcache.checkpoint.files import differences, local_result, max_table_bytes, read_values
from distcache.checkpoint.manifest import Manifest
from distcache.checkpoint.reader import BlockReader
from distcache.checkpoint.writer import BLOCK_BYTES, TABLES, as_bytes
from distcache.comm.link import run_on_all_ranks, run_on_rank0
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.engine.full_tables import CHANGED, ChangedRows
from distcache.errors import ConfigError, DistcacheError
from distcache.layout import TableSpec
from distcache.parallel.base import Parallel
from distcache.popularity.hot_cold import Phase

logger = logging.getLogger(__name__)

# --------------------------------------------------------------------------------------------------
# Digests, by which the bits of two runs are compared.

AUTO_BYTES = 4 << 30
"""With `run.digest=auto` the state is hashed if all tables together have at most so many bytes."""

_MAX_PENDING = 256
"""Losses that a chain hashes at once at most."""


def chain_loss(previous: bytes, loss: float) -> bytes:
    """Return d(t) = SHA-256(d(t-1), bits of the loss as little-endian float64).

    `previous`: d(t-1), empty before step 0. One digest covers all losses up to its step.
    """
    return hashlib.sha256(previous + struct.pack("<d", loss)).digest()


class LossChain:
    """`chain_loss` over all losses so far. Many are hashed at once, not one between two steps."""

    def __init__(self, digest: bytes = b"") -> None:
        self._digest = digest
        self._pending: list[float] = []

    def add(self, loss: float) -> None:
        """Add the loss of one more step."""
        self._pending.append(loss)
        if len(self._pending) == _MAX_PENDING:
            self.digest()

    def digest(self) -> bytes:
        """Return the digest of all losses so far."""
        for loss in self._pending:
            self._digest = chain_loss(self._digest, loss)
        self._pending.clear()
        return self._digest


def state_digest(
    choice: str, mode: Parallel, tables: Sequence[TableSpec], dtype: torch.dtype, world: World
) -> str | None:
    """Return SHA-256, hexadecimal, over the weights of every table in the order of ids, then over
    the dense parameters in order; None if `choice` does not ask for it.

    `choice`: `run.digest`, `true`, `false` or `auto`; `world`: of `file_world`. The bytes of the
    values in `dtype` are hashed, row after row, and nothing else. All ranks call this after
    `flush`.
    """
    nbytes = sum(table.rows * table.dim for table in tables) * dtype.itemsize
    if choice == "false" or (choice == "auto" and nbytes > AUTO_BYTES):
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
    return run_on_rank0(world, sha.hexdigest)


# --------------------------------------------------------------------------------------------------
# Identity and position of a run.

SAME_STATE_MODES = frozenset({"data", "resident", "host"})
"""Modes that write the same values and thus read one another's checkpoints."""

HYBRID_OPTIMIZERS = frozenset({"sgd", "adagrad", "rowwise_adagrad"})
"""Optimizers whose rows have the same state in `hybrid` as in `SAME_STATE_MODES`."""

Identity = Mapping[str, Any]
"""Properties that a checkpoint and the run that resumes it share. Keys: those of `KEYS`, and

`model`: values of the group `model`;
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
"""For keys of an identity the setting by which a user chooses the value."""


def most_bytes(identity: Identity) -> int:
    """Return an upper bound of the bytes of all tables and their optimizer state."""
    return max_table_bytes((rows, dim) for _, rows, dim, *_ in identity["tables"])


@dataclass(frozen=True)
class TrainerState:
    """Position of training.

    `step`: trained steps; `loss_digest`: chain of their losses; `phase`: position among hot and
    cold batches (None: batches are not separated); `batch`: this rank's slice of the last trained
    batch, if this process trained it.
    """

    step: int = 0
    loss_digest: bytes = b""
    phase: Phase | None = None
    batch: Batch | None = field(default=None, compare=False)

    def header(self) -> dict[str, Any]:
        """Return the state as JSON values for a manifest."""
        phase = None if self.phase is None else vars(self.phase)
        return {"step": self.step, "loss_digest": self.loss_digest.hex(), "phase": phase}


@dataclass(frozen=True)
class Start:
    """Begin of a run: at `state`, of the checkpoint in `folder`; at step 0 without a folder."""

    state: TrainerState = TrainerState()
    folder: Path | None = None
    manifest: Manifest | None = None


def read_start(folder: Path, identity: Identity, world: World, same_data: bool = True) -> Start:
    """Compare the run of the checkpoint in `folder` with `identity`, and return where it resumes.

    All ranks call this before they make tables. `world`: of `file_world`; `same_data`: require the
    data of the checkpoint (False: log a warning about the differences). Raises ConfigError for
    another run, with both values, and DataError for a damaged list of files; the content of files
    is compared with their checksums when it is loaded.
    """
    manifest: Manifest = run_on_rank0(world, lambda: Manifest.read(folder))
    header = manifest.header
    require_same_run(folder, header, identity)
    epoch_key = "steps of an epoch (data.samples, data.path)"
    saved_data = dict(map(tuple, header["run"]["data"]))
    saved_data[epoch_key] = header["run"]["steps_per_epoch"]
    current_data = dict(identity["data"]) | {epoch_key: identity["steps_per_epoch"]}
    changes = differences(saved_data, current_data, "not set")
    if changes and same_data:
        raise ConfigError(
            f"{folder} is a checkpoint of training on other data: {changes}. Give the data it was "
            "made with; if other data are meant, set trainer.resume_data=any, which goes on at the "
            "same step of these"
        )
    if changes and world.is_first:
        logger.warning("resuming on other data than those of %s: %s", folder, changes)
    phase = None if changes else header["phase"]  # other data have other phases
    digest = bytes.fromhex(header["loss_digest"])
    state = TrainerState(header["step"], digest, None if phase is None else Phase(**phase))
    return Start(state, folder, manifest)


def require_same_run(folder: Path, header: Mapping[str, Any], identity: Identity) -> None:
    """Raise ConfigError if a checkpoint, by its header, does not belong to this run."""
    if "run" not in header:
        raise ConfigError(f"{folder} is a checkpoint of a loop: it is read by distcache.load")
    saved = header["run"]
    optimizer = identity["optimizer"]
    modes = {saved["mode"], identity["mode"]}
    same_state = modes <= SAME_STATE_MODES or optimizer in HYBRID_OPTIMIZERS
    ignored = ("mode", "world_size") if same_state else ()
    problems = [differences(_settings(saved, ignored), _settings(identity, ignored), "not there")]
    is_moved = len(modes) > 1 or saved["world_size"] != identity["world_size"]
    if "hybrid" in modes and not same_state and is_moved:
        problems.append(
            f"optim={optimizer} has another state of rows in hybrid than elsewhere, and only "
            f"{', '.join(sorted(HYBRID_OPTIMIZERS))} go on in another mode or number of ranks"
        )
    if any(problems):
        raise ConfigError(
            f"{folder} is a checkpoint of another run: {'; '.join(filter(None, problems))}. Set "
            "what it was made with, or begin anew by trainer.resume=never with another run.dir "
            "(from its weights by trainer.init_from)"
        )


def _settings(identity: Identity, ignored: Sequence[str]) -> dict[str, Any]:
    """Return the values of an identity by the keys that a user knows."""
    settings = {key: identity[name] for name, key in KEYS.items() if name not in ignored}
    settings |= {f"model.{key}": value for key, value in identity["model"].items()}
    settings["the number of tables"] = len(identity["tables"])
    for number, (name, rows, dim, *dtype) in enumerate(identity["tables"]):
        settings[f"table {number}"] = " ".join([f"{name} with {rows} rows x {dim}", *dtype])
    return settings


# --------------------------------------------------------------------------------------------------
# Values of a mode.


def capture(
    mode: Parallel, extra: Mapping[str, bytes], beside: bool, since: int | None = None
) -> dict[str, Any]:
    """Return the values of `mode` and the `extra` values of this rank as tensors, by name.

    All ranks call this after `flush`. `beside`: training continues while they are written, so
    copy all but the tables; `since`: of tables only the rows that changed since this mark, unless
    these are not fewer.
    """
    values: dict[str, Any] = {}
    for name, value in (mode.state_dict(since) | dict(extra)).items():
        if not isinstance(value, Tensor | ChangedRows):
            values[name] = as_bytes(value)
        elif beside and not name.startswith((TABLES, CHANGED)):
            values[name] = value.detach().cpu().clone()
        else:
            values[name] = value
    return values


def load_checkpoint(
    start: Start, mode: Parallel, world: World, extra: dict[str, bytes] | None = None
) -> None:
    """Load the checkpoint of `start`, of `read_start`, into `mode`. All ranks call this.

    `world`: of `file_world`; `extra`: names of values of this rank, which are stored there. Raises
    ConfigError for values that only the checkpoint or only the run has, before anything is changed,
    and DataError for a damaged block. After a DataError the mode has no valid values until it is
    loaded again.
    """
    folder = start.folder
    manifest = start.manifest
    if folder is None or manifest is None:
        return
    reader = local_result(world, lambda: BlockReader(folder, manifest))
    values = mode.blank_state() | (extra or {})
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in values.items() if name not in tensors}
    read_values(reader, tensors, others, world)

    def read_others() -> None:
        for name, blank in others.items():
            data = reader.read_value(name).numpy().tobytes()
            others[name] = data if isinstance(blank, bytes) else json.loads(data)

    run_on_all_ranks(world, read_others)
    if extra is not None:
        extra.update({name: others.pop(name) for name in extra})
    mode.load_state_dict(tensors | others)
    if world.is_first:
        logger.info("read step %s from %s", f"{start.state.step:,}", folder)
