"""Exact data-parallel training of recommendation models over cached embedding rows.

The library's names are imported when they are first used, for they bring TorchRec along where it is
installed.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcache import optim
    from distcache.checkpoint.loop import load, save
    from distcache.embedding import (
        CachedEmbedding,
        CachedEmbeddingBag,
        CachedEmbeddingBagCollection,
        CachedEmbeddingCollection,
        RowOptimizer,
        RowsAndDense,
        clip_grad_norm_,
        lookahead,
        to_torchrec,
    )
    from distcache.engine.gradients import DenseGradients
    from distcache.fitting import fit
    from distcache.layout import TableSpec
    from distcache.stopping import StopRequest

__all__ = [
    "CachedEmbedding",
    "CachedEmbeddingBag",
    "CachedEmbeddingBagCollection",
    "CachedEmbeddingCollection",
    "DenseGradients",
    "RowOptimizer",
    "RowsAndDense",
    "StopRequest",
    "TableSpec",
    "clip_grad_norm_",
    "fit",
    "load",
    "lookahead",
    "optim",
    "save",
    "to_torchrec",
]

_MODULES = {
    "DenseGradients": "distcache.engine.gradients",
    "StopRequest": "distcache.stopping",
    "TableSpec": "distcache.layout",
    "fit": "distcache.fitting",
    "load": "distcache.checkpoint.loop",
    "save": "distcache.checkpoint.loop",
}
"""Where names are that `distcache.embedding`, with TorchRec, does not have."""


launched = os.getpid(), os.getppid()
"""This process and who started it, as they were before torch is imported, which takes seconds."""

if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    # GNU OpenMP, which torch brings, reads this once, when torch is imported. By default its
    # threads spin for milliseconds between two operations, on cores that the planner, the mover
    # and other processes need. Some microseconds bridge short pauses as well.
    os.environ["GOMP_SPINCOUNT"] = "2000"

if sys.argv[:1] == ["-m"]:
    # `python -m distcache.train` is about to import torch, for seconds: a Ctrl-C meanwhile ends the
    # process as it ends any program, without a traceback. `main` takes it over.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'distcache' has no attribute {name!r}")
    try:
        if name.endswith("Collection"):
            importlib.import_module("torchrec")
        if name == "optim":
            return importlib.import_module("distcache.optim")
        return getattr(importlib.import_module(_MODULES.get(name, "distcache.embedding")), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"distcache.{name} needs {error.name}, which is not installed: see launch/setup.sh for "
            "the torchrec and fbgemm that fit your torch"
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
