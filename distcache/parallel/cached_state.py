"""What a checkpoint of a cached mode consists of, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distcache.comm.world import World
from distcache.layout import TableSpec
from distcache.optim.dense_state import load_state, state_tensors
from distcache.optim.rows import RowUpdate
from distcache.parallel.sharded_state import ShardedTables
from distcache.pipeline.rows import GroupRows
from distcache.pipeline.whole import table_block

_MODEL, _OPTIMIZER = "dense.", "dense_optim."


MOST_NAMED = 64
"""Tables that a summary names."""


def table_views(groups: Sequence[GroupRows], table: int) -> tuple[Tensor, Tensor | None]:
    """Views of a table's weights and state in original ids; where this node has all of its rows."""
    rows, place = _find(groups, table)
    if rows.store is not None:
        return rows.store.table(place)
    start, stop = (int(at) for at in rows.group.layout.offsets[place : place + 2])
    state = rows.cache.state
    return rows.cache.weight[start:stop], None if state is None else state[start:stop]


def read_block(world: World, groups: Sequence[GroupRows], table: int, ids: range) -> Tensor | None:
    """Rows `ids` of a table, `[n, D]` on the CPU, on rank 0; None or the same on others."""
    rows, place = _find(groups, table)
    if _is_split(world, groups) and rows.store is not None:
        return table_block(world, rows.store, place, ids)
    return table_views(groups, table)[0][ids.start : ids.stop].cpu()


def whole_tables(
    world: World,
    tables: Sequence[TableSpec],
    groups: Sequence[GroupRows],
    update: RowUpdate,
    scratch: Path | None,
    filled: bool,
) -> dict[str, Any]:
    """All tables by name (`state_of_tables`), for `torch.distributed.checkpoint`.

    Views of the store on one node, where only the first of the ranks that share it names them;
    ranks with copies of their own (`resident`) all do, and one of them is written. On several
    nodes shards in files under `scratch`, with the rows' values where `filled`.
    """
    if _is_split(world, groups):
        return dict(ShardedTables(world, tables, groups).state(update, scratch, filled))
    if groups[0].store is not None and world.local_rank:
        return {}
    views = [(table, *table_views(groups, index)) for index, table in enumerate(tables)]
    return dict(state_of_tables(views, update))


def load_tables(
    world: World,
    tables: Sequence[TableSpec],
    groups: Sequence[GroupRows],
    update: RowUpdate,
    state: Mapping[str, Any],
) -> None:
    """Take what `whole_tables` gave and a load filled; views have it already."""
    if _is_split(world, groups):
        ShardedTables(world, tables, groups).load(update, state)


def _is_split(world: World, groups: Sequence[GroupRows]) -> bool:
    """Whether each node's store has only a part of the rows."""
    return world.nodes.count > 1 and groups[0].store is not None


def _find(groups: Sequence[GroupRows], table: int) -> tuple[GroupRows, int]:
    """The rows of a table's group, and its index there."""
    rows = next(rows for rows in groups if table in rows.group.tables)
    return rows, rows.group.tables.index(table)


def hot_rows(tables: Sequence[TableSpec], rows: Sequence[int]) -> dict[str, int] | None:
    """The hot rows of each table by name; None for more tables than a summary names."""
    if len(tables) > MOST_NAMED:
        return None
    return {table.name: count for table, count in zip(tables, rows, strict=True)}


def meaningless(mode: str) -> tuple[str, ...]:
    """Values of a summary that `mode` does not have: it caches nothing, or moves nothing."""
    cached = ("cache_rows", "hit_rate", "hit_rate_lookups") if mode != "data" else ()
    moved = ("rows_fetched", "rows_written_back", "host_to_device_bytes", "device_to_host_bytes")
    return (*cached, *moved) if mode == "resident" else cached


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
