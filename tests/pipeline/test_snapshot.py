"""Tables that are read while they go on changing: what is read is what stood there at the start."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from placement_cases import HALVES, TABLES, fitting_slots, placement_of
from ranks import run_ranks
from scenarios import OPTIMIZERS, Scenario, make_mode
from torch import Tensor

from distcache.comm.world import World, close_world, open_world
from distcache.engine.full_tables import Snapshot
from distcache.engine.groups import Placement
from distcache.parallel.cached import CachedSettings
from distcache.store import old_rows

BEGIN, STEPS, ROWS = 5, 40, 7
"""The step before which the snapshot begins; steps; rows of a block."""


def rows_of(value: Tensor, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, Tensor]:
    """Ids and rows of a part of a table."""
    return np.arange(len(value))[start:stop], value[start:stop]


class Beside(threading.Thread):
    """Reads all tables block by block, in order, while somebody trains."""

    def __init__(self, snapshot: Snapshot, views: dict[str, Tensor]) -> None:
        super().__init__()
        self._snapshot, self._views, self.found = snapshot, views, dict[str, Tensor]()
        self.start()

    def run(self) -> None:
        for name, value in self._views.items():
            parts = []
            for start in range(0, len(value), ROWS):
                parts.append(self._snapshot.block(name, *rows_of(value, start, start + ROWS)))
                time.sleep(1e-3)
            self.found[name] = torch.cat(parts)


def train_and_read(
    rank: int, size: int, folder: str, kind: str | None, optimizer: str, mode_name: str
) -> dict:
    """Whether the tables at `BEGIN` are what was read of them later, beside training and at its
    end; how many numbers changed, and rows were written, meanwhile; and files that are left."""
    old_rows.PIECE_ROWS = 1  # small tables have many pieces then too
    world = open_world("cpu", "gloo", 60)
    spec, lr = OPTIMIZERS[optimizer]
    case = Scenario(HALVES if kind == "mixed" else TABLES, spec, lr, steps=STEPS, seed=3)
    placement = Placement() if kind is None else placement_of(kind, case)
    slots = fitting_slots(case, size, placement)
    settings = CachedSettings(mode_name, slots, 3, 2, validate=True, placement=placement)
    mode = make_mode(world, case, settings)

    def train(first: int, last: int) -> None:
        for step in mode.stream(case.batch(s, rank, size) for s in range(first, last)):
            mode.train_step(step)

    train(0, BEGIN)
    mode.flush()
    views = {name: v for name, v in mode.state_dict().items() if name.startswith("tables.")}
    before = {name: value.clone() for name, value in views.items()}
    snapshot = Snapshot(Path(folder), mode.tables.rows, mode.tables.full_tables)
    dist.barrier(group=world.host_group)
    beside, begun = Beside(snapshot, views), mode.summary()["rows_written_back"]
    train(BEGIN, STEPS)
    written = mode.summary()["rows_written_back"] - begun
    beside.join()
    late = {name: snapshot.block(name, *rows_of(value)) for name, value in views.items()}
    reads = [torch.equal(of[name], before[name]) for of in (beside.found, late) for name in views]
    changed, error = sum(int((views[name] != before[name]).sum()) for name in views), snapshot.error
    dist.barrier(group=world.host_group)
    snapshot.close()
    dist.barrier(group=world.host_group)
    left = [path.name for path in Path(folder).iterdir()]
    mode.close()
    close_world(world)
    found = {"reads": reads, "error": error, "changed": changed, "written": written}
    return found | {"left": left}


CASES = [
    (1, None, "adam", "data"),
    (2, "sharded", "adagrad", "data"),
    (2, "mixed", "adam", "data"),
    (2, None, "sgd", "host"),
]


@pytest.mark.parametrize(("ranks", "placement", "optimizer", "mode"), CASES)
def test_a_snapshot_is_of_its_moment(
    ranks: int, placement: str | None, optimizer: str, mode: str, tmp_path: Path
) -> None:
    found = run_ranks(train_and_read, ranks, str(tmp_path), placement, optimizer, mode)
    for rank, of in enumerate(found):
        assert of["error"] is None and of["left"] == [] and of["written"] > 200
        if rank == 0:  # the first of a node's ranks names the tables
            assert of["changed"] > 1000 and len(of["reads"]) >= 2 * len(TABLES) and all(of["reads"])


def test_a_full_disk_ends_the_snapshot_and_nothing_else(tmp_path: Path, world: World) -> None:
    case = Scenario(TABLES, steps=3)
    mode = make_mode(world, case, CachedSettings("data", (216, 12), 2, 1))
    (tmp_path / "gone").mkdir()
    snapshot = Snapshot(tmp_path / "gone", mode.tables.rows, mode.tables.full_tables)
    (tmp_path / "gone").rmdir()
    store = mode.tables.rows[0].store
    before = store.weight.clone()
    mode.tables.rows[0].old.keep(torch.arange(4))
    mode.tables.rows[0].old.keep(torch.arange(4, 8))
    assert isinstance(snapshot.error, FileNotFoundError)
    assert torch.equal(before, store.weight)
    snapshot.close()
    snapshot.close()
    mode.close()


def test_a_row_is_kept_once_and_a_record_that_is_cut_speaks_of_rows_that_stand(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_rows, "PIECE_ROWS", 1)
    case = Scenario(TABLES, steps=1)
    mode = make_mode(world, case, CachedSettings("data", (216, 12), 2, 1))
    whole, rows = mode.tables.full_tables, mode.tables.rows[0]
    snapshot = Snapshot(tmp_path, mode.tables.rows, whole)
    old, store = rows.old, rows.store
    before = store.weight.clone()
    for turn in range(3):
        picked = torch.tensor([5, 70, 71, 299, turn])
        old.keep(picked)
        store.scatter(picked, torch.full((5, store.layout.dim), float(turn)), None)
    edges = store.layout.offsets.tolist()

    def read() -> list[Tensor]:
        parts = zip(store.layout.tables, pairwise(edges), strict=True)
        return [
            snapshot.block(f"tables.{table.name}.weight", *rows_of(store.weight[slice(*at)]))
            for table, at in parts
        ]

    assert torch.equal(torch.cat(read()), before)
    sizes = sorted(path.stat().st_size for path in tmp_path.iterdir())
    row = 8 + store.layout.dim * store.weight.itemsize
    records = sum(sizes) - row * 7
    assert records % 8 == 0 and records // 8 <= 3 * 4  # seven rows, each of them once
    with sorted(tmp_path.iterdir())[0].open("ab") as file:
        file.write(np.array([1000, 3], np.int64).tobytes())
    assert torch.equal(torch.cat(read()), before)
    snapshot.close()
    mode.close()
