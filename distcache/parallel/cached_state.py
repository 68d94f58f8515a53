"""What a checkpoint of a cached mode consists of, by name; tensors are views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distcache.layout import TableSpec
from distcache.optim.dense_state import load_state, state_tensors
from distcache.optim.rows import RowUpdate
from distcache.pipeline.rows import GroupRows

_MODEL, _OPTIMIZER = "dense.", "dense_optim."


MOST_NAMED = 64
"""Tables that a summary names."""


def table_views(groups: Sequence[GroupRows], table: int) -> tuple[Tensor, Tensor | None]:
    """Views of a table's weights and state in original ids."""
    rows = next(rows for rows in groups if table in rows.group.tables)
    place = rows.group.tables.index(table)
    if rows.store is not None:
        return rows.store.table(place)
    start, stop = (int(at) for at in rows.group.layout.offsets[place : place + 2])
    state = rows.cache.state
    return rows.cache.weight[start:stop], None if state is None else state[start:stop]


def hot_rows(tables: Sequence[TableSpec], rows: Sequence[int]) -> dict[str, int] | None:
    """The hot rows of each table by name; None for more tables than a summary names."""
    if len(tables) > MOST_NAMED:
        return None
    return {table.name: count for table, count in zip(tables, rows, strict=True)}


def state_of_tables(
    views: Sequence[tuple[TableSpec, Tensor, Tensor | None]], update: RowUpdate
) -> dict[str, Tensor]:
    """`tables.<name>.weight` `[rows, D]`, and `tables.<name>.<state>` for each state of `update`.

    `views`: tables with their weights and state `[rows, S]` (None where S = 0).
    """
    state: dict[str, Tensor] = {}
    for table, weight, extra in views:
        state[f"tables.{table.name}.weight"] = weight
        for name, columns in update.state_columns(table.dim).items():
            if extra is not None:
                state[f"tables.{table.name}.{name}"] = extra[:, columns]
    return state


def state_of_dense(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`dense.<name>` of the model's state, `dense_optim.<parameter>.<state>` of the optimizer's."""
    state = {f"{_MODEL}{name}": value for name, value in model.state_dict().items()}
    for name, value in state_tensors(optimizer, _names(model)).items():
        state[f"{_OPTIMIZER}{name}"] = value
    return state


def load_dense(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Take back what `state_of_dense` gave."""
    model.load_state_dict(_under(_MODEL, state))
    load_state(optimizer, _names(model), _under(_OPTIMIZER, state))


def _under(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {key[len(prefix) :]: v for key, v in state.items() if key.startswith(prefix)}


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}
