"""The step's bench at a small size: it trains what training trains, and its numbers agree."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmark_checks import check_spread, of, read_report
from ranks import run_ranks

from benchmarks import step, yardsticks
from benchmarks.setting import compose_setting
from benchmarks.step import main
from benchmarks.stream import BatchBank
from distcache.comm.rendezvous import Place
from distcache.errors import ConfigError
from distcache.trainer.build import build_source
from distcache.versions import fbgemm_here

ARGUMENTS = ["size=small", "batch=64", "ratio=0.05", "steps=3", "lead=1", "repetitions=2"]
STAGES = {"ingest", "load", "plan", "plan_exchange", "write_back", "gather", "fill"}
STAGES |= {"forward_backward", "sync", "apply"}


def bench(out, *arguments):
    """The header and records of a run."""
    assert main([*ARGUMENTS, *arguments, f"out={out}"]) == 0
    return read_report(out, step.BENCH)


def test_modes_take_turns_and_train_the_same_in_steady_eviction(tmp_path):
    names = ("data", "resident", "host", "bag")
    _, records = bench(tmp_path / "step.md", f"modes={','.join(names)}")
    turns = of(records, "turn")
    order = [*((0, mode) for mode in names), *((1, mode) for mode in (*names[1:], names[0]))]
    assert [(turn["repetition"], turn["mode"]) for turn in turns] == order
    for turn in turns:
        assert len(turn["step_ms"]) == 3 and min(turn["step_ms"]) > 0
        stages = set() if turn["mode"] == "bag" else STAGES | {"wait"}
        assert set(turn.get("stage_ms", {})) == stages
    modes, medians = {mode["mode"]: mode for mode in of(records, "mode")}, {}
    for name, mode in modes.items():
        own = [turn["step_ms"] for turn in turns if turn["mode"] == name]
        check_spread(mode["step_ms"], [ms for times in own for ms in times])
        medians[name] = [float(np.median(times)) for times in own]
        assert mode["turn_medians_ms"] == medians[name]
    pairs = of(records, "ratio")
    assert [(p["numerator"], p["denominator"]) for p in pairs] == list(combinations(medians, 2))
    for pair in pairs:
        above, below = medians[pair["numerator"]], medians[pair["denominator"]]
        assert pair["repetitions"] == [a / b for a, b in zip(above, below, strict=True)]
        check_spread(pair["ratio"], pair["repetitions"])
    loss = modes["resident"]["loss"]
    assert modes["data"]["loss"] == modes["host"]["loss"] == loss
    assert modes["bag"]["loss"] == pytest.approx(loss, rel=1e-5)
    rows = modes["data"]["rows_per_step"]
    assert modes["data"]["steady_eviction"] is True
    assert rows["distinct"] > rows["misses"] == rows["evictions"] > 0
    assert modes["data"]["warmup_steps"] >= 20
    for mode in ("data", "resident", "host"):
        assert 0 < modes[mode]["embedding_device_bytes"] <= modes[mode]["embedding_bytes_bound"]
        parts = modes[mode]["device_parts"]
        assert set(parts) == {"slots", "dense", "ids", "rows", "moving"}
        for name, part in parts.items():
            least = 0 if name == "moving" else 0.6 * part["expected"]
            assert least <= part["measured"] <= part["expected"], (mode, name)


FUSED, BAGS = "modes=resident,fused,uvm,uvm_prefetch", "modes=resident,bag"
RATES = ("optim.embedding_lr=0.05", "optim.dense_lr=0.05")


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("modes", "given"),
    [
        (FUSED, ("optimizer=sgd", *RATES)),
        slow(FUSED, ("optimizer=rowwise_adagrad", *RATES)),
        slow(FUSED, ("optimizer=adagrad", *RATES)),
        pytest.param(FUSED, ("optimizer=adam", "device=cuda"), marks=pytest.mark.gpu),
        (BAGS, ("optimizer=adagrad",)),
        (BAGS, ("optimizer=adam",)),
        ("modes=data,resident,bag", ("model=embeddings",)),  # without a dense part
    ],
)
def test_others_tables_train_the_same(tmp_path, monkeypatch, modes, given):
    """Without a GPU the tables of FBGEMM's cache lie in host memory, and nothing is cached."""
    if modes == FUSED:
        pytest.importorskip("fbgemm_gpu")
    if "device=cuda" not in given:
        monkeypatch.setattr(step, "who_stands_in", lambda mode, config, world: mode)
    elif "fbgemm-gpu" not in fbgemm_here():
        pytest.skip("the fbgemm here is the CPU build")
    _, records = bench(tmp_path / "others.md", modes, "warmup=4", *given)
    first, *others = (mode["loss"] for mode in of(records, "mode"))
    assert others == pytest.approx([first] * len(others), rel=1e-3)
    assert first > 0 and (modes != FUSED or first != pytest.approx(0.6931, abs=1e-4))


def two_ranks(rank, world_size, modes, out):
    """Both ranks run the bench; the exit code."""
    arguments = (f"modes={modes}", "parallel.sharding=table_wise", "warmup=5", f"out={out}")
    return main([*ARGUMENTS, *arguments])


@pytest.mark.parametrize(
    "modes", ["data,resident", pytest.param("data,hybrid,resident,host", marks=pytest.mark.slow)]
)
def test_two_ranks(tmp_path, modes):
    out = tmp_path / "two.md"
    if "hybrid" in modes:
        pytest.importorskip("torchrec")
    assert run_ranks(two_ranks, 2, modes, str(out)) == [0, 0]
    head, records = read_report(out, step.BENCH)
    assert head["command"][:4] == ["torchrun", "--standalone", "--nproc-per-node", "2"]
    found = {mode["mode"]: mode for mode in of(records, "mode")}
    assert list(found) == modes.split(",")
    data = found["data"]
    assert data["world_size"] == 2
    assert data["rows_per_step"]["evictions"] > 0
    for name, mode in found.items():
        close = 1e-5 if name == "hybrid" else 0.0
        assert mode["loss"] == pytest.approx(data["loss"], rel=close, abs=0.0)


def test_yardsticks_are_of_one_rank_and_bags_stand_in_for_fbgemms_kernels(monkeypatch):
    config = compose_setting("small", (), Place())
    with pytest.raises(ConfigError, match="one rank"):
        two = SimpleNamespace(size=2, device=torch.device("cpu"))
        yardsticks.who_stands_in("fused", config, two)
    gpu = SimpleNamespace(size=1, device=torch.device("cuda", 0))
    monkeypatch.setattr(yardsticks, "why_no_fbgemm", lambda device: "there are none")
    assert yardsticks.who_stands_in("fused", config, gpu) == "bag"
    with pytest.raises(ConfigError, match="modes=uvm is FBGEMM's cache on a GPU: there are none"):
        yardsticks.who_stands_in("uvm", config, gpu)


def test_a_bank_hands_every_feed_the_same_batches_and_drops_what_all_have_read():
    source = build_source(compose_setting("small", ("data.global_batch_size=8",), Place()))
    bank = BatchBank(source, 0, 1)
    first, second = bank.feed(), bank.feed()
    bank.fill(3)
    batches = [next(first) for _ in range(3)]
    assert [batch.index for batch in batches] == [0, 1, 2]
    assert next(second) is batches[0] and next(second) is batches[1]
    bank.fill(4)
    assert sorted(bank._batches) == [1, 2, 3]
    beyond = [next(first) for _ in range(3)]  # where it comes to none it draws one
    assert [batch.index for batch in beyond] == [3, 4, 5]
    assert [next(second).index for _ in range(4)] == [2, 3, 4, 5]


def test_a_model_that_diverges_is_refused(tmp_path, capfd):
    given = ["size=small", "modes=resident", "optim.embedding_lr=1e30", "repetitions=1"]
    assert main([*given, f"out={tmp_path / 'x.md'}", "steps=3", "warmup=4"]) == 1
    assert "modes=resident: the loss is" in capfd.readouterr().err
    assert not (tmp_path / "x.md").exists()
