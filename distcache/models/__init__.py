"""The dense networks behind the tables: pure modules, (dense, pooled) -> logits."""

from distcache.models.build import build_model, initialise
from distcache.models.dcn import DCNv2
from distcache.models.dlrm import DLRM
from distcache.models.layers import MLP

__all__ = ["DLRM", "MLP", "DCNv2", "build_model", "initialise"]
