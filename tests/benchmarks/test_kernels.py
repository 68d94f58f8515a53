"""The kernels' bench at a small size: its work is a plan's, and its numbers agree."""

from __future__ import annotations

import pytest
import torch
from benchmark_checks import of, read_report

from benchmarks import kernels
from benchmarks.kernels import KernelOptions, main, make_work, slots_of
from distcache import ops
from distcache.ops import reference

ARGUMENTS = ["tables=3", "rows=50", "width=8", "batch=6", "pooling=4", "zipf=1.2", "device=cpu"]
ARGUMENTS += ["steps=2", "lead=1", "repetitions=2", "batches=2"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One run of all that can run here."""
    out = tmp_path_factory.mktemp("bench") / "kernels.md"
    assert main([*ARGUMENTS, f"out={out}"]) == 0
    return out, *read_report(out, kernels.BENCH)


def test_all_who_can_run_here_do(report):
    _, head, records = report
    names = [record["mode"] for record in of(records, "mode")]
    assert {"reference, sgd", "reference, adam"} <= set(names)
    triton = ops.triton_bodies()
    assert ("triton, sgd" in names) == (triton is not None and triton.INTERPRETED)
    assert "fbgemm, adam" not in names, "FBGEMM has none on the CPU"
    assert head["settings"]["batch"] == 6 and head["command"][2] == "benchmarks.kernels"


def test_steps_are_the_sums_of_their_pieces(report):
    out, _, records = report
    for record in of(records, "mode"):
        assert record["ids"] == 3 * 6 * 4 and 0 < record["distinct"] <= 72
        assert len(record["turn_medians_ms"]) == 2 and record["step_ms"]["count"] == 4
        assert all(ms > 0 for ms in record["stage_ms"].values())
        assert sum(record["stage_ms"].values()) <= record["step_ms"]["max"]
        assert set(record["stage_ms"]) <= set(record["bytes"])
    pairs = {f"{r['numerator']} / {r['denominator']}" for r in kernels._pairs(records)}
    assert "reference, adam / reference, sgd" in pairs
    assert not any("adam / fbgemm, sgd" in pair for pair in pairs)
    assert "| reference, sgd: lookup |" in out.read_text()


def test_work_is_a_plan_with_everything_cached():
    options = KernelOptions(tables=2, rows=30, width=4, batch=5, pooling=3, seed=7)
    work = make_work(options, 0, torch.device("cpu"))
    rows = work.ids + torch.arange(2).repeat_interleave(15) * 30
    assert len(work.ids) == 30 and work.offsets.tolist() == list(range(0, 31, 3))
    table = torch.randn(options.capacity, 4)
    cache = torch.empty_like(table)
    slots = slots_of(options)
    cache[slots] = table
    leaf = cache[work.slots]
    assert torch.equal(leaf[work.positions], table[rows])
    assert len(work.slots) == len(rows.unique()) == len(work.segments) - 1
    gradient = reference.row_gradients(work.upstream, work.bag_of, work.order, work.segments)
    summed = torch.zeros_like(table).index_add_(0, rows, work.upstream[work.bag_of])
    torch.testing.assert_close(gradient, summed[slots.argsort()[work.slots]])
    by_table = work.by_sample.view(5, 2, 4).transpose(0, 1).reshape(10, 4)
    assert torch.equal(by_table, work.upstream)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    out = tmp_path / "kernels.md"
    assert main([*ARGUMENTS, "device=cuda", f"out={out}"]) == 0
    _, records = read_report(out, kernels.BENCH)
    assert {"triton, sgd", "triton, adam"} <= {record["mode"] for record in of(records, "mode")}
