"""What `hybrid` is built from, what it refuses, and the only door to TorchRec and FBGEMM."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections import Counter
from dataclasses import dataclass
from types import ModuleType

import torch

from distcache.comm.agree import together
from distcache.comm.world import World
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.optim.rows import row_update
from distcache.parallel.base import OptimizerSpec
from distcache.store.available import require_memory

SHARDINGS = ("auto", "table_wise", "row_wise", "column_wise")

_LIBRARIES = ("torchrec", "fbgemm_gpu")


@dataclass(frozen=True)
class HybridSpec:
    """Tables and optimizer of a hybrid model, in plain arguments.

    `features`: the order of the bags and of the pooled vectors; each is read by one table.
    `weighted`: batches carry a weight per id. `local_batch_size`: samples per rank and step that
    TorchRec's planner (`sharding="auto"`) reckons with. `agree_on_sizes`: ranks bring batches of
    their own sizes, and tell each other before each step. `amp`: `off`, or `bf16` for the
    dense part.
    """

    tables: tuple[TableSpec, ...]
    features: tuple[str, ...]
    optimizer: OptimizerSpec
    seed: int
    sharding: str = "auto"
    weighted: bool = False
    dtype: torch.dtype = torch.float32
    local_batch_size: int = 512
    on_bad_id: str = "error"
    agree_on_sizes: bool = False
    amp: str = "off"


def check_spec(spec: HybridSpec, world: World) -> None:
    """Raise ConfigError, with the way out, for what TorchRec's sharded tables cannot do here."""
    _check_kernels(spec, world)
    _check_tables(spec)
    readers = Counter(feature for table in spec.tables for feature in table.features)
    shared = sorted(feature for feature, count in readers.items() if count > 1)
    if shared:
        raise ConfigError(f"features {shared} are read by several tables: give each table its own")
    if sorted(readers) != sorted(spec.features):
        raise ConfigError(
            f"the tables read features {sorted(readers)}, the batches have {sorted(spec.features)}"
        )


def check_memory(spec: HybridSpec, world: World) -> None:
    """Raise MemoryTooSmallError where the shards of a node's ranks on the CPU do not fit it.

    Called by all ranks, before anything is allocated; every rank learns of it.
    """
    if world.device.type != "cpu":
        return
    update = row_update(spec.optimizer.name, 0.0)
    floats = sum(table.rows * (table.dim + update.state_width(table.dim)) for table in spec.tables)
    share = floats * spec.dtype.itemsize * world.local_size // world.size

    def check() -> None:
        if world.local_rank == 0:
            require_memory(
                share,
                f"the shards of {world.local_size} local ranks",
                "use smaller tables, more nodes, or parallel=data on a machine with more memory",
            )

    together(world, check)


def _check_kernels(spec: HybridSpec, world: World) -> None:
    if spec.sharding not in SHARDINGS:
        raise ConfigError(f"parallel.sharding={spec.sharding!r} is not one of {SHARDINGS}")
    if spec.dtype != torch.float32:
        raise ConfigError(
            f"parallel=hybrid trains in float32, not {spec.dtype}: set trainer.dtype=float32, or "
            "use parallel=data, resident or host for checks in float64"
        )
    if spec.optimizer.name == "adam" and world.device.type == "cpu":
        raise ConfigError(
            "optim=adam has no kernel on the CPU in parallel=hybrid: use optim=sgd, adagrad or "
            "rowwise_adagrad, a CUDA device, or another parallel mode"
        )
    if world.device.type == "cuda" and world.backend == "gloo" and world.size > 1:
        raise ConfigError(
            "parallel=hybrid on CUDA exchanges rows with NCCL, and this job runs on gloo: start "
            "one rank per GPU with trainer.backend=nccl, or set trainer.device=cpu"
        )


def _check_tables(spec: HybridSpec) -> None:
    for table in spec.tables:
        if table.dim % 4:
            raise ConfigError(
                f"table {table.name!r} has width {table.dim}: parallel=hybrid needs a multiple "
                f"of 4, so set model.embedding_dim={-(-table.dim // 4) * 4} or use another mode"
            )
        if spec.weighted and table.pooling == "mean":
            raise ConfigError(
                f"table {table.name!r} has pooling 'mean' and weighted ids: weights need 'sum'"
            )


class _LibraryNoise(logging.Filter):
    """Drops what TorchRec and FBGEMM report below WARNING, unless distcache logs at DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the root logger may handle `record`."""
        if record.levelno >= logging.WARNING or not any(
            f"/{name}/" in record.pathname for name in _LIBRARIES
        ):
            return True
        return logging.getLogger("distcache").isEnabledFor(logging.DEBUG)


_NOISE = _LibraryNoise()


_LOUD_LOGGERS = {
    "torchrec": logging.WARNING,
    "torchrec.distributed.planner": logging.ERROR,  # warns of its own constructors
    "torch.fx._symbolic_trace": logging.ERROR,
}


def _quieten() -> None:
    # FBGEMM and parts of TorchRec log to the root logger, dozens of INFO lines per table.
    logging.getLogger().addFilter(_NOISE)
    debug = logging.getLogger("distcache").isEnabledFor(logging.DEBUG)
    for name, level in _LOUD_LOGGERS.items():
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET and not debug:
            logger.setLevel(level)
    # What TorchRec calls and torch is about to rename; nothing that a user could change.
    for renamed in (
        "(all_gather_into|reduce_scatter)_tensor",
        "ShardedTensor",
        "broadcast_buffers",
    ):
        warnings.filterwarnings("ignore", f".*{renamed}", FutureWarning)


def load_torchrec() -> ModuleType:
    """Import `distcache.parallel.hybrid_torchrec`, and with it TorchRec and FBGEMM.

    Raises ConfigError when one is missing or was built for another torch.
    """
    _quieten()
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    fit = "fbgemm 1.6 fits torch 2.11, 1.7 fits 2.12, 1.8 fits 2.13"
    if missing:
        raise ConfigError(
            f"parallel=hybrid needs {' and '.join(missing)}, not installed here: install torchrec "
            f"and the fbgemm-gpu or fbgemm-gpu-cpu made for torch {torch.__version__} ({fit}), "
            "or use another parallel mode"
        )
    try:
        return importlib.import_module("distcache.parallel.hybrid_torchrec")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"torchrec or fbgemm does not load under torch {torch.__version__} ({fit}); install "
            f"the one made for it, or use another parallel mode. First error: {error}"
        ) from error
