"""TorchRec's names; where it is not installed, or does not load, ones of which nothing is an
instance, for modules with the arguments of torch.nn's do without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

try:
    from torchrec.modules.embedding_configs import (
        BaseEmbeddingConfig,
        DataType,
        EmbeddingBagConfig,
        EmbeddingConfig,
        PoolingType,
    )
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollectionInterface,
        EmbeddingCollectionInterface,
    )
    from torchrec.optim import RowWiseAdagrad, optimizers
    from torchrec.optim.keyed import KeyedOptimizer
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
except (ImportError, OSError, AttributeError):  # told to whoever asks for a collection
    if not TYPE_CHECKING:

        def _nothing(name: str) -> type:
            return type(name, (), {})

        BaseEmbeddingConfig = EmbeddingBagConfig = EmbeddingConfig = _nothing("Config")
        DataType = PoolingType = SimpleNamespace(FP32=object(), SUM=object(), MEAN=object())
        EmbeddingBagCollectionInterface = EmbeddingCollectionInterface = torch.nn.Module
        RowWiseAdagrad, KeyedOptimizer = _nothing("RowWiseAdagrad"), torch.optim.Optimizer
        optimizers = SimpleNamespace(**{n: _nothing(n) for n in ("SGD", "Adagrad", "Adam")})
        JaggedTensor = KeyedJaggedTensor = KeyedTensor = _nothing("KeyedJaggedTensor")

__all__ = [
    "BaseEmbeddingConfig",
    "DataType",
    "EmbeddingBagCollectionInterface",
    "EmbeddingBagConfig",
    "EmbeddingCollectionInterface",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedOptimizer",
    "KeyedTensor",
    "PoolingType",
    "RowWiseAdagrad",
    "optimizers",
]
