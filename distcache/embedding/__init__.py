"""The drop-in: collections as TorchRec's and modules as torch.nn's, in anybody's training loop."""

from contextlib import suppress

from distcache.embedding.jagged import (
    CachedEmbeddingBagCollection,
    CachedEmbeddingCollection,
)
from distcache.embedding.optimizer import RowOptimizer, RowsAndDense, clip_grad_norm_
from distcache.embedding.plain import CachedEmbedding, CachedEmbeddingBag
from distcache.embedding.stream import Lookahead, lookahead

with suppress(ImportError, OSError, AttributeError):  # where TorchRec is not installed
    import distcache.embedding.collisions  # noqa: F401  (wrappers of its are recognised from now on)

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
