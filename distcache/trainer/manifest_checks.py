"""Checks of a checkpoint's manifest and of DCP's list of values, which may come from anybody.

Nothing that these files hold is executed, and whatever their checksums say, their structure is
checked before it is used.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata

FORMAT = 3
"""Version of the layout of a checkpoint. No other version is read."""

# -----------------------------------------------------------------------------
# The header: JSON values of known types.

_Test = Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_hexadecimal(value: Any) -> bool:
    digits = set("0123456789abcdef")
    return _is_text(value) and len(value) % 2 == 0 and set(value) <= digits


def _is_table(value: Any) -> bool:
    if not isinstance(value, list) or len(value) not in (3, 4):
        return False
    name, rows, dim, *dtype = value
    return _is_text(name) and _is_count(rows) and _is_count(dim) and all(map(_is_text, dtype))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_text, value))


def _list_of(test: _Test) -> _Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _optional(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _mapping_of(test: _Test) -> _Test:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


_COUNT = "a whole number of at least 0"
_Schema = Mapping[str, tuple[_Test, str]]

_HEADER: _Schema = {
    "step": (_is_count, _COUNT),
    "metrics": (_optional(_mapping_of(_optional(_is_number))), "a mapping of numbers"),
    "versions": (_optional(_is_mapping), "a mapping"),
    "config": (_optional(_is_mapping), "a mapping"),
}
_RUN_HEADER: _Schema = {
    "loss_digest": (_is_hexadecimal, "hexadecimal text"),
    "phase": (_optional(_is_mapping), "a mapping"),
}
_RUN: _Schema = {
    **dict.fromkeys(("mode", "dtype", "optimizer"), (_is_text, "text")),
    **dict.fromkeys(("world_size", "global_batch_size"), (_is_count, _COUNT)),
    "seed": (_is_int, "a whole number"),
    "model": (_is_mapping, "a mapping"),
    "steps_per_epoch": (_optional(_is_count), _COUNT),
    "tables": (_list_of(_is_table), "a list of [name, rows, width]"),
    "data": (_list_of(_is_pair), "a list of pairs of texts"),
}
_PHASE: _Schema = {
    **dict.fromkeys(("epoch", "hot", "cold", "left", "falls"), (_is_count, _COUNT)),
    **dict.fromkeys(("rate", "until"), (_is_number, "a number")),
    "kind": (("", "hot", "cold").__contains__, "hot, cold or empty"),
    "loss": (_optional(_is_number), "a number"),
    "due": (lambda value: isinstance(value, bool), "true or false"),
}
_LOOP: _Schema = {
    "like": (_mapping_of(_is_text), "a mapping of texts"),
    "ranks": (lambda value: _is_count(value) and value > 0, "a whole number of at least 1"),
}
_BASE: _Schema = dict.fromkeys(("folder", "crc32"), (_is_text, "text"))
_MAY_LACK = {"metrics", "versions", "config"}


def check_header(header: Mapping[str, Any]) -> None:
    """Raise ValueError that names the first key of a manifest's header that is missing or wrong.

    The header is one of a run (`run`) or of a loop (`loop`).
    """
    _check(header, _HEADER, "")
    kind = "loop" if "loop" in header else "run"
    if not isinstance(header.get(kind), dict):
        raise ValueError(f"it lacks a mapping {kind!r}" if kind in header else "it lacks 'run'")
    if kind == "loop":
        _check(header["loop"], _LOOP, "loop.")
    else:
        _check(header, _RUN_HEADER, "")
        _check(header["run"], _RUN, "run.")
    if header.get("phase") is not None:
        _check(header["phase"], _PHASE, "phase.")
        if unknown := sorted(header["phase"].keys() - _PHASE.keys()):
            raise ValueError(f"'phase.{unknown[0]}' is unknown")
    if header.get("base") is not None:
        if not isinstance(header["base"], dict):
            raise ValueError(f"'base' is {_shown(header['base'])}, and must be a mapping")
        _check(header["base"], _BASE, "base.")


def _check(values: Mapping[str, Any], schema: _Schema, prefix: str) -> None:
    for key, (is_good, expected) in schema.items():
        if key not in values:
            if key not in _MAY_LACK:
                raise ValueError(f"it lacks '{prefix}{key}'")
        elif not is_good(values[key]):
            raise ValueError(f"'{prefix}{key}' is {_shown(values[key])}, and must be {expected}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def check_files(files: Any) -> dict[str, list[tuple[int, int]]]:
    """The marks of each file's blocks, by name: (end in bytes, CRC-32), in order.

    Raises ValueError that names a file whose marks are wrong.
    """
    if not isinstance(files, dict):
        raise ValueError(f"'files' is {_shown(files)}, and must be a mapping")
    marks_by_name: dict[str, list[tuple[int, int]]] = {}
    for name, marks in files.items():
        before = 0
        marks_by_name[name] = []
        for mark in marks if isinstance(marks, list) else [None]:
            is_mark = isinstance(mark, list) and len(mark) == 2 and all(map(_is_count, mark))
            if not is_mark or mark[0] < before or mark[1] >= 2**32:
                raise ValueError(f"the blocks of {name!r} have no ascending ends and checksums")
            before = mark[0]
            marks_by_name[name].append((mark[0], mark[1]))
    return marks_by_name


# -----------------------------------------------------------------------------
# DCP's list of values, a pickle.


def _member(owner: Any, name: Any) -> metadata._MEM_FORMAT_ENCODING:
    """`getattr`, by which Python 3.11.2 pickles a member of an enum: of DCP's alone. Raises
    UnpicklingError for any other."""
    if owner is metadata._MEM_FORMAT_ENCODING and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"it asks for {name!r} of {owner!r}")


_RECORDS = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    filesystem._StorageInfo,
)
"""DCP's classes whose instances have attributes in a pickle."""

_CLASSES: dict[tuple[str, str], Any] = {
    (known.__module__, known.__qualname__): known
    for known in (
        *_RECORDS,
        metadata._MEM_FORMAT_ENCODING,
        torch.serialization._get_layout,
        pathlib.PosixPath,
    )
} | {("builtins", "getattr"): _member}
"""What DCP's `.metadata` is made of, beside sizes and dtypes."""


class MetadataUnpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Reads pickles of DCP's classes and of what Python has built in, and refuses all others before
    anything of theirs is called.

    It is the unpickler written in Python, because that in C lets the opcode BUILD set attributes of
    any object on its stack: also of the known classes and functions, for the whole process.
    """

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def find_class(self, module: str, name: str) -> Any:
        """A known class, or a dtype. Raises UnpicklingError for any other."""
        found = _CLASSES.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) or found is torch.Size else None
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return found

    def _build(self) -> None:
        """The opcode BUILD, for instances of DCP's records alone. Raises UnpicklingError."""
        target = self.stack[-2]
        state = self.stack[-1]
        if type(target) not in _RECORDS:
            raise pickle.UnpicklingError(f"it sets attributes of {_shown(target)}")
        if isinstance(state, dict):
            is_plain = all(_is_text(name) and not name.startswith("__") for name in state)
        else:  # of `TensorProperties.__setstate__`; others would set attributes of slots
            is_plain = isinstance(target, metadata.TensorProperties)
        if not is_plain or "__setstate__" in vars(target):
            raise pickle.UnpicklingError(f"it sets other attributes of a {type(target).__name__}")
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = _build


def load_metadata(data: bytes) -> metadata.Metadata:
    """DCP's list of values in a pickle. Raises UnpicklingError, or whatever bytes make of it."""
    found = MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(found, metadata.Metadata):
        raise pickle.UnpicklingError(f"it is a {type(found).__name__}")
    if not isinstance(found.state_dict_metadata, dict) or not isinstance(found.storage_data, dict):
        raise pickle.UnpicklingError("it has no mappings of values and of their places")
    for index, info in found.storage_data.items():
        if not _is_place(index, info):
            raise pickle.UnpicklingError(f"{_shown(index)} has no place of a block")
    for name, value in found.state_dict_metadata.items():
        if not _is_value(name, value, found.storage_data):
            raise pickle.UnpicklingError(f"{_shown(name)} is no value with blocks that have places")
    found.storage_meta = found.storage_meta or metadata.StorageMeta()
    return found


def _is_place(index: Any, info: Any) -> bool:
    return (
        isinstance(index, metadata.MetadataIndex)
        and _is_text(index.fqn)
        and isinstance(index.offset, torch.Size | None)
        and isinstance(info, filesystem._StorageInfo)
        and _is_text(info.relative_path)
        and _is_count(info.offset)
        and _is_count(info.length)
    )


def _is_value(name: Any, value: Any, places: Mapping[metadata.MetadataIndex, Any]) -> bool:
    """Return True for a value of a known kind, all of whose blocks have a place."""
    if not _is_text(name):
        return False
    if isinstance(value, metadata.BytesStorageMetadata):
        return metadata.MetadataIndex(name) in places
    if not isinstance(value, metadata.TensorStorageMetadata):
        return False
    properties = value.properties
    if not isinstance(properties, metadata.TensorProperties) or not isinstance(value.chunks, list):
        return False
    return (
        isinstance(value.size, torch.Size)
        and isinstance(properties.dtype, torch.dtype)
        and all(_is_block(name, chunk, len(value.size), places) for chunk in value.chunks)
    )


def _is_block(
    name: str, chunk: Any, dimensions: int, places: Mapping[metadata.MetadataIndex, Any]
) -> bool:
    if not isinstance(chunk, metadata.ChunkStorageMetadata):
        return False
    for sizes in (chunk.offsets, chunk.sizes):
        if not isinstance(sizes, torch.Size) or len(sizes) != dimensions:
            return False
    return metadata.MetadataIndex(name, chunk.offsets) in places
