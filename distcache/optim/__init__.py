"""Optimizers: of rows (lazy, state per row), of the dense part, and the learning rate."""

from distcache.optim.dense import dense_optimizer
from distcache.optim.rows import (
    SGD,
    Adagrad,
    Adam,
    RowUpdate,
    RowWiseAdagrad,
    apply_rows,
    row_update,
)
from distcache.optim.schedule import LearningRate

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "LearningRate",
    "RowUpdate",
    "RowWiseAdagrad",
    "apply_rows",
    "dense_optimizer",
    "row_update",
]
