"""TorchRec's names; where it is not installed, or does not load, ones of which nothing is an
instance, for modules with the arguments of torch.nn's do without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

try:
    from torchrec.modules.embedding_configs import BaseEmbeddingConfig as BaseEmbeddingConfig
    from torchrec.modules.embedding_configs import EmbeddingBagConfig as EmbeddingBagConfig
    from torchrec.modules.embedding_configs import EmbeddingConfig as EmbeddingConfig
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollectionInterface as EmbeddingBagCollectionInterface,
    )
    from torchrec.modules.embedding_modules import (
        EmbeddingCollectionInterface as EmbeddingCollectionInterface,
    )
    from torchrec.optim import RowWiseAdagrad as RowWiseAdagrad
    from torchrec.optim import optimizers as optimizers
    from torchrec.optim.keyed import KeyedOptimizer as KeyedOptimizer
    from torchrec.sparse.jagged_tensor import JaggedTensor as JaggedTensor
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as KeyedJaggedTensor
    from torchrec.sparse.jagged_tensor import KeyedTensor as KeyedTensor
except (ImportError, OSError, AttributeError):  # told to whoever asks for a collection
    if not TYPE_CHECKING:

        def _nothing(name: str) -> type:
            return type(name, (), {})

        BaseEmbeddingConfig = EmbeddingBagConfig = EmbeddingConfig = _nothing("Config")
        EmbeddingBagCollectionInterface = EmbeddingCollectionInterface = torch.nn.Module
        RowWiseAdagrad, KeyedOptimizer = _nothing("RowWiseAdagrad"), torch.optim.Optimizer
        optimizers = SimpleNamespace(**{n: _nothing(n) for n in ("SGD", "Adagrad", "Adam")})
        JaggedTensor = KeyedJaggedTensor = KeyedTensor = _nothing("KeyedJaggedTensor")
