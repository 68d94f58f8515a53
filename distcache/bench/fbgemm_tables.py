"""FBGEMM's table-batched embeddings, as the benches compare with them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

_KINDS = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
    "adam": "ADAM",
}


def fbgemm_tables(
    sizes: Sequence[tuple[int, int]],
    optimizer: str,
    device: torch.device,
    location: str = "DEVICE",
    **settings: Any,
) -> Any:
    """A `SplitTableBatchedEmbeddingBagsCodegen` of tables of `sizes` (rows, width), float32.

    `optimizer`: its name here, which backward applies; `location`: FBGEMM's name for where tables
    lie on a GPU; on a CPU they are in host memory. `settings`: of its constructor.
    """
    training = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    kinds = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
    cuda = device.type == "cuda"
    place = getattr(common.EmbeddingLocation, location if cuda else "HOST")
    where = training.ComputeDevice.CUDA if cuda else training.ComputeDevice.CPU
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, place, where) for rows, width in sizes],
        optimizer=getattr(kinds, _KINDS[optimizer]),
        stochastic_rounding=False,
        device=device if cuda else None,
        **settings,
    )
