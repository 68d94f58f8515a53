"""The drop-in collections: TorchRec models in anybody's training loop over cached rows."""

from distcache.embedding.collection import (
    CachedEmbeddingBagCollection,
    CachedEmbeddingCollection,
)
from distcache.embedding.optimizer import RowOptimizer, clip_grad_norm_
from distcache.embedding.stream import Lookahead, lookahead

__all__ = [
    "CachedEmbeddingBagCollection",
    "CachedEmbeddingCollection",
    "Lookahead",
    "RowOptimizer",
    "clip_grad_norm_",
    "lookahead",
]
