"""The drop-in collections: TorchRec models in anybody's training loop over cached rows."""

import contextlib
import importlib

from distcache.embedding.collection import (
    CachedEmbeddingBagCollection,
    CachedEmbeddingCollection,
)
from distcache.embedding.optimizer import RowOptimizer, clip_grad_norm_
from distcache.embedding.stream import Lookahead, lookahead

with contextlib.suppress(ImportError, OSError, AttributeError):  # no TorchRec, or an older one
    importlib.import_module("distcache.embedding.collisions")

__all__ = [
    "CachedEmbeddingBagCollection",
    "CachedEmbeddingCollection",
    "Lookahead",
    "RowOptimizer",
    "clip_grad_norm_",
    "lookahead",
]
