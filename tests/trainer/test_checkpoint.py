"""Checkpoints: complete or not there, of this run or refused, each value once."""

from __future__ import annotations

import logging
import os
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.distributed.checkpoint import FileSystemReader
from toy_parallel import TABLES

from distcache.comm.world import close_world, open_world
from distcache.errors import ConfigError, DataError, DistcacheError
from distcache.trainer import checkpoint
from distcache.trainer.checkpoint import BlockSavePlanner, RunIdentity, TrainerState

IDENTITY = RunIdentity(
    mode="data",
    world_size=1,
    dtype="float64",
    optimizer="adagrad",
    seed=0,
    global_batch_size=16,
    steps_per_epoch=6,
    tables=tuple((table.name, table.rows, table.dim) for table in TABLES),
    data=(("data.negatives", "4"), ("data.path", "abc")),
)
STATE = TrainerState(8, b"\1" * 32)


class Plain:
    """A mode as far as checkpoints know one, with any values as its state."""

    def __init__(self, world, values: dict[str, Any]) -> None:
        self.world, self.values = world, values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    blank_state = state_dict

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def save(path: Path, mode, step: int = 8, world_size: int = 1) -> None:
    identity, state = replace(IDENTITY, world_size=world_size), replace(STATE, step=step)
    checkpoint.save(path, mode, identity, state, mode.world)


def resumed(path: Path, mode, /, same_data=True, **changes) -> TrainerState:
    """Compare, then load, as a run does; the state of training."""
    identity = replace(IDENTITY, **changes)
    state = checkpoint.compare(path, identity, mode.world, same_data)
    checkpoint.load(path, mode, identity, mode.world, state)
    return state


@pytest.fixture
def saved(world, tmp_path) -> Path:
    """A checkpoint of ones."""
    save(tmp_path / "model", Plain(world, {"rows": torch.ones(3, 2)}))
    return tmp_path / "model"


@pytest.fixture
def fives(world) -> Plain:
    """A mode whose table holds fives alone, until something is loaded."""
    return Plain(world, {"rows": torch.full((3, 2), 5.0)})


@pytest.mark.parametrize(("block_bytes", "blocks"), [(1, 7), (24, None), (40, 3), (1 << 20, 1)])
def test_blocks_give_the_same_values_without_a_warning(
    world, tmp_path, monkeypatch, caplog, block_bytes, blocks
):
    monkeypatch.setattr(
        checkpoint, "BlockSavePlanner", lambda: BlockSavePlanner(block_bytes=block_bytes)
    )
    caplog.set_level(logging.WARNING)
    tensors = {"view": torch.arange(70.0).view(7, 10)[:, 2:5], "vector": torch.arange(5)}
    tensors |= {"none": torch.zeros(1, 0), "scalar": torch.tensor(3)}
    empty = {name: torch.zeros_like(value) for name, value in tensors.items()}
    mode = Plain(world, empty | {"c": {"n": 0}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / "model", Plain(world, tensors | {"c": {"n": 4}}))
        assert resumed(tmp_path, mode) == STATE
    for name, value in tensors.items():
        assert torch.equal(mode.values[name], value), name
    assert mode.values["c"] == {"n": 4} and caplog.text == ""
    stored = FileSystemReader(tmp_path / "model").read_metadata().state_dict_metadata["view"]
    assert blocks in (None, len(stored.chunks))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": (("data.negatives", "4"), ("data.path", "abd"))}, "data.path was abc, is abd"),
        ({"data": (("data.path", "abc"),)}, "data.negatives was 4, is not set"),
        ({"data": (*IDENTITY.data, ("data.zipf", "1.1"))}, "data.zipf was not set, is 1.1"),
        ({"steps_per_epoch": None}, r"steps of an epoch \(.*\) was 6, is None"),
    ],
)
def test_other_data_are_refused_unless_they_are_meant(saved, fives, caplog, change, message):
    with pytest.raises(ConfigError, match=f"other data: {message}.*set trainer.resume_data=any"):
        resumed(saved, fives, **change)
    assert (fives.values["rows"] == 5.0).all()
    with caplog.at_level(logging.WARNING, logger="distcache"):
        assert resumed(saved, fives, same_data=False, **change) == STATE
    assert re.search(f"resuming on other data .*: {message}", caplog.text)
    assert (fives.values["rows"] == 1.0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 2}, "nproc-per-node was 1, is 2"),
        ({"mode": "hybrid"}, r"parallel\.mode was data, is hybrid"),
        ({"dtype": "float32"}, r"trainer\.dtype was float64, is float32"),
        ({"optimizer": "sgd"}, "optim was adagrad, is sgd"),
        ({"seed": 1}, r"trainer\.seed was 0, is 1"),
        ({"global_batch_size": 32}, r"data\.global_batch_size was 16, is 32"),
        ({"tables": IDENTITY.tables[:1]}, "number of tables was 2, is 1"),
        ({"tables": (IDENTITY.tables[0], ("t_cat_1", 8, 4))}, "7 rows x 4, is t_cat_1 with 8 rows"),
        ({"mode": "resident"}, None),  # modes of one format read one another's
        ({"mode": "host"}, None),
    ],
)
def test_another_run_is_refused_before_anything_changes(saved, fives, change, message):
    if message is None:
        assert resumed(saved, fives, **change) == STATE
        return
    with pytest.raises(ConfigError, match=message):
        resumed(saved, fives, **change)
    assert (fives.values["rows"] == 5.0).all()


@pytest.mark.parametrize(
    ("given", "asked", "message"),
    [({"a": 2}, {"a": 2, "b": 2}, "b"), ({"a": 2, "b": 2}, {"a": 2}, "does not have: b"),
     ({"a": 2}, {"a": 3}, "[Ss]ize")],
)  # fmt: skip
def test_other_values_are_refused(world, tmp_path, given, asked, message):
    save(tmp_path / "model", Plain(world, {name: torch.ones(n) for name, n in given.items()}))
    with pytest.raises(DistcacheError, match=message):
        resumed(tmp_path, Plain(world, {name: torch.ones(n) for name, n in asked.items()}))


def test_no_checkpoint_says_what_is_there(world, tmp_path):
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"found: model\.partial, summary\.json"):
        resumed(tmp_path, Plain(world, {}))
    with pytest.raises(ConfigError, match="no such folder"):
        resumed(tmp_path / "other", Plain(world, {}))


def test_a_failed_save_keeps_the_older_one(world, tmp_path):
    folder = tmp_path / "model"
    save(folder, Plain(world, {"a": torch.ones(2)}))
    broken = Plain(world, {"a": torch.zeros(2), "b": lambda: None})  # cannot be pickled
    with pytest.raises(DistcacheError, match="could not be written: rank 0"):
        save(folder, broken, step=9)
    mode = Plain(world, {"a": torch.zeros(2)})
    assert resumed(tmp_path, mode).step == 8
    assert mode.values["a"].tolist() == [1, 1]
    save(folder, mode, step=9)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert resumed(tmp_path, mode).step == 9


def test_a_swap_cut_short_is_found_and_mended(saved, fives, tmp_path):
    saved.rename(tmp_path / "model.old")
    assert resumed(tmp_path, fives) == resumed(saved, fives) == STATE
    checkpoint.make_room(saved, tmp_path / "model.partial")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_file_is_refused_by_name_before_anything_changes(world, tmp_path, damage):
    folder, values = tmp_path / "model", {"t": torch.arange(500.0), "n": {"text": "abc"}}
    save(folder, Plain(world, values))
    for name in checkpoint.files_of(folder):
        copy = tmp_path / damage / name
        shutil.copytree(folder, copy)
        if damage == "flipped":
            _flip(copy / name)
        elif damage == "cut":
            os.truncate(copy / name, (copy / name).stat().st_size - 1)
        else:
            (copy / name).unlink()
        mode = Plain(world, {"t": torch.zeros(500), "n": {"text": ""}})
        kind = ConfigError if (name, damage) == (".metadata", "missing") else DataError
        with pytest.raises(kind, match=re.escape(str(copy))) as caught:
            resumed(copy, mode)
        assert kind is ConfigError or name in str(caught.value)
        assert not mode.values["t"].any()


def test_checksums_themselves_may_be_damaged_or_not_there(saved, fives, caplog):
    path = saved / checkpoint.CHECKSUMS
    text = path.read_text()
    for damaged in ("", "{}x", "[1]", text[:-9], text.replace("a", "b"), '{".metadata": 3}'):
        path.write_text(damaged)
        with pytest.raises(DataError, match=re.escape(path.name)):
            resumed(saved, fives)
    path.unlink()
    assert resumed(saved, fives) == STATE
    assert caplog.text.count("its files are taken as they are") == 1


def save_and_load_apart(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Save what all ranks hold; load where only rank 0 asks for the table; a lone failure."""
    world, home, seen = open_world("cpu", timeout_s=60), Path(folder), {}
    table, mine = torch.arange(40_000.0).view(10_000, 4), torch.ones(3)
    checkpoint.BlockSavePlanner = lambda: BlockSavePlanner(block_bytes=20_000)
    save(home / "model", Plain(world, {"table": table, "dense": mine}), world_size=2)
    asked = {"dense": torch.zeros(3)} | ({"table": torch.zeros(10_000, 4)} if rank == 0 else {})
    mode = Plain(world, asked)
    resumed(home, mode, world_size=2)
    seen["dense"] = mode.values["dense"].tolist()
    seen["equal"] = "table" not in mode.values or torch.equal(mode.values["table"], table)
    if rank == 0:
        for file in (home / "model").glob("*.distcp"):
            _flip(file)
        (home / "file").write_text("")
    mode.values = {"dense": mine} | ({"broken": lambda: None} if rank == 1 else {})
    for name, call in {
        "damaged": lambda: resumed(home, mode, world_size=2),
        "error": lambda: save(home / "model", mode, world_size=2),
        "first": lambda: save(home / "file" / "model", Plain(world, {})),
    }.items():
        try:
            call()
        except (OSError, DistcacheError) as error:
            seen[name] = f"{type(error).__name__}: {error}"
    close_world(world)
    return seen


def test_two_ranks_share_the_writing_and_need_not_all_read(tmp_path):
    first, second = run_ranks(save_and_load_apart, 2, str(tmp_path))
    assert first["dense"] == second["dense"] == [1, 1, 1]
    assert first["equal"]
    assert first["damaged"] == second["damaged"] and "__1_0.distcp (of 3 files)" in first["damaged"]
    sizes = [os.path.getsize(path) for path in (tmp_path / "model").glob("*.distcp")]
    assert len(sizes) == 2
    assert 160_000 < sum(sizes) < 260_000  # one copy of 160 kB and the headers of nine blocks
    assert min(sizes) > 60_000
    assert "could not be written: rank 1" in second["error"] == first["error"]
    assert first["first"].startswith("FileExistsError")
    assert second["first"].startswith("PeerError: rank 0: FileExistsError")
