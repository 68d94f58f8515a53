"""Batches and where they come from: the synthetic stream, Criteo files, samplers, id checks."""

from distcache.data.batch import Batch, BatchSource, JaggedIds, slice_bounds, unloaded
from distcache.data.check import check_ids
from distcache.data.criteo import CriteoSource, CriteoSpec
from distcache.data.synthetic import SyntheticSource, SyntheticSpec

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
