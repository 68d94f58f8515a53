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
from distcache.planner.calls import COMPILED, using

import distcache.analyze
import distcache.compare
import distcache.embedding
import distcache.train
import distcache.trainer.trainer
from distcache.errors import ConfigError
from distcache.popularity import bodies as counting

with contextlib.suppress(ImportError):
    import torchrec

__all__ = ["distcache", "hypothesis", "numba", "pytest", "torchrec"]

with contextlib.suppress(ConfigError), using(COMPILED):  # where Numba is whole: as machine code
    counting.bodies()

gc.collect()
gc.freeze()
