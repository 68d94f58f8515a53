"""Batches and where they come from: the synthetic stream, Criteo files, samplers, id checks.

Names are imported when they are asked for: workers that only parse text load no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcache.data.batch import Batch, BatchSource, JaggedIds, slice_bounds, unloaded
    from distcache.data.check import check_ids
    from distcache.data.criteo import CriteoSource, CriteoSpec
    from distcache.data.synthetic import SyntheticSource, SyntheticSpec

_MODULES = {
    "Batch": "batch",
    "BatchSource": "batch",
    "CriteoSource": "criteo",
    "CriteoSpec": "criteo",
    "JaggedIds": "batch",
    "SyntheticSource": "synthetic",
    "SyntheticSpec": "synthetic",
    "check_ids": "check",
    "slice_bounds": "batch",
    "unloaded": "batch",
}

__all__ = [
    "Batch",
    "BatchSource",
    "CriteoSource",
    "CriteoSpec",
    "JaggedIds",
    "SyntheticSource",
    "SyntheticSpec",
    "check_ids",
    "slice_bounds",
    "unloaded",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
