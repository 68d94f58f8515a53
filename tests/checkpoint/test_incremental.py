"""Checkpoints that have the rows alone that changed since a whole one: with that they are what a
whole one would be, whatever reads them and whatever goes on meanwhile."""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from node_cases import open_nodes
from placement_cases import TABLES, fitting_slots, placement_of
from pyarrow import parquet
from ranks import run_ranks
from scenarios import OPTIMIZERS, Scenario, Source, make_mode, table
from torch.distributed.checkpoint import FileSystemReader
from toy_parallel import toy_config

from distcache import export
from distcache.checkpoint import __main__ as entry
from distcache.checkpoint import saver, writer
from distcache.checkpoint.manifest import MANIFEST, Manifest, rests_on
from distcache.checkpoint.saver import Keeping
from distcache.checkpoint.weights import checkpoint_values
from distcache.checkpoint.writer import BlockSavePlanner
from distcache.comm.world import World, close_world
from distcache.engine.full_tables import ChangedRows
from distcache.engine.groups import Placement
from distcache.errors import DataError
from distcache.parallel.base import Step, StepResult
from distcache.parallel.cached import CachedSettings
from distcache.store.table_files import read_safetensors
from distcache.trainer.trainer import Run

STEPS = 30
CASE = Scenario((*TABLES, table("e", 900)), *OPTIMIZERS["adam"], global_batch=16, steps=STEPS)
"""From one checkpoint to the next few rows of `e` change, many of others, of `d` the only one."""


def wait_for_writing(step: int, limit_s: float = 30) -> None:
    for thread in threading.enumerate():
        if thread.name == "distcache-checkpoint":
            thread.join(limit_s)


def run(
    world: World,
    folder: Path,
    how: str = "data",
    before: Callable[[int], None] = wait_for_writing,
    **keys: Any,
) -> dict:
    """The summary of a run in `folder` with a checkpoint after each step, or when the one before is
    written; `before` is called with the number of each step before it is trained."""
    mode, _, kind = how.partition(" ")
    placement = placement_of(kind, CASE) if kind else Placement()
    slots = fitting_slots(CASE, world.size, placement)
    settings = CachedSettings(mode, slots, 3, 2, placement=placement)
    made = make_mode(world, CASE, settings)
    train_step = made.train_step

    def trained(step: Step, asks: int = 0) -> StepResult:
        before(step.batch.index)
        return train_step(step, asks)

    made.train_step = trained
    keys = {"trainer__steps": STEPS, "trainer__checkpoint_every": 1} | keys
    keys = {"trainer__keep_checkpoints": 99, "optim__name": "adam"} | keys
    keys |= {"trainer__dtype": "float32", "parallel__mode": mode}
    done = Run(toy_config(**keys), world, folder, Source(CASE), CASE.tables, made)
    return done.go(lambda step: (CASE.lr, CASE.lr)).summary


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("checkpoints/step_*"))


def at(folder: Path, step: int) -> Path:
    return folder / f"checkpoints/step_{step:08d}"


def of_every_step(world: World) -> list[dict[str, Any]]:
    """The state after each step of a run that has all rows on the device."""
    mode = make_mode(world, CASE, CachedSettings("resident"))
    batches, found = (CASE.batch(step, world.rank, world.size) for step in range(STEPS)), []
    for step in mode.stream(batches):
        mode.train_step(step)
        found.append({name: value.clone() for name, value in mode.state_dict().items()})
    mode.close()
    return found


def slow_run(rank: int, size: int, home: str, nodes: tuple[int, ...], how: str) -> dict:
    """A run beside each of whose checkpoints steps are trained, and what they have to be."""
    world, read = open_nodes(rank, nodes), BlockSavePlanner.resolve_data
    writer.BLOCK_BYTES, permits = 60 * 8 * 4, threading.Semaphore(0)

    def slowly(own: BlockSavePlanner, item: Any) -> Any:
        rows = isinstance(own.state_dict[item.index.fqn], ChangedRows)
        if rows and threading.current_thread().name == "distcache-checkpoint":
            permits.acquire(timeout=1)
        return read(own, item)

    def two_blocks(step: int) -> None:
        permits.release(2 if step < STEPS - 1 else 10_000)
        wait_for_writing(step, 0.1)

    BlockSavePlanner.resolve_data = slowly
    found = run(world, Path(home), how, two_blocks, trainer__checkpoint_whole_every=4)
    states = of_every_step(world)
    if world.is_first:
        torch.save(states, Path(home, "states"))
    close_world(world)
    return found


@pytest.mark.parametrize(
    ("nodes", "how"),
    [
        ((1,), "data"),
        ((2,), "data mixed"),
        ((1, 1), "data sharded"),
        pytest.param((2,), "host", marks=pytest.mark.slow),
        pytest.param((3,), "data home", marks=pytest.mark.slow),
        pytest.param((1, 2), "host", marks=pytest.mark.slow),
    ],
)
def test_each_is_what_a_whole_one_is_while_rows_leave_the_cache(tmp_path, nodes, how) -> None:
    summary = run_ranks(slow_run, sum(nodes), str(tmp_path), nodes, how)[0]
    assert summary["rows_written_back"] > 2 * (summary["cache_rows"] or 100)
    made, states, sizes = steps(tmp_path), torch.load(tmp_path / "states"), {True: [], False: []}
    for number, step in enumerate(made):
        folder, want = at(tmp_path, step), states[step - 1]
        manifest, values = Manifest.read(folder), checkpoints.tensors(folder)
        assert (manifest.base is None) == (number % 4 == 0)
        assert values.keys() == want.keys() and len(values) > 3 * len(CASE.tables)
        for name, value in want.items():
            assert torch.equal(values[name], value), (step, name)
        sizes[manifest.base is None].append(manifest.nbytes)
        if manifest.base is not None:
            own = FileSystemReader(folder).read_metadata().state_dict_metadata.keys()
            assert {"changed.tables.e.exp_avg", "tables.d.weight"} <= own
            assert not {"tables.e.exp_avg", "changed.tables.d.weight"} & own
    assert len(sizes[False]) >= 1 and max(sizes[False]) < 0.7 * min(sizes[True])


# --- files, which a run of twelve steps left: whole after 2 and 8 steps, and 4, 6, 10, 12 ---------

TWELVE = {"trainer__checkpoint_every": 2, "trainer__checkpoint_whole_every": 3}


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    run(world, folder, trainer__steps=12, **TWELVE)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def flip(folder: Path) -> None:
    """Damage the blocks of all tables, and no length."""
    (path,) = folder.glob("*.distcp")
    data = bytearray(path.read_bytes())
    for place in range(0, len(data), 50):
        data[place] ^= 1
    path.write_bytes(data)


def take_another(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(at(folder.parents[1], 2), folder)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (shutil.rmtree, "there is no .*step_00000008"),
        (flip, r"step_00000008 is damaged: __0_0\.distcp"),
        (take_another, "step_00000008 is another checkpoint"),
    ],
)
def test_without_the_one_that_it_rests_on_the_newest_before_is_gone_on_with(
    world, copy, made, tmp_path, caplog, harm, said
) -> None:
    whole = run(world, tmp_path / "whole", trainer__steps=14, run__save=False)
    harm(at(copy, 8))
    caplog.set_level(logging.INFO, "distcache")
    with pytest.raises(DataError, match=said):
        run(world, tmp_path / "own", trainer__steps=14, trainer__resume=str(at(copy, 12)))
    found = run(world, copy, trainer__steps=14, trainer__resume="auto", **TWELVE)
    assert found["state_digest"] == whole["state_digest"]
    passed = [line for line in caplog.messages if line.startswith("passed over")]
    assert len(passed) >= 2 and all(re.search(said, line) for line in passed)
    if harm is not take_another:  # which has its own steps once more
        assert "read step 6 from" in caplog.text
        assert rests_on(at(copy, 6)) == at(copy, 2) and rests_on(at(copy, 8)) is None


def test_what_others_read_of_it_is_the_whole(made: Path, tmp_path: Path) -> None:
    for step in (2, 12):
        want, found = checkpoints.tensors(at(made, step)), checkpoint_values(at(made, step))
        assert found.keys() == {name for name, value in want.items() if value.dim()}
        for name, value in found.items():
            parts = [
                value.block(row, min(row + 7, value.shape[0]))
                for row in range(0, value.shape[0], 7)
            ]
            assert torch.equal(torch.cat(parts), want[name]), name
    assert export.main([f"resume={made}", f"output={tmp_path}"]) == 0
    tables = read_safetensors(tmp_path)
    for spec in CASE.tables:
        found = tables[f"{spec.name}.weight"].block(0, spec.rows)
        assert torch.equal(found, want[f"tables.{spec.name}.weight"])


def test_rows_since_the_one_it_rests_on_are_exported_without_reading_that(
    copy: Path, tmp_path: Path
) -> None:
    own, old = (checkpoints.tensors(at(copy, step)) for step in (12, 8))
    (path,) = at(copy, 8).glob("*.distcp")
    data = path.read_bytes()

    def exported(since: int, name: str) -> tuple[list[int], torch.Tensor]:
        words = [f"resume={at(copy, 12)}", f"since={at(copy, since)}", "format=parquet"]
        assert export.main([*words, f"tables={name}", f"output={tmp_path}"]) == 0
        found = parquet.read_table(tmp_path / f"{name}.parquet").to_pydict()
        return found["id"], torch.tensor(found["vector"])

    flip(at(copy, 8))
    for name in "ae":
        ids, vectors = exported(8, name)
        new, was = (values[f"tables.{name}.weight"] for values in (own, old))
        differ = (new != was).any(1).nonzero().flatten().tolist()
        assert set(differ) <= set(ids) and ids == sorted(set(ids)) and len(ids) < len(new)
        assert torch.equal(vectors, new[ids])
    path.write_bytes(data)
    assert exported(8, "d")[0] == [0]  # which both have whole
    assert set(exported(10, "e")[0]) <= set(ids)


def test_what_the_command_says_of_it(copy: Path, capsys) -> None:
    def said(*words: str, code: int = 0) -> str:
        assert entry.main(list(words)) == code
        return "".join(capsys.readouterr())

    shown = said(f"show={at(copy, 12)}")
    assert "folder: step_00000008" in shown and "tables.e.weight [900, 8]" in shown
    assert re.search(r"tables\.e\.weight .* \d+ rows here\n", shown)
    assert "tables.d.weight [1, 8] torch.float32\n" in shown
    text = said(f"verify={at(copy, 12)}")
    assert text.count("is intact") == 2 and f"rests on {at(copy, 8)}" in text
    flip(at(copy, 8))
    text = said(f"verify={at(copy, 12)}", code=1)
    assert text.count("is intact") == 1 and "step_00000008 is damaged" in text
    assert said(f"verify={copy}", code=1).count("is intact") == 5


@pytest.mark.parametrize(
    ("newest", "best", "left"),
    [
        (1, None, [8, 12]),
        (2, None, [8, 10, 12]),
        (1, 4, [2, 4, 8, 12]),
        (9, None, [2, 4, 6, 8, 10, 12]),
    ],
)
def test_nothing_is_removed_on_which_one_rests_that_is_kept(
    copy: Path, monkeypatch, newest: int, best: int | None, left: list[int]
) -> None:
    monkeypatch.setattr(saver, "best_of", lambda *_: (0.0, best and at(copy, best)))
    saver.prune(copy / "checkpoints", Keeping(newest=newest))
    assert steps(copy) == left


def test_what_nobody_can_read_does_not_count_as_kept(copy: Path) -> None:
    (at(copy, 8) / MANIFEST).unlink()
    saver.prune(copy / "checkpoints", Keeping(newest=1))
    assert steps(copy) == [2, 6, 8, 10, 12]  # the last one that can be read, and what is newer
    saver.prune(copy / "checkpoints", Keeping(newest=3))
    assert steps(copy) == [2, 6, 8, 10, 12]


def test_tables_of_which_nothing_changed_have_nothing(world: World) -> None:
    mode = make_mode(world, CASE, CachedSettings("data", fitting_slots(CASE, 1, Placement()), 3, 2))
    mode.flush()
    number = mode.mark()
    assert not [name for name in mode.state_dict(number) if "tables." in name]
    assert [name for name in mode.state_dict() if "tables." in name]
    parts = [(0, slice(0, 8), torch.ones(CASE.tables[0].rows, 8))]
    mode.tables.full_tables.replace(parts, is_state=True)
    assert {name for name in mode.state_dict(number) if "tables." in name} == {
        f"tables.a.{name}" for name in ("weight", "exp_avg", "exp_avg_sq")
    }
    mode.close()
