"""The benches' command line."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from distcache.bench.options import option, parse, split_arguments, usage
from distcache.bench.planner import PlannerOptions
from distcache.bench.report import check_out
from distcache.bench.setting import compose_setting
from distcache.bench.step import MODES, StepOptions
from distcache.comm.rendezvous import Place
from distcache.errors import ConfigError


@dataclass(frozen=True)
class Sample:
    count: int = option(3, "how many")
    share: float = option(0.5, "a share")
    fast: bool = option(False, "in a hurry")
    names: tuple[str, ...] = option(("a", "b"), "names")
    sizes: tuple[int, ...] = option((1, 2), "sizes")


def test_values_take_the_type_of_their_default():
    line = split_arguments(["count=4", "share=0.25", "fast=True", "names=x, y", "sizes=7", "a.b=1"])
    assert line.overrides == ("a.b=1",)
    assert parse(Sample, line.given) == Sample(4, 0.25, True, ("x", "y"), (7,))
    assert parse(Sample, {}) == Sample()


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("cuont=4", "did you mean count"),
        ("count=many", "count=many"),
        ("fast=perhaps", "not true or false"),
        ("sizes=1,x", "sizes=x"),
        ("names=,", "at least one"),
        ("count", "not key=value"),
    ],
)
def test_what_does_not_fit_is_named(argument, says):
    with pytest.raises(ConfigError, match=says):
        parse(Sample, split_arguments([argument]).given)


@pytest.mark.parametrize("cls", [Sample, PlannerOptions, StepOptions])
def test_help_shows_every_key_with_its_default(cls):
    text = usage(cls, "a.module", "What it is for.")
    assert "python -m a.module" in text
    for name in cls.__dataclass_fields__:
        assert f"\n  {name}=" in text
    assert "  names=a,b" in text or cls is not Sample


@pytest.mark.parametrize(
    ("cls", "arguments", "says"),
    [
        (StepOptions, {"modes": "data,dta"}, "modes=dta"),
        (StepOptions, {"modes": "data,data"}, "twice"),
        (StepOptions, {"steps": "0"}, "steps=0"),
        (StepOptions, {"warmup": "50", "warmup_most": "10"}, "warmup_most=10"),
        (PlannerOptions, {"worlds": "1,0"}, "worlds=0"),
    ],
)
def test_options_are_checked(cls, arguments, says):
    with pytest.raises(ConfigError, match=says):
        parse(cls, arguments)
    assert set(StepOptions().modes) <= set(MODES)


def test_sizes_are_settings_of_the_package():
    kaggle = compose_setting("kaggle", (), Place())
    assert (sum(kaggle.data.table_rows), len(kaggle.data.table_rows)) == (33_762_577, 26)
    small = compose_setting("small", ("cache.lookahead=3", "optim=adam"), Place())
    assert (small.cache.lookahead, small.optim.name) == (3, "adam")
    assert sum(small.data.table_rows) < 100_000
    for size, overrides, says in (
        ("big", (), "size=big"),
        ("small", ("data.none=1",), "data.none"),
        ("small", ("optim=magic",), "optim/magic"),
        ("small", ("cache.ratio=7",), "cache.ratio"),
    ):
        with pytest.raises(ConfigError, match=says):
            compose_setting(size, overrides, Place())


def test_a_report_is_a_markdown_file():
    assert check_out("") is None
    assert check_out("a/b.md").name == "b.md"
    with pytest.raises(ConfigError, match=r"\.md"):
        check_out("report.json")
