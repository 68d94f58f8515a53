"""Checkpoints: complete or not there, of this run or refused, each value once."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import re
import shutil
import threading
import time
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import Payload, Plain
from ranks import run_ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex
from toy_parallel import TABLES

from distcache.checkpoint import writer
from distcache.checkpoint.manifest import Manifest
from distcache.checkpoint.reader import BlockReader
from distcache.checkpoint.state import LossChain, TrainerState, chain_loss
from distcache.comm.world import close_world, open_world
from distcache.errors import ConfigError, DataError, DistcacheError

IDENTITY = dict(
    mode="data",
    world_size=1,
    dtype="float64",
    optimizer="adagrad",
    seed=0,
    model={},
    global_batch_size=16,
    steps_per_epoch=6,
    tables=tuple((table.name, table.rows, table.dim) for table in TABLES),
    data=(("data.negatives", "4"), ("data.path", "abc")),
)
STATE, STEP = TrainerState(8, b"\1" * 32), "checkpoints/step_00000008"


def save(path: Path, world, values: dict[str, Any], step: int = 8, world_size: int = 1) -> None:
    identity, state = IDENTITY | {"world_size": world_size}, replace(STATE, step=step)
    checkpoints.save(path, Plain(values), identity, state, world)


def resumed(path: Path, world, mode, /, same_data=True, **changes) -> TrainerState:
    return checkpoints.resume(path, mode, IDENTITY | changes, world, same_data)


@pytest.fixture
def saved(world, tmp_path) -> Path:
    """A checkpoint of ones."""
    save(tmp_path / STEP, world, {"rows": torch.ones(3, 2)})
    return tmp_path / STEP


@pytest.fixture
def fives() -> Plain:
    """A mode whose table holds fives alone, until something is loaded."""
    return Plain({"rows": torch.full((3, 2), 5.0)})


@pytest.mark.parametrize(("block_bytes", "blocks"), [(1, 7), (24, None), (40, 3), (1 << 20, 1)])
def test_blocks_give_the_same_values_without_a_warning(
    world, tmp_path, monkeypatch, caplog, block_bytes, blocks
):
    monkeypatch.setattr(writer, "BLOCK_BYTES", block_bytes)
    caplog.set_level(logging.WARNING)
    tensors = {"view": torch.arange(70.0).view(7, 10)[:, 2:5], "vector": torch.arange(5)}
    tensors |= {"none": torch.zeros(1, 0), "scalar": torch.tensor(3)}
    mode = Plain({name: torch.zeros_like(value) for name, value in tensors.items()} | {"c": {}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / STEP, world, tensors | {"c": {"n": [4, "x"]}})
        assert resumed(tmp_path, world, mode) == STATE
    for name, value in tensors.items():
        assert torch.equal(mode.values[name], value), name
    assert mode.values["c"] == {"n": [4, "x"]} and caplog.text == ""
    stored = FileSystemReader(tmp_path / STEP).read_metadata().state_dict_metadata["view"]
    assert blocks in (None, len(stored.chunks))
    assert torch.equal(checkpoints.tensors(tmp_path / STEP)["view"], tensors["view"])
    modes = {entry.name: entry.stat().st_mode & 0o777 for entry in tmp_path.rglob("*")}
    wide = {Path(STEP).name: 0o700, "checkpoints": 0o700}
    assert modes == {name: wide.get(name, 0o600) for name in modes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": (("data.negatives", "4"), ("data.path", "abd"))}, "data.path was abc, is abd"),
        ({"data": (("data.path", "abc"),)}, "data.negatives was 4, is not set"),
        ({"data": (*IDENTITY["data"], ("data.zipf", "1.1"))}, "data.zipf was not set, is 1.1"),
        ({"steps_per_epoch": None}, r"steps of an epoch \(.*\) was 6, is None"),
    ],
)
def test_other_data_are_refused_unless_they_are_meant(world, saved, fives, caplog, change, message):
    with pytest.raises(ConfigError, match=f"other data: {message}.*set trainer.resume_data=any"):
        resumed(saved, world, fives, **change)
    assert (fives.values["rows"] == 5.0).all()
    with caplog.at_level(logging.WARNING, logger="distcache"):
        assert resumed(saved, world, fives, same_data=False, **change) == STATE
    assert re.search(f"resuming on other data .*: {message}", caplog.text)
    assert (fives.values["rows"] == 1.0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, r"trainer\.dtype was float64, is float32"),
        ({"optimizer": "sgd"}, "optim was adagrad, is sgd"),
        ({"seed": 1}, r"trainer\.seed was 0, is 1"),
        ({"global_batch_size": 32}, r"data\.global_batch_size was 16, is 32"),
        ({"tables": IDENTITY["tables"][:1]}, "number of tables was 2, is 1"),
        (
            {"tables": (IDENTITY["tables"][0], ("t_cat_1", 8, 4))},
            "7 rows x 4, is t_cat_1 with 8 rows",
        ),
        ({"mode": "resident"}, None),  # modes of one format read one another's
        ({"mode": "host"}, None),
        ({"world_size": 2, "mode": "hybrid"}, None),
    ],
)
def test_another_run_is_refused_before_anything_changes(world, saved, fives, change, message):
    if message is None:
        assert resumed(saved, world, fives, **change) == STATE
        return
    with pytest.raises(ConfigError, match=message):
        resumed(saved, world, fives, **change)
    assert (fives.values["rows"] == 5.0).all()


@pytest.mark.parametrize("modes", [("data", "hybrid"), ("hybrid", "data"), ("hybrid", "hybrid")])
def test_an_optimizer_that_hybrid_has_otherwise_is_refused_by_name(world, tmp_path, fives, modes):
    adam = IDENTITY | {"optimizer": "adam", "mode": modes[0]}
    checkpoints.save(tmp_path / STEP, fives, adam, STATE, world)
    message = "optim=adam has another .*only adagrad, rowwise_adagrad, sgd"
    with pytest.raises(ConfigError, match=message):
        resumed(tmp_path, world, fives, optimizer="adam", mode=modes[1], world_size=2)
    assert resumed(tmp_path, world, fives, optimizer="adam", mode=modes[0]) == STATE


@pytest.mark.parametrize(
    ("given", "asked", "message"),
    [({"a": 2}, {"a": 2, "b": 2}, "b"), ({"a": 2, "b": 2}, {"a": 2}, "does not have: b"),
     ({"a": 2}, {"a": 3}, "[Ss]ize")],
)  # fmt: skip
def test_other_values_are_refused(world, tmp_path, given, asked, message):
    save(tmp_path / STEP, world, {name: torch.ones(n) for name, n in given.items()})
    with pytest.raises(DistcacheError, match=message):
        resumed(tmp_path, world, Plain({name: torch.ones(n) for name, n in asked.items()}))


def test_no_checkpoint_says_what_is_there(world, tmp_path, saved, fives):
    (saved / "manifest.json").unlink()
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"found: checkpoints, summary\.json"):
        resumed(tmp_path, world, fives)
    with pytest.raises(ConfigError, match="no such folder"):
        resumed(tmp_path / "other", world, fives)
    with pytest.raises(DataError, match="never finished"):
        resumed(saved, world, fives)


def test_a_failed_save_keeps_the_older_one_and_leaves_nothing(world, tmp_path, saved, fives):
    broken = {"rows": torch.zeros(3, 2), "b": torch.zeros(2, device="meta")}
    with pytest.raises(DistcacheError, match="could not be written: rank 0"):
        save(saved.with_name("step_00000009"), world, broken, step=9)
    assert list(saved.parent.iterdir()) == [saved]
    assert resumed(tmp_path, world, fives).step == 8 and (fives.values["rows"] == 1).all()
    save(saved.with_name("step_00000009"), world, fives.values, step=9)
    assert resumed(tmp_path, world, fives).step == 9


def test_a_disk_without_room_is_told_before_anything_is_written(world, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(DistcacheError, match=r"100 bytes free .* takes 160 bytes: make room"):
        save(tmp_path / STEP, world, {"rows": torch.ones(5, 4), "a": torch.ones(10).double()})


def _flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "flipped": _flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"0"),
    "missing": Path.unlink,
    "linked": lambda path: (
        path.rename(path.parent.parent / "away") and path.symlink_to(path.parent.parent / "away")
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_by_name(world, tmp_path, damage):
    folder, values = tmp_path / "whole", {"t": torch.arange(500.0), "n": {"text": "abc"}}
    save(folder, world, values)
    mode = Plain({"t": torch.zeros(500), "n": None})
    assert resumed(folder, world, mode) == STATE and mode.values["n"] == values["n"]
    assert torch.equal(mode.values["t"], values["t"])
    for name in sorted(entry.name for entry in folder.iterdir()):
        copy = tmp_path / damage / name / "step_00000008"
        shutil.copytree(folder, copy)
        DAMAGE[damage](copy / name)
        if name == "manifest.json" and damage in ("linked", "missing"):
            continue  # the checkpoint is then not finished
        if name == "manifest.json" and damage == "longer":
            (copy / name).write_text((copy / name).read_text() + "x")
        with pytest.raises(DataError, match=re.escape(str(copy))) as caught:
            resumed(copy, world, mode)
        assert name in str(caught.value)


def test_values_are_read_where_they_go_and_no_byte_of_a_block_may_differ(world, tmp_path):
    want = torch.arange(60.0).view(6, 10)
    save(tmp_path / STEP, world, {"t": want})
    file = tmp_path / STEP / "__0_0.distcp"
    reader = BlockReader(tmp_path / STEP, Manifest.read(tmp_path / STEP))
    block = MetadataIndex("t", torch.Size([0, 0]))
    for into in (torch.zeros(6, 10), torch.zeros(10, 6).t(), torch.zeros(6, 10).double()):
        mode, alike = Plain({"t": into}), into.is_contiguous() and into.dtype == want.dtype
        assert resumed(tmp_path, world, mode) == STATE
        assert torch.equal(mode.values["t"], want.to(into.dtype))
        assert (reader.load_block(block, into) is into) == alike
    for at in range(0, file.stat().st_size, 5):
        _flip(file, at)
        with pytest.raises(DataError, match=file.name):
            reader.load_block(block, torch.zeros(6, 10))
        _flip(file, at)
    assert torch.equal(reader.load_block(block), want)


def test_each_block_is_read_once_and_after_a_damaged_one_no_more_are(world, tmp_path, monkeypatch):
    want = {f"t{at:02}": torch.full((100,), float(at)) for at in range(16)}
    save(tmp_path / STEP, world, want)
    read, is_over, seen = BlockReader._read_block, threading.Event(), list[str]()

    def recorded(reader: BlockReader, parts: Any) -> None:
        seen.append(parts[0][0].storage_index.fqn)
        try:
            read(reader, parts)
        except DataError:
            is_over.set()
            raise
        if is_damaged:  # the other threads have read a block each
            assert is_over.wait(10)
            time.sleep(0.5)

    monkeypatch.setattr(BlockReader, "_read_block", recorded)
    is_damaged, mode = False, Plain({name: torch.zeros(100) for name in want})
    assert resumed(tmp_path, world, mode) == STATE
    assert sorted(seen) == sorted(want)
    assert all(torch.equal(mode.values[name], want[name]) for name in want)
    index = MetadataIndex("t00", torch.Size([0]))
    place = BlockReader(tmp_path / STEP, Manifest.read(tmp_path / STEP))._places[index]
    _flip(tmp_path / STEP / place.relative_path, place.offset + place.length // 2)
    is_damaged = True
    seen.clear()
    with pytest.raises(DataError, match=re.escape(place.relative_path)):
        resumed(tmp_path, world, mode)
    assert "t00" in seen and len(seen) <= 4


def test_a_manifest_of_another_making_is_refused(world, saved, fives):
    path = saved / "manifest.json"
    text = path.read_text()
    header = Manifest.read(saved).header
    files = Manifest.read(saved).files
    for damaged in ("", "{}x", "[1]", text[:-9], text.replace("8", "9"), '{"crc32": 1}'):
        path.write_text(damaged)
        with pytest.raises(DataError, match=re.escape(path.name)):
            resumed(saved, world, fives)
    (saved.parent / "outside").write_bytes(b"")
    for name in ("../outside", "/etc/passwd", "..", "a/b"):
        path.unlink()
        Manifest(header, files | {name: [(0, 0)]}).write(saved)
        with pytest.raises(DataError, match="outside of it"):
            resumed(saved, world, fives)


def plant(saved: Path, data: bytes) -> None:
    """Put another list of values in place of a checkpoint's, with its checksum."""
    found = Manifest.read(saved)
    (saved / ".metadata").write_bytes(data)
    (saved / "manifest.json").unlink()
    own = {".metadata": [(len(data), zlib.crc32(data))]}
    Manifest(found.header, found.files | own).write(saved)


class ByGetattr(pickle.Pickler):
    """Pickles what `owners` names as Python 3.11.2 does a member of an enum."""

    def __init__(self, file: io.BytesIO, owners: dict[Any, tuple[Any, Any]] | None = None) -> None:
        super().__init__(file)
        self._owners = owners

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _MEM_FORMAT_ENCODING):
            return NotImplemented
        return getattr, (self._owners or {value: (type(value), value.name)})[value]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (None, None),
        ((_MEM_FORMAT_ENCODING, "mro"), "'mro' of <enum '_MEM_FORMAT_ENCODING'>"),
        ((_MEM_FORMAT_ENCODING, "__class__"), "'__class__' of <enum"),
        ((_MEM_FORMAT_ENCODING, 1), "1 of <enum"),
        ((MetadataIndex, "__init__"), "'__init__' of <class"),
    ],
)
def test_members_of_an_enum_are_read_however_python_pickles_them(
    world, saved, fives, asked, said
) -> None:
    """By `getattr`, which is given nothing else."""
    file, member = io.BytesIO(), _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    values = pickle.loads((saved / ".metadata").read_bytes())
    ByGetattr(file, None if asked is None else {member: asked}).dump(values)
    assert b"getattr" in file.getvalue()
    plant(saved, file.getvalue())
    if said is None:
        resumed(saved, world, fives)
        assert torch.equal(fives.values["rows"], torch.ones(3, 2))
        return
    with pytest.raises(DataError, match=f"asks for {re.escape(said)}"):
        resumed(saved, world, fives)
    assert torch.equal(fives.values["rows"], torch.full((3, 2), 5.0))


@pytest.mark.parametrize("place", ["metadata", "value"])
def test_loading_executes_nothing(world, tmp_path, saved, fives, place):
    mark, name = tmp_path / "executed", ".metadata" if place == "metadata" else "__0_0.distcp"
    if place == "metadata":
        plant(saved, pickle.dumps(Payload(mark)))
    else:
        shutil.rmtree(saved)
        planted = {"rows": torch.ones(3, 2), "n": Payload(mark)}
        checkpoints.save_with_dcp(saved, planted, IDENTITY, STATE)
        fives.values["n"] = 0
    with pytest.raises(DataError, match=f"{re.escape(name)} .*asks for posix.mkdir"):
        resumed(saved, world, fives)
    assert not mark.exists()
    with contextlib.suppress(BaseException):  # CheckpointException is no Exception
        torch.distributed.checkpoint.load({"n": 0}, checkpoint_id=saved)
    assert mark.exists()  # what DCP does


def save_and_load_apart(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Save what all ranks hold; load where only rank 0 asks for the table; a lone failure."""
    world, home, seen = open_world("cpu", timeout_s=60), Path(folder), {}
    table, mine = torch.arange(40_000.0).view(10_000, 4), torch.ones(3)
    writer.BLOCK_BYTES = 20_000
    save(home / STEP, world, {"table": table, "dense": mine}, world_size=2)
    asked = {"dense": torch.zeros(3)} | ({"table": torch.zeros(10_000, 4)} if rank == 0 else {})
    mode = Plain(asked)
    resumed(home, world, mode, world_size=2)
    seen["dense"] = mode.values["dense"].tolist()
    seen["equal"] = "table" not in mode.values or torch.equal(mode.values["table"], table)
    if rank == 0:
        _flip(home / STEP / "__1_0.distcp")
        (home / "file").write_text("")
    broken = {"dense": mine} | ({"broken": torch.ones(1, device="meta")} if rank == 1 else {})
    for name, call in {
        "damaged": lambda: resumed(home, world, mode, world_size=2),
        "error": lambda: save(home / "step_9", world, broken, world_size=2),
        "first": lambda: save(home / "file" / "step_9", world, {}),
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
    assert "__1_0.distcp (of 3 files)" in first["damaged"] == second["damaged"]
    sizes = [os.path.getsize(path) for path in (tmp_path / STEP).glob("*.distcp")]
    assert len(sizes) == 2
    assert 160_000 < sum(sizes) < 260_000  # one copy of 160 kB and the headers of nine blocks
    assert min(sizes) > 60_000
    assert "could not be written: rank 1" in second["error"] == first["error"]
    assert not (tmp_path / "step_9").exists()
    assert first["first"].startswith("DistcacheError") and "rank 0" in second["first"]


def test_a_chain_of_losses_is_the_same_whenever_it_is_looked_at():
    digest, chain = b"begun", LossChain(b"begun")
    for step in range(600):
        digest = chain_loss(digest, step / 7)
        chain.add(step / 7)
        if step in (0, 1, 255, 256, 400):
            assert chain.digest() == digest
    assert chain.digest() == digest == chain.digest()
