"""The drop-in: collections as TorchRec's and modules as torch.nn's, in anybody's training loop."""

import contextlib
import importlib

from distcache.embedding.jagged import (
    CachedEmbeddingBagCollection,
    CachedEmbeddingCollection,
)
from distcache.embedding.optimizer import RowOptimizer, RowsAndDense, clip_grad_norm_
from distcache.embedding.plain import CachedEmbedding, CachedEmbeddingBag
from distcache.embedding.stream import Lookahead, lookahead

with contextlib.suppress(ImportError, OSError, AttributeError):  # no TorchRec, or an older one
    importlib.import_module("distcache.embedding.collisions")

__all__ = [
    "CachedEmbedding",
    "CachedEmbeddingBag",
    "CachedEmbeddingBagCollection",
    "CachedEmbeddingCollection",
    "Lookahead",
    "RowOptimizer",
    "RowsAndDense",
    "clip_grad_norm_",
    "lookahead",
]
