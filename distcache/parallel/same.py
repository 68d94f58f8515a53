"""All ranks must build the same model in the same mode: compared by value before anything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from distcache.comm.agree import agree_on
from distcache.comm.world import World
from distcache.layout import TableSpec
from distcache.parallel.base import OptimizerSpec

NOT_COMPARED = {"compared": False}
"""Metadata of a setting that is too large to be sent to the other ranks, or a rank's own."""


def check_same(
    world: World,
    tables: Sequence[TableSpec],
    features: Sequence[str],
    model: nn.Module,
    optimizer: OptimizerSpec,
    settings: Any,
) -> None:
    """Raise ConfigError on every rank unless all ranks were given the same; called by all ranks.

    `settings`: a dataclass whose fields are compared one by one, but for those `NOT_COMPARED`.
    """
    values: dict[str, Any] = {"torch's version": torch.__version__}
    compared = [f.name for f in fields(settings) if f.metadata != NOT_COMPARED]
    values |= {f"setting {name!r}": getattr(settings, name) for name in compared}
    values |= {f"optim {f.name!r}": getattr(optimizer, f.name) for f in fields(optimizer)}
    values["the order of tables"] = [table.name for table in tables]
    values |= {f"table {table.name!r}": table for table in tables}
    values["the order of features"] = list(features)
    for name, parameter in model.named_parameters():
        values[f"the shape of {name}"] = list(parameter.shape)
    agree_on(world, values)
