"""Checks of DCP's list of values, which may come from anybody.

Nothing that these files hold is executed, and whatever their checksums say, their structure is
checked before it is used.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


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
