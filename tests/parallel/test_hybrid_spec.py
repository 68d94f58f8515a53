"""What `hybrid` refuses, with the way out, and where a sharding falls back to whole tables."""

from __future__ import annotations

import dataclasses

import hybrid_cases as cases
import pytest
import torch

from distcache.comm.world import World
from distcache.errors import ConfigError, MemoryTooSmallError
from distcache.layout import TableSpec
from distcache.parallel.base import OptimizerSpec
from distcache.parallel.hybrid import HybridSpec, check_memory, check_spec, load_torchrec
from distcache.store import memory as available


def test_row_wise_and_column_wise_fall_back_where_a_table_cannot_be_split() -> None:
    load_torchrec()
    from distcache.parallel.hybrid_torchrec import column_shards, splits_rows

    assert [splits_rows(rows, 4) for rows in (3, 4, 5, 6, 7, 8)] == [
        False,
        True,
        False,
        False,
        True,
        True,
    ]
    assert [column_shards(dim, 4) for dim in (4, 8, 12, 16, 20, 64)] == [1, 2, 3, 4, 1, 4]


def _world(device: str = "cpu", backend: str = "gloo", size: int = 2) -> World:
    fields = dict.fromkeys(("device_group", "host_group", "planning_group", "store"))
    place = torch.device(device)
    return World(0, size, 0, size, device=place, backend=backend, timeout_s=1.0, **fields)


@pytest.mark.parametrize(
    ("change", "world", "words"),
    [
        ({"dtype": torch.float64}, {}, "trainer.dtype=float32"),
        ({"optimizer": OptimizerSpec("adam")}, {}, "optim=adam"),
        ({"sharding": "grid"}, {}, "parallel.sharding='grid'"),
        ({"tables": (TableSpec("t", 9, 6, ("a",)),), "features": ("a",)}, {}, "embedding_dim=8"),
        ({"weighted": True}, {}, "weights need 'sum'"),
        ({"features": ("a", "b")}, {}, r"read features \['a', 'b', 'c', 'd'\]"),
        ({"tables": (*cases.tables(), TableSpec("t", 9, 8, ("a",)))}, {}, "several tables"),
        ({}, {"device": "cuda"}, "trainer.backend=nccl"),
    ],
)
def test_refuses_with_the_way_out(change: dict, world: dict, words: str) -> None:
    spec = HybridSpec(cases.tables(), cases.FEATURES, OptimizerSpec("sgd"), seed=0)
    check_spec(spec, _world())
    with pytest.raises(ConfigError, match=words):
        check_spec(dataclasses.replace(spec, **change), _world(**world))


def test_a_missing_or_broken_library_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="needs torchrec and fbgemm_gpu, not installed"):
            load_torchrec()

    def broken(name: str) -> None:
        raise OSError("undefined symbol: _ZN3c10")

    with monkeypatch.context() as patch:
        patch.setattr("importlib.import_module", broken)
        with pytest.raises(ConfigError, match=r"does not load under torch .* undefined symbol"):
            load_torchrec()


def test_too_little_memory_is_said_before_anything_is_made(monkeypatch) -> None:
    tables = (TableSpec("t", 1000, 8, ("a",)),)
    alone = _world(size=1)
    for optimizer, floats in (("sgd", 8), ("adagrad", 16), ("rowwise_adagrad", 9)):
        spec = HybridSpec(tables, ("a",), OptimizerSpec(optimizer), seed=0)
        needed = 1000 * floats * 4
        monkeypatch.setattr(available, "available_memory", lambda needed=needed: needed)
        check_memory(spec, alone)
        monkeypatch.setattr(available, "available_memory", lambda needed=needed: needed - 1)
        with pytest.raises(MemoryTooSmallError, match=f"{needed}.*parallel=data"):
            check_memory(spec, alone)
