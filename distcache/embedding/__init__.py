"""The drop-in: collections as TorchRec's and modules as torch.nn's, in anybody's training loop."""

import contextlib
import importlib

from distcache.embedding.convert import to_torchrec as to_torchrec
from distcache.embedding.jagged import CachedEmbeddingBagCollection as CachedEmbeddingBagCollection
from distcache.embedding.jagged import CachedEmbeddingCollection as CachedEmbeddingCollection
from distcache.embedding.optimizer import RowOptimizer as RowOptimizer
from distcache.embedding.optimizer import RowsAndDense as RowsAndDense
from distcache.embedding.optimizer import clip_grad_norm_ as clip_grad_norm_
from distcache.embedding.plain import CachedEmbedding as CachedEmbedding
from distcache.embedding.plain import CachedEmbeddingBag as CachedEmbeddingBag
from distcache.embedding.stream import lookahead as lookahead

with contextlib.suppress(ImportError, OSError, AttributeError):  # no TorchRec, or an older one
    importlib.import_module("distcache.embedding.managed_collisions")
