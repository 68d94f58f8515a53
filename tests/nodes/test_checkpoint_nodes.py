"""Checkpoints over nodes: the files of one node's, whatever wrote them, and the same trajectory."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from node_cases import open_nodes
from ranks import run_ranks
from scenarios import OPTIMIZERS, Outcome, Scenario, finish, make_mode, popularity_of, table
from torch.distributed.checkpoint import FileSystemReader
from toy_parallel import ToyParallel

from distcache.comm.world import World, close_world
from distcache.engine import whole
from distcache.errors import ConfigError, DistcacheError
from distcache.parallel.cached import CachedSettings
from distcache.trainer import checkpoint
from distcache.trainer.checkpoint import RunIdentity, TrainerState

TABLES = (table("a", 300), table("b", 40, features=2), table("c", 7, dim=4), table("d", 1))
CASE = Scenario(TABLES, OPTIMIZERS["adam"][0], OPTIMIZERS["adam"][1], steps=12, weighted=True)
SETTINGS = CachedSettings("data", (236, 68), 6, 2)


def identity(size: int) -> RunIdentity:
    tables = tuple((spec.name, spec.rows, spec.dim) for spec in TABLES)
    return RunIdentity("data", size, "float32", "adam", 0, CASE.global_batch, None, tables)


def part_of_run(
    world: World, steps: range, source: Path | None, target: Path, popular: bool
) -> Outcome:
    """Some steps of the scenario, from the checkpoint `source` on; ends with one in `target`."""
    popularity = popularity_of(CASE, SETTINGS.slots) if popular else None
    mode = make_mode(world, CASE, SETTINGS, popularity)
    mode.scratch = target.parent
    if source is not None:
        state = checkpoint.compare(source, identity(world.size), world, True)
        checkpoint.load(source, mode, identity(world.size), world, state)
        assert state.step == steps.start
    batches = [CASE.batch(step, world.rank, world.size) for step in steps]
    losses = [mode.train_step(step).loss for step in mode.stream(batches)]
    mode.flush()
    checkpoint.save(target, mode, identity(world.size), TrainerState(steps.stop), world)
    return finish(mode, CASE, losses)


def wander(rank: int, size: int, home: str, way: list[tuple[int, ...]], popular: bool) -> list:
    """The scenario in as many parts as `way` has nodes, each on other nodes than the one before."""
    whole.BLOCK_BYTES = 3 << 10  # several blocks of each table
    found, source = [], None
    cuts = np.linspace(0, CASE.steps, len(way) + 1, dtype=int)
    for at, sizes in enumerate(way):
        world = open_nodes(rank, sizes)
        target = Path(home, f"part{at}", "model")
        steps = range(int(cuts[at]), int(cuts[at + 1]))
        found.append(part_of_run(world, steps, source, target, popular and at % 2 == 0))
        assert list(target.parent.iterdir()) == [target]
        source = target
        close_world(world)
    return found


def stored(folder: Path) -> dict:
    """Every tensor of a checkpoint, read by one process."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    names = [name for name, value in metadata.items() if hasattr(value, "size")]
    state = {n: torch.zeros(metadata[n].size, dtype=metadata[n].properties.dtype) for n in names}
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    return state


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_from_one_node_to_several_and_back(tmp_path: Path, size: int) -> None:
    several = (1,) * size if size == 2 else (1, 2)
    straight = run_ranks(wander, size, str(tmp_path / "straight"), [(size,)], False)[0][0]
    files = [tmp_path / "straight" / "part0"]
    for name, way in (("there", [(size,), several, (size,)]), ("back", [several, several])):
        found = run_ranks(wander, size, str(tmp_path / name), way, True)[0]
        assert [loss for part in found for loss in part.losses] == straight.losses
        assert found[-1].state_digest == straight.state_digest
        files.append(tmp_path / name / f"part{len(way) - 1}")
    first, *others = (stored(folder / "model") for folder in files)
    assert first["tables.a.exp_avg"].shape == (300, 8) and first["tables.a.exp_avg"].any()
    for other in others:
        assert first.keys() == other.keys()
        for name, value in first.items():
            assert torch.equal(value, other[name]), name


def own_folders(rank: int, size: int, home: str) -> tuple[str, str, list[str]]:
    """Save into folders that the two nodes do not share; what `check_run_folder` says of them."""
    checkpoint.PATIENCE_S = 0.2
    world = open_nodes(rank, (1, 1))
    folder, messages = Path(home, f"node{rank}"), []
    folder.mkdir()
    toy = ToyParallel(world)
    for action in (
        lambda: checkpoint.save(folder / "model", toy, identity(2), TrainerState(1), world),
        lambda: checkpoint.check_run_folder(world, folder, "run.save=true"),
    ):
        with pytest.raises(DistcacheError) as caught:
            action()
        assert isinstance(caught.value, ConfigError) is bool(messages)
        messages.append(str(caught.value))
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    checkpoint.logger.addHandler(handler)
    checkpoint.check_run_folder(world, folder, None)
    checkpoint.check_run_folder(world, Path(home), "run.save=true")
    close_world(world)
    return (*messages, logged)


def test_folders_that_nodes_do_not_share_are_refused(tmp_path: Path) -> None:
    for rank, (saving, starting, logged) in enumerate(run_ranks(own_folders, 2, str(tmp_path))):
        assert "not saved" in saving and "ranks [1]" in saving and "run.dir" in saving
        assert "run.save=true" in starting and "ranks [1]" in starting
        assert len(logged) == (rank == 0)
    assert [list(Path(tmp_path, f"node{rank}").iterdir()) for rank in range(2)] == [[], []]


def test_temporary_files_are_unnamed_and_a_full_disk_says_so(tmp_path, monkeypatch) -> None:
    part = whole.disk_zeros((1000, 4), torch.float64, tmp_path)
    assert part.shape == (1000, 4) and part.dtype == torch.float64 and not part.any()
    part[999, 3] = 1
    assert list(tmp_path.iterdir()) == [] and part.sum() == 1
    assert whole.disk_zeros((0, 4), torch.float32, tmp_path).shape == (0, 4)

    def full(fd: int, start: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(DistcacheError, match=r"No space left.*run\.dir"):
        whole.disk_zeros((1000, 4), torch.float64, tmp_path)
