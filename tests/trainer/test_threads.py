"""Threads of torch on each rank: the share of the cores, unless somebody said otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from toy_parallel import toy_config

from distcache.errors import ConfigError
from distcache.trainer import build as threads


@pytest.mark.parametrize(
    ("given", "outside", "local_size", "expected"),
    [
        ("auto", None, 1, 8),
        ("auto", None, 2, 4),
        ("auto", None, 16, 1),
        ("auto", "1", 2, 4),  # torchrun's own
        ("auto", "1", 1, 1),  # somebody's
        ("auto", "3", 2, 3),
        ("auto", "3,1", 1, 3),
        ("auto", "many", 4, 2),
        (5, "3", 2, 5),
        (1, None, 1, 1),
    ],
)
def test_threads(monkeypatch, given, outside, local_size, expected) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if outside is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", outside)
    config = toy_config(trainer__threads=given)
    assert threads.compute_threads(config, SimpleNamespace(local_size=local_size)) == expected


def test_more_threads_than_cores_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(8)))
    with pytest.raises(ConfigError, match=r"trainer\.threads=9 .* 8 core\(s\)"):
        threads.compute_threads(toy_config(trainer__threads=9), SimpleNamespace(local_size=1))
