"""Checkpoints with correct checksums and wrong content: every command refuses them by name."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import environment, run
from torch.distributed.checkpoint import filesystem, metadata

from distcache import export
from distcache.checkpoint import __main__ as checkpoint

SETTINGS = (
    *("data.table_rows=[50,20]", "data.global_batch_size=16", "trainer.device=cpu"),
    *("model.embedding_dim=4", "model.dense_arch=[4]", "model.over_arch=[4,1]"),
    *("trainer.eval_steps=1", "trainer.checkpoint_every=2", "trainer.checkpoint_whole_every=3"),
    "trainer.keep_checkpoints=5",
)


def command(*words: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of a command of the package."""
    options = {"capture_output": True, "text": True, "timeout": 60}
    line = [sys.executable, "-m", *words]
    done = run(line, cwd=folder, env=environment(), **options)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run with a whole checkpoint at step 2 and one at step 4 that rests on it."""
    folder = tmp_path_factory.mktemp("trained")
    words = ("distcache.train", *SETTINGS, "trainer.steps=4", "run.dir=run")
    code, output = command(*words, folder=folder)
    assert code == 0, output
    return folder / "run"


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """The newest checkpoint of a copy of the run."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run/checkpoints/step_00000004"


def sign(folder: Path, body: dict[str, Any]) -> None:
    """Write a manifest with its checksum."""
    checksum = f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
    (folder / "manifest.json").write_text(json.dumps({"crc32": checksum, "checkpoint": body}))


def body_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())["checkpoint"]


def plant(folder: Path, data: bytes) -> None:
    """Put another list of values in place of a checkpoint's, with its checksum."""
    (folder / ".metadata").write_bytes(data)
    body = body_of(folder)
    body["files"][".metadata"] = [[len(data), zlib.crc32(data)]]
    sign(folder, body)


def name_in_metadata(folder: Path, name: str) -> None:
    """Let the list of values say that all blocks lie in the file `name`."""
    values = pickle.loads((folder / ".metadata").read_bytes())
    for info in values.storage_data.values():
        info.relative_path = name
    plant(folder, pickle.dumps(values))


def fifo_for(name: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return replace


def folder_for(name: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return replace


def list_a_fifo(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    name_in_metadata(folder, "pipe")


def list_a_folder(folder: Path) -> None:
    (folder / "there").mkdir()
    name_in_metadata(folder, "there")


def list_a_file_outside(folder: Path) -> None:
    name_in_metadata(folder, "../../config.yaml")


BASE = "../step_00000002/manifest.json"
NOT_FILES = {
    "listed fifo": (list_a_fifo, "pipe (of"),
    "listed folder": (list_a_folder, "there (of"),
    "listed outside": (list_a_file_outside, "config.yaml (of"),
    "fifo as the base's manifest": (fifo_for(BASE), "step_00000002/manifest.json cannot be read"),
    "folder as the base's manifest": (folder_for(BASE), "step_00000002/manifest.json cannot"),
    "fifo as blocks": (fifo_for("__0_0.distcp"), "__0_0.distcp (of"),
    "folder as blocks": (folder_for("__0_0.distcp"), "__0_0.distcp (of"),
    "folder as a list": (folder_for(".metadata"), ".metadata (of"),
}


@pytest.mark.parametrize("name", ["train", "evaluate", "export", "checkpoint"])
@pytest.mark.parametrize(("harm", "words"), NOT_FILES.values(), ids=NOT_FILES)
def test_what_is_no_file_is_refused_without_waiting(copy, tmp_path, name, harm, words):
    harm(copy)
    code, output = command(*COMMANDS[name](copy), folder=tmp_path)
    assert code == 1 and "Traceback" not in output and words in output, output


COMMANDS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "train": lambda folder: (
        *("distcache.train", *SETTINGS, "trainer.steps=6", "run.dir=new"),
        f"trainer.resume={folder}",
    ),
    "evaluate": lambda folder: ("distcache.evaluate", f"resume={folder}"),
    "export": lambda folder: ("distcache.export", f"resume={folder}", "output=tables"),
    "checkpoint": lambda folder: ("distcache.checkpoint", f"verify={folder}"),
}


def test_a_fifo_as_a_file_of_tables_is_refused_without_waiting(tmp_path):
    (tmp_path / "tables").mkdir()
    os.mkfifo(tmp_path / "tables/t.safetensors")
    words = (*SETTINGS, "trainer.steps=1", "run.dir=new", "trainer.init_from=tables")
    code, output = command("distcache.train", *words, folder=tmp_path)
    assert code == 1 and "t.safetensors is no whole safetensors file" in output


def words_for(main: Callable[..., int], folder: Path, output: Path) -> list[str]:
    if main is checkpoint.main:
        return [f"verify={folder}"]
    return [f"resume={folder}", f"output={output}/tables"]


# -----------------------------------------------------------------------------
# BUILD sets attributes of what a pickle has on its stack.

INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
MEMORY = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
ATTRIBUTE = b"}X\x06\x00\x00\x00hackedI1\ns"
TARGETS = {
    "class": (INDEX, b"N" + ATTRIBUTE + b"\x86b", metadata.MetadataIndex),
    "enum": (MEMORY, b"N" + ATTRIBUTE + b"\x86b", metadata._MEM_FORMAT_ENCODING),
    "member of an enum": (
        *(MEMORY + b"I0\n\x85R", ATTRIBUTE + b"b"),
        metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
    ),
    "function": (
        *(b"ctorch.serialization\n_get_layout\n", ATTRIBUTE + b"b"),
        torch.serialization._get_layout,
    ),
}


@pytest.mark.parametrize(("target", "state", "owner"), TARGETS.values(), ids=TARGETS)
def test_a_list_of_values_sets_no_attribute_of_what_the_process_has(
    copy, tmp_path, capsys, target, state, owner
):
    plant(copy, target + state + b"0" + (copy / ".metadata").read_bytes())
    try:
        assert export.main([f"resume={copy}", f"output={tmp_path}/tables"]) == 1
        assert checkpoint.main([f"verify={copy}"]) == 1
        assert not hasattr(owner, "hacked")
    finally:
        if "hacked" in vars(owner):
            delattr(owner, "hacked")
    output = "".join(capsys.readouterr())
    assert output.count(".metadata is no list of values (it sets attributes of") == 2


@pytest.mark.parametrize("name", ["__setstate__", "__class__"])
def test_a_list_of_values_gives_its_records_no_special_attribute(copy, capsys, name):
    values = pickle.loads((copy / ".metadata").read_bytes())
    info = next(iter(values.storage_data.values()))
    info.__dict__[name] = 1
    plant(copy, pickle.dumps(values))
    assert checkpoint.main([f"verify={copy}"]) == 1
    assert "sets other attributes of a _StorageInfo" in "".join(capsys.readouterr())


def lose_a_place(values: metadata.Metadata) -> None:
    values.storage_data.popitem()


def make_a_length_text(values: metadata.Metadata) -> None:
    next(iter(values.storage_data.values())).length = "1"


def make_values_a_list(values: metadata.Metadata) -> None:
    values.state_dict_metadata = [1]


def make_a_value_a_place(values: metadata.Metadata) -> None:
    values.state_dict_metadata["extra"] = filesystem._StorageInfo("a", 0, 1)


def make_offsets_shorter(values: metadata.Metadata) -> None:
    values.state_dict_metadata["tables.t_cat_0.weight"].size = torch.Size([50])


CHANGES = [
    *(lose_a_place, make_a_length_text, make_values_a_list, make_a_value_a_place),
    make_offsets_shorter,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("main", [checkpoint.main, export.main], ids=["verify", "export"])
def test_a_list_of_values_has_the_structure_of_one(copy, tmp_path, capsys, main, change):
    folder = copy.with_name("step_00000002")
    values = pickle.loads((folder / ".metadata").read_bytes())
    change(values)
    plant(folder, pickle.dumps(values))
    assert main(words_for(main, folder, tmp_path)) == 1
    output = "".join(capsys.readouterr())
    assert "Traceback" not in output and f"{folder}/.metadata is no list of values" in output


# -----------------------------------------------------------------------------
# Manifests.


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        *parents, key = path
        for parent in parents:
            header = header[parent]
        del header[key]

    return change


def with_value(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        *parents, key = path
        for parent in parents:
            header = header[parent]
        header[key] = value

    return change


REQUIRED = ["format", "step", "run", "loss_digest"]
HEADERS = {f"no {key}": (without(key), key) for key in REQUIRED}
HEADERS |= {
    f"no run.{key}": (without("run", key), f"run.{key}")
    for key in ("mode", "world_size", "dtype", "optimizer", "seed", "tables", "data")
}
HEADERS |= {
    f"{'.'.join(path)}={value!r}"[:40]: (with_value(value, *path), ".".join(path))
    for value, *path in (
        *(("four", "step"), (-1, "step"), (True, "step"), (None, "step"), (10**30, "step")),
        *(("3", "format"), (None, "format"), ("zz", "loss_digest")),
        *(([], "run"), ("all", "run", "tables"), ([["t", "9", 4]], "run", "tables")),
        *(([1], "run", "data"), ("one", "run", "world_size"), (1, "metrics"), (1, "phase")),
        *(({}, "phase"), (5, "base"), ({"folder": "step_00000002"}, "base")),
        *(({"like": {}}, "loop"), (7, "loop")),
    )
}


@pytest.mark.parametrize(("change", "key"), HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("main", [checkpoint.main, export.main], ids=["verify", "export"])
def test_a_header_that_is_invalid_is_refused_by_its_key(copy, tmp_path, capsys, main, change, key):
    body = body_of(copy)
    change(body["header"])
    sign(copy, body)
    assert main(words_for(main, copy, tmp_path)) == 1
    output = "".join(capsys.readouterr())
    assert "Traceback" not in output and str(copy) in output
    assert f"'{key}" in output or (key == "base" and "rests on" in output), output
    assert not (tmp_path / "tables").exists()


@pytest.mark.parametrize("marks", ["text", [["1", 2]], [[5, 1], [3, 1]], [[1]], [[-1, 0]], [1]])
def test_marks_of_blocks_that_are_invalid_are_refused_by_their_file(copy, capsys, marks):
    body = body_of(copy)
    body["files"]["__0_0.distcp"] = marks
    sign(copy, body)
    assert checkpoint.main([f"verify={copy}"]) == 1
    assert "the blocks of '__0_0.distcp' have no" in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", ["train", "evaluate", "export", "checkpoint"])
def test_another_format_is_refused_by_every_command(copy, tmp_path, name):
    body = body_of(copy)
    body["header"]["format"] = 4
    sign(copy, body)
    code, output = command(*COMMANDS[name](copy), folder=tmp_path)
    assert code == 1 and "Traceback" not in output
    assert f"{copy} has checkpoint format 4, and this version of distcache reads format 3" in output
    assert "trainer.init_from" in output


def test_an_older_format_is_refused_with_its_number(copy, capsys):
    body = body_of(copy)
    body["header"]["format"] = 1
    sign(copy, body)
    assert checkpoint.main([f"verify={copy}"]) == 1
    (copy / "manifest.json").unlink()
    (copy / "checksums.json").write_text("{}")  # what format 2 has in its place
    assert checkpoint.main([f"verify={copy}"]) == 1
    output = "".join(capsys.readouterr())
    for version in (1, 2):
        assert f"{copy} has checkpoint format {version}, and this version of distcache" in output


@pytest.mark.parametrize(
    "change", [without("run", "tables"), with_value("four", "step"), with_value({}, "phase")]
)
def test_a_run_does_not_start_from_an_invalid_header(copy, tmp_path, change):
    body = body_of(copy)
    change(body["header"])
    sign(copy, body)
    code, output = command(*COMMANDS["train"](copy), folder=tmp_path)
    assert code == 1 and "Traceback" not in output and "the manifest of the checkpoint" in output
