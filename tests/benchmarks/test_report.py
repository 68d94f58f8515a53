"""Options, turns, spreads, tables as specifications, the two files of a report, and what a bench
cannot measure: that ends it at once, with the option named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from benchmark_checks import check_spread, read_report

from benchmarks import kernels, links, planner, preprocess, rows, step
from benchmarks.options import option, parse
from benchmarks.report import Bench, Column, Section, pivoted, run_bench, tables_of
from benchmarks.setting import compose_setting
from benchmarks.turns import medians, ratio_record, shown, shown_range, spread, take_turns
from distcache.comm.rendezvous import Place
from distcache.errors import ConfigError

RECORDS = [
    {"kind": "number", "name": "a", "value": 1.26, "parts": {"x": 1.0}},
    {"kind": "number", "name": "b", "value": None, "parts": {"x": 2.0, "y": 3.0}},
    {"kind": "other", "name": "c", "value": 9.0, "parts": {}},
]
NAME = Column("name", "name")
SECTIONS = (
    Section("Numbers", "What.", "number", (NAME, Column("value", "value", ".1f"))),
    Section("None", "Nothing.", "none", (NAME,)),
    pivoted(("Parts", "Where."), "number", lambda r: r["parts"], ("part", lambda r: r["name"])),
)


@dataclass(frozen=True)
class Options:
    x: tuple[int, ...] = option((1, 2), "numbers", least=1)
    count: int = option(3, "how many")
    share: float = option(0.5, "a share")
    fast: bool = option(False, "in a hurry")
    kind: str = option("a", "a kind", among=("a", "b"))
    names: tuple[str, ...] = option(("a", "b"), "names", among=("a", "b", "c"))
    out: str = option("", "the report")


def measure(options: Options, overrides: tuple[str, ...]) -> list[dict]:
    """What the bench of these tests measures."""
    return RECORDS


BENCH = Bench("Title", Options, measure, SECTIONS)


def test_spread_and_ratios() -> None:
    values = [3.0, 1.0, 2.0, 10.0]
    check_spread(spread(values), values)
    assert spread([])["median"] is None and spread([])["count"] == 0
    assert shown()(spread([1.0, 2.0, 3.0])) == "2.00 [1.50, 2.50]"
    assert shown(1, 1e-3)(spread([1000.0, 2000.0, 3000.0])) == "2.0 [1.5, 2.5]"
    assert shown()(spread([])) == "-" and shown_range(1)(spread(values)) == "1.0 to 10.0"
    record = ratio_record("a", "b", {"a": [2.0, 9.0], "b": [4.0, 3.0]}, bar=2)
    assert record["repetitions"] == [0.5, 3.0] and record["bar"] == 2
    with pytest.raises(ValueError, match="zip"):
        ratio_record("a", "b", {"a": [1.0], "b": [1.0, 2.0]})
    assert medians([{"x": 1.0}, {"x": 3.0, "y": 5.0}]) == {"x": 2.0, "y": 5.0}


def test_everyone_begins_once_and_takes_every_turn() -> None:
    said: list[tuple] = []
    contenders = {
        name: lambda repetition, name=name: said.append((repetition, name)) or repetition
        for name in "abc"
    }
    found = take_turns(contenders, 4, lambda repetition: said.append((repetition, "before")))
    assert found == {name: [0, 1, 2, 3] for name in "abc"}
    turns = [[name for at, name in said if at == repetition] for repetition in range(4)]
    assert [turn[0] for turn in turns] == ["before"] * 4
    assert ["".join(turn[1:]) for turn in turns] == ["abc", "bca", "cab", "abc"]


def test_tables_are_made_of_their_specifications() -> None:
    numbers, parts = tables_of(SECTIONS, RECORDS)
    assert numbers.columns == ("name", "value") and numbers.rows == [("a", "1.3"), ("b", "-")]
    assert parts.columns == ("part", "a", "b")
    assert parts.rows == [("x", "1.00", "2.00"), ("y", "-", "3.00")]


def test_both_files_tell_the_same(tmp_path, capsys) -> None:
    out = tmp_path / "new" / "report.md"
    assert run_bench(BENCH, ["x=3,4", f"out={out}"]) == 0
    assert capsys.readouterr().out == out.read_text()
    head, records = read_report(out, BENCH)
    assert records == RECORDS and head["settings"]["x"] == [3, 4]
    text = out.read_text()
    assert "| a | 1.3 |" in text and "x=3,4" in text and str(tmp_path) not in text
    assert head["command"][-2].endswith("test_report") and head["command"][-1] == "x=3,4"


def test_help_shows_what_the_module_says(capsys) -> None:
    assert run_bench(BENCH, ["--help"]) == 0
    said = capsys.readouterr().out
    assert (__doc__ or "") in said and "  x=1,2" in said and "  out=" in said


def test_sizes_are_settings_of_the_package() -> None:
    kaggle = compose_setting("kaggle", (), Place())
    assert (sum(kaggle.data.table_rows), len(kaggle.data.table_rows)) == (33_762_577, 26)
    terabyte = compose_setting("terabyte", (), Place())
    assert sum(terabyte.data.table_rows) == 204_184_588
    dcnv2 = compose_setting("dcnv2", (), Place())
    assert max(dcnv2.data.table_rows) == 625_000 and sum(dcnv2.data.bag_size) == 214
    small = compose_setting("small", ("cache.lookahead=3", "optim=adam"), Place())
    assert (small.cache.lookahead, small.optim.name) == (3, "adam")
    for overrides, says in (
        (("data.none=1",), "data.none"),
        (("optim=magic",), "optim/magic"),
        (("cache.ratio=7",), "cache.ratio"),
    ):
        with pytest.raises(ConfigError, match=says):
            compose_setting("small", overrides, Place())


def test_values_take_the_type_of_their_default() -> None:
    given = ["count=4", "share=0.25", "fast=True", "names=c, b", "x=7", "a.b=1"]
    assert parse(Options, given) == (Options((7,), 4, 0.25, True, "a", ("c", "b")), ("a.b=1",))
    assert parse(Options, []) == (Options(), ())


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("cuont=4", "did you mean count"),
        ("count=many", "count=many"),
        ("fast=perhaps", "not true or false"),
        ("x=1,y", "x=y"),
        ("names=,", "at least one"),
        ("count", "not key=value"),
        ("x=0,3", "x=0 must be at least 1"),
        ("kind=c", "kind=c: choose from a, b"),
        ("names=a,d", "names=a,d: choose from a, b, c"),
        ("names=a,a", "names=a,a names one twice"),
    ],
)
def test_what_does_not_fit_is_named(argument, says) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(Options, [argument])


SMALL = "size=small batch=64"
REFUSED = (
    (kernels, "contenders=tf", "contenders=tf"),
    (kernels, "optimizers=lamb", "optimizers=lamb"),
    (kernels, "device=tpu", "device=tpu"),
    (kernels, "cache.rows=3", "cache.rows=3: no such key"),
    (links, "rate=0gbit", "rate=0gbit"),
    (links, "size=small", "give rate=none"),
    (links, "rate=none rate=1gbit", "once"),
    (planner, "size=small placements=sharded,spread", "placements=sharded,spread: choose from"),
    (planner, "size=small placements=mixed share=1.5", "share=1.5"),
    (planner, "size=small batch=5000 cache.ratio=0.01 repetitions=1", "slots"),
    (planner, "size=big", "size=big"),
    (planner, "size=small placements=mixed against=.", "against= takes replicated and sharded"),
    (preprocess, "jobs=other", "jobs=other"),
    (rows, "device=cpu repetitions=0", "repetitions=0"),
    (rows, "device=cpu widths=0", "widths=0"),
    (rows, "device=cpu state_width=-1", "state_width=-1"),
    (rows, "device=cpu parts=disk", "parts=disk"),
    (rows, "parts=memory table_rows=900000000000 widths=64", "900000000000 rows of 64"),
    (rows, "device=cuda parts=device", "cuda"),
    (step, f"{SMALL} modes=bag optimizer=rowwise_adagrad", "rowwise_adagrad"),
    (step, f"{SMALL} modes=fused optimizer=adam", "adam"),
    (step, f"{SMALL} modes=fused optimizer=adagrad optim.initial_accumulator=0.1", "accumulator"),
    (step, f"{SMALL} modes=bag trainer.dtype=float64", "float32"),
    (step, f"{SMALL} modes=data,uvm", "modes=uvm is FBGEMM's cache on a GPU: set device=cuda"),
    (step, f"{SMALL} modes=data ratio=0.001", "cache.rows="),
    (step, f"{SMALL} modes=data,resident width=40000000", "modes=data,resident"),
    (step, f"{SMALL} modes=data,data", "names one twice"),
    (step, f"{SMALL} warmup=50 warmup_most=10", "warmup_most=10"),
    (step, f"{SMALL} against=/nowhere modes=data", "against=/nowhere has no package distcache"),
    (step, f"{SMALL} against=. modes=mixed,fused", "modes=mixed,fused: against= takes data"),
)


@pytest.mark.parametrize(("bench", "words", "says"), REFUSED)
def test_what_cannot_be_measured_is_refused(capfd, bench, words, says):
    if says == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert bench.main(words.split()) == 1
    assert says in capfd.readouterr().err
    assert not torch.distributed.is_initialized()
