"""The kernels' bench at a small size: all contenders train the same, and its numbers agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bench_checks import check_spread, of, read_report

from distcache import ops
from distcache.bench import kernel_contenders
from distcache.bench.kernel_tables import tables
from distcache.bench.kernel_work import Shape, make_work, moved_bytes
from distcache.bench.kernels import main
from distcache.ops import reference

ARGUMENTS = ["tables=3", "rows=50", "width=8", "batch=6", "pooling=4", "zipf=1.2", "device=cpu"]
ARGUMENTS += ["steps=2", "lead=1", "repetitions=2", "batches=2"]
OPTIMIZERS = ("sgd", "adam")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One run of all that can run here."""
    out = tmp_path_factory.mktemp("bench") / "kernels.md"
    assert main([*ARGUMENTS, f"out={out}"]) == 0
    return read_report(out, tables)


def test_all_who_can_run_here_do(report):
    head, records = report
    names = [(r["contender"], r["optimizer"]) for r in of(records, "contender")]
    left = {(r["contender"], r["optimizer"]): r["reason"] for r in of(records, "left_out")}
    both = [(name, optimizer) for name in kernel_contenders.CONTENDERS for optimizer in OPTIMIZERS]
    assert sorted([*names, *left]) == sorted(both)
    assert {("reference", "sgd"), ("torch", "adam")} <= set(names)
    kernels = ops.triton_bodies()
    assert (("triton", "sgd") in names) == (kernels is not None and kernels.INTERPRETED)
    assert "fbgemm" in left["fbgemm", "adam"].lower()
    assert head["settings"]["batch"] == 6 and head["command"][2] == "distcache.bench.kernels"


def test_they_train_the_same(report):
    _, records = report
    found = of(records, "agreement")
    assert {r["optimizer"] for r in found} == set(OPTIMIZERS)
    for record in found:
        assert record["weight_by_row"] < 1e-4 and record["pooled_by_bag"] < 1e-4, record


def test_medians_rates_and_ratios_are_of_the_turns(report):
    _, records = report
    contenders = {(r["contender"], r["optimizer"]): r for r in of(records, "contender")}
    for record in contenders.values():
        assert record["ids"] == 3 * 6 * 4 and 0 < record["distinct"] <= 72
        assert len(record["turn_medians_ms"]) == 2 and record["step_ms"]["count"] == 4
        for piece in record["pieces"].values():
            assert piece["ms"]["count"] == 4 and piece["ms"]["min"] > 0
            rate = piece["bytes"] / (1e6 * piece["ms"]["median"])
            assert piece["gb_per_s"] == pytest.approx(rate)
        least = sum(piece["ms"]["min"] for piece in record["pieces"].values())
        assert least <= record["step_ms"]["min"] * (1 + 1e-9)
    found = {r["title"]: r for r in of(records, "ratio")}
    above, below = contenders["reference", "adam"], contenders["torch", "adam"]
    values = np.divide(above["turn_medians_ms"], below["turn_medians_ms"])
    assert found["reference / torch, adam"]["repetitions"] == values.tolist()
    check_spread(found["reference / torch, adam"]["ratio"], values)
    assert "adam / sgd, reference" in found
    assert all(r["bar"] is None for r in found.values())  # bars are for GPUs


def test_the_choice_is_shown_beside_the_times(report):
    _, records = report
    found = {(r["operation"], r["optimizer"]): r for r in of(records, "choice")}
    assert set(found) == {(name, o) for name in ops.ON_GPU for o in OPTIMIZERS}
    pieces = {"pooled_lookup": "lookup", "row_gradients": "gradient", "update_rows": "update"}
    contenders = {(r["contender"], r["optimizer"]): r for r in of(records, "contender")}
    for (operation, optimizer), record in found.items():
        assert record["on_gpu"] == ops.ON_GPU[operation]
        for name, ms in record["median_ms"].items():
            assert ms == contenders[name, optimizer]["pieces"][pieces[operation]]["ms"]["median"]


def test_work_is_a_plan_with_everything_cached():
    shape = Shape(tables=2, rows=30, width=4, batch=5, pooling=3)
    work = make_work(shape, 1.05, 7, 0, torch.device("cpu"))
    assert len(work.rows) == shape.ids == 30 and work.offsets.tolist() == list(range(0, 31, 3))
    assert torch.equal(work.rows[:15], work.ids[:15])
    assert torch.equal(work.rows[15:], work.ids[15:] + 30)
    table = torch.randn(shape.capacity, 4)
    cache = torch.empty_like(table)
    slots = kernel_contenders.slots_of(shape, 7)
    cache[slots] = table
    leaf = cache[work.slots]
    assert torch.equal(leaf[work.positions], table[work.rows])
    assert len(work.slots) == len(work.rows.unique()) == len(work.segments) - 1
    gradient = reference.row_gradients(work.upstream, work.bag_of, work.order, work.segments)
    summed = torch.zeros_like(table).index_add_(0, work.rows, work.upstream[work.bag_of])
    torch.testing.assert_close(gradient, summed[slots.argsort()[work.slots]])
    by_table = work.by_sample.view(5, 2, 4).transpose(0, 1).reshape(10, 4)
    assert torch.equal(by_table, work.upstream)


def test_bytes_of_a_step():
    shape = Shape(tables=1, rows=10, width=4, batch=3, pooling=2)
    moved = moved_bytes(shape, 5, "sgd")
    assert moved["gather"] == 5 * (8 + 32)
    assert moved["lookup"] == 6 * 8 + 6 * 16 + 3 * 8 + 3 * 16
    assert moved["gradient"] == 6 * 16 + 6 * 16 + 5 * 8 + 5 * 16
    assert moved["update"] == 5 * (8 + 3 * 16)
    assert moved_bytes(shape, 5, "adam")["update"] == 5 * (8 + 7 * 16)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("contenders=tf", "contenders=tf"),
        ("contenders=torch,torch", "names one twice"),
        ("optimizers=lamb", "optimizers=lamb"),
        ("device=tpu", "device=tpu"),
        ("repetitions=0", "repetitions=0"),
        ("cache.rows=3", "cache.rows=3: no such key"),
        ("out=report.txt", ".md"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, argument, says):
    assert main([*ARGUMENTS, argument]) == 1
    assert says in capsys.readouterr().err


def test_nobody_left_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr(ops, "triton_bodies", lambda: None)
    assert main([*ARGUMENTS, "contenders=triton"]) == 1
    assert "none can run here" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    out = tmp_path / "kernels.md"
    assert main([*ARGUMENTS, "device=cuda", f"out={out}"]) == 0
    _, records = read_report(out, tables)
    assert {("triton", "sgd"), ("torch", "adam")} <= {
        (r["contender"], r["optimizer"]) for r in of(records, "contender")
    }
    for record in of(records, "agreement"):
        assert record["weight_by_row"] < 1e-4, record


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "contenders=triton,reference,fbgemm,torch" in capsys.readouterr().out
