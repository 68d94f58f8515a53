"""The interface of a row store: whole tables of one group, wherever they live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from distcache.layout import RowLayout

Rows = tuple[Tensor, Tensor | None]
"""Weights `[m, D]` and optimizer state `[m, S]`, or None where S = 0."""


@runtime_checkable
class Store(Protocol):
    """All rows of one group, each with its optimizer state. Row numbers are the layout's.

    Only its home rank reads or writes a row while training runs (DESIGN, section 4).
    """

    layout: RowLayout
    state_width: int
    dtype: torch.dtype

    def initialise(
        self, seed: int, table_indices: Sequence[int], initial_state: float = 0.0
    ) -> None:
        """Give every row its initial weight and state; called by all ranks, and a barrier.

        `table_indices`: for each table of the layout, its index in the model.
        """
        ...

    def gather(self, rows: Tensor, out: Rows | None = None) -> Rows:
        """Copies of `rows` (int64 `[m]`, on the CPU), into `out` when it is given."""
        ...

    def scatter(self, rows: Tensor, weight: Tensor, state: Tensor | None) -> None:
        """Write `rows` (int64 `[m]`, distinct, on the CPU) from `weight` `[m, D]`, `state`."""
        ...

    def table(self, index: int) -> Rows:
        """Table `index` of the layout in original ids: `[rows, D]` and `[rows, S]` or None.

        PlanError where this store holds only the rows at home on its node.
        """
        ...

    def close(self) -> None:
        """Let go of the rows; safe to call twice."""
        ...
