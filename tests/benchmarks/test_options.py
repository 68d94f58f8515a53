"""Command lines of plain options."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.options import option, parse
from distcache.errors import ConfigError


@dataclass(frozen=True)
class Sample:
    count: int = option(3, "how many")
    share: float = option(0.5, "a share")
    fast: bool = option(False, "in a hurry")
    names: tuple[str, ...] = option(("a", "b"), "names")
    sizes: tuple[int, ...] = option((1, 2), "sizes")


@dataclass(frozen=True)
class Ruled:
    counts: tuple[int, ...] = option((1,), "numbers", least=1)
    kind: str = option("a", "a kind", among=("a", "b"))
    kinds: tuple[str, ...] = option(("a",), "kinds", among=("a", "b"))


def test_values_take_the_type_of_their_default():
    given = ["count=4", "share=0.25", "fast=True", "names=x, y", "sizes=7", "a.b=1"]
    assert parse(Sample, given) == (Sample(4, 0.25, True, ("x", "y"), (7,)), ("a.b=1",))
    assert parse(Sample, []) == (Sample(), ())


@pytest.mark.parametrize(
    ("kind", "argument", "says"),
    [
        (Sample, "cuont=4", "did you mean count"),
        (Sample, "count=many", "count=many"),
        (Sample, "fast=perhaps", "not true or false"),
        (Sample, "sizes=1,x", "sizes=x"),
        (Sample, "names=,", "at least one"),
        (Sample, "count", "not key=value"),
        (Ruled, "counts=0,3", "counts=0 must be at least 1"),
        (Ruled, "kind=c", "kind=c: choose from a, b"),
        (Ruled, "kinds=a,d", "kinds=a,d: choose from a, b"),
        (Ruled, "kinds=a,a", "kinds=a,a names one twice"),
    ],
)
def test_what_does_not_fit_is_named(kind, argument, says):
    with pytest.raises(ConfigError, match=says):
        parse(kind, [argument])
