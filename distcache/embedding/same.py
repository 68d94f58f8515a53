"""What all ranks make a collection from alike, by name and value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from distcache.embedding.settings import CacheSettings
from distcache.embedding.tables import Lookups
from distcache.layout import TableSpec
from distcache.optim.rows import RowUpdate


def collection_values(
    name: str,
    tables: Sequence[TableSpec],
    lookups: Lookups,
    update: RowUpdate,
    settings: CacheSettings,
) -> dict[str, Any]:
    """What to compare over the ranks of the collection `name`.

    Without the statistics, which may lie elsewhere on each rank: what they say is compared later.
    """
    values = {
        "the collection": name,
        "the order of tables": [table.name for table in tables],
        "the features": lookups.features,
        "optimizer": update,
    }
    values |= {f"table {table.name!r}": table for table in tables}
    own = [f.name for f in fields(settings) if f.repr]
    return values | {name: getattr(settings, name) for name in own}
