"""What a fork server imports once, so that a rank starts in hundredths of a second.

Nothing here starts a thread, joins a group or touches a device. What is imported is frozen: a
rank's garbage collector neither walks nor copies it.
"""

from __future__ import annotations

import contextlib
import gc

import hypothesis
import numba
import pytest

import distcache.analyze
import distcache.compare
import distcache.embedding
import distcache.train
import distcache.trainer.trainer

with contextlib.suppress(ImportError):
    import torchrec

__all__ = ["distcache", "hypothesis", "numba", "pytest", "torchrec"]

gc.collect()
gc.freeze()
