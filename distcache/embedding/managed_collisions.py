"""TorchRec's managed collisions around a collection: recognised, so that it is refused where it
would be wrong.

The modules of `ManagedCollisionEmbeddingBagCollection` map ids to rows before the collection sees
them. On one rank, without a look-ahead, this works as around TorchRec's own collections. A
look-ahead would plan rows of ids that are not mapped yet. On several ranks each module would see
the ids of its own rank alone, and one row would stand for different ids on each.
"""

from __future__ import annotations

from torch import nn
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from distcache.embedding.collection import CachedCollection


def _note_remapping(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Note in a collection that a module around it maps its ids."""
    is_wrapper = isinstance(module, BaseManagedCollisionEmbeddingCollection)
    if is_wrapper and isinstance(child, CachedCollection):
        child.reader.is_remapped = True


nn.modules.module.register_module_module_registration_hook(_note_remapping)
