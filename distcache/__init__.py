"""Exact data-parallel training of recommendation models with tables in host memory."""

from __future__ import annotations

from typing import Any

__all__ = ["TableSpec", "fit"]

_HOME = {"TableSpec": "distcache.layout", "fit": "distcache.fitting"}
"""Where each public name lies: loaded when it is asked for, as most commands need few of them."""


def __getattr__(name: str) -> Any:
    """A public name of the package."""
    if name not in _HOME:
        raise AttributeError(f"module 'distcache' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
