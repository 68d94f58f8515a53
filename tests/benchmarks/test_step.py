"""The step's bench at a small size: it trains what training trains, and its numbers agree; over
links of given rates; beside another checkout, in blocks of steps that take turns."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmark_checks import check_spread, of, read_report
from launching import CHECKOUT
from ranks import run_ranks

from benchmarks import against_rank, links, step, stream, yardsticks
from benchmarks.against import SIDES
from benchmarks.links import NONE, cable
from benchmarks.ranks import End
from benchmarks.ranks import run_ranks as links_ranks
from benchmarks.setting import compose_setting
from benchmarks.step import main
from benchmarks.stream import BatchBank
from distcache.errors import ConfigError
from distcache.trainer.build import build_source
from distcache.versions import fbgemm_here

ARGUMENTS = ["size=small", "batch=64", "ratio=0.05", "steps=3", "lead=1", "repetitions=2"]
STAGES = {"ingest", "load", "plan", "plan_exchange", "gather", "write_back", "fill"}
STAGES |= {"scatter", "forward_backward", "sync", "apply"}


@pytest.fixture(autouse=True)
def children(monkeypatch):
    """Ranks import this checkout, and take one thread."""
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def bench(out, *arguments):
    """The header and records of a run."""
    assert main([*ARGUMENTS, *arguments, f"out={out}"]) == 0
    return read_report(out, step.BENCH)


def test_modes_take_turns_and_train_the_same_in_steady_eviction(tmp_path):
    names = ("data", "resident", "host", "bag", "torchrec")
    _, records = bench(tmp_path / "step.md", f"modes={','.join(names)}")
    turns = of(records, "turn")
    order = [*((0, mode) for mode in names), *((1, mode) for mode in (*names[1:], names[0]))]
    assert [(turn["repetition"], turn["mode"]) for turn in turns] == order
    for turn in turns:
        assert len(turn["step_ms"]) == 3 and min(turn["step_ms"]) > 0
        stages = set() if turn["mode"] in ("bag", "torchrec") else STAGES | {"wait"}
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
    assert modes["torchrec"]["loss"] == pytest.approx(loss, rel=1e-5)
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
        slow(BAGS, ("optimizer=adam",)),
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


def test_widths_take_turns_in_one_process(tmp_path):
    out, given = tmp_path / "widths.md", ("modes=resident,bag", "widths=4,8", "warmup=2")
    _, records = bench(out, *given)
    names = [mode["mode"] for mode in of(records, "mode")]
    assert names == ["resident, 4", "bag, 4", "resident, 8", "bag, 8"]
    assert [p["numerator"] for p in of(records, "ratio")] == ["resident, 4", "resident, 8"]
    assert "The device at work" not in out.read_text()  # of a GPU alone


def test_the_time_of_a_device_at_work_is_that_of_all_its_streams_together():
    spans = [(5.0, 9.0), (0.0, 2.0), (1.0, 3.0), (6.0, 7.0), (12.0, 13.0)]
    assert stream.union(spans) == (8.0, 3.0) and stream.union([]) == (0.0, 0.0)
    own = torch.ones(1 << 20)
    with stream.device_work(torch.device("cpu"), 2) as found:
        own.add_(1.0)
        own.sum()
    assert 0 < found["kernels_ms"] == found["busy_ms"]
    assert found["gap_ms"] > 0


def two_ranks(rank, world_size, modes, out):
    """Both ranks run the bench; the exit code."""
    arguments = (f"modes={modes}", "parallel.sharding=table_wise", "warmup=5", f"out={out}")
    return main([*ARGUMENTS, *arguments])


@pytest.mark.slow
def test_two_ranks(tmp_path):
    out, modes = tmp_path / "two.md", "data,hybrid,torchrec,resident,host"
    assert run_ranks(two_ranks, 2, modes, str(out)) == [0, 0]
    head, records = read_report(out, step.BENCH)
    assert head["command"][:4] == ["torchrun", "--standalone", "--nproc-per-node", "2"]
    found = {mode["mode"]: mode for mode in of(records, "mode")}
    assert list(found) == modes.split(",")
    data = found["data"]
    assert data["world_size"] == 2
    assert data["rows_per_step"]["evictions"] > 0
    for name, mode in found.items():
        close = 1e-5 if name in ("hybrid", "torchrec") else 0.0
        assert mode["loss"] == pytest.approx(data["loss"], rel=close, abs=0.0)


def test_fbgemms_cache_takes_what_it_is_told():
    training = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    known = inspect.signature(training.SplitTableBatchedEmbeddingBagsCodegen).parameters
    config = compose_setting("small", ("cache.ratio=0.25",))
    told = yardsticks.uvm_settings(config, prefetch=True)
    assert told["cache_load_factor"] == 0.25 and told["uvm_host_mapped"]
    assert told.keys() <= known.keys()


def test_yardsticks_are_of_one_rank_and_bags_stand_in_for_fbgemms_kernels(monkeypatch):
    config = compose_setting("small", ())
    with pytest.raises(ConfigError, match="one rank"):
        two = SimpleNamespace(size=2, device=torch.device("cpu"))
        yardsticks.who_stands_in("fused", config, two)
    gpu = SimpleNamespace(size=1, device=torch.device("cuda", 0))
    monkeypatch.setattr(yardsticks, "why_no_fbgemm", lambda device: "there are none")
    assert yardsticks.who_stands_in("fused", config, gpu) == "bag"
    with pytest.raises(ConfigError, match="modes=uvm is FBGEMM's cache on a GPU: there are none"):
        yardsticks.who_stands_in("uvm", config, gpu)


def test_a_bank_hands_every_feed_the_same_batches_and_drops_what_all_have_read():
    source = build_source(compose_setting("small", ("data.global_batch_size=8",)))
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


BATCH, WIDTH = 32, 8
SMALL = ["size=small", "data.bag_size=[3,2,1,12,1,1]", f"batch={2 * BATCH}", f"widths={WIDTH}"]
SMALL += ["steps=2", "lead=1", "warmup=3", "warmup_most=6", "repetitions=2", "ratio=0.2"]
SMALL += ["optim.embedding_lr=0.1"]


def call(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout


def over_link(out: Path, *arguments: str) -> dict[str, dict]:
    assert links.main([*SMALL, *arguments, f"out={out}"]) == 0
    return {record["mode"]: record for record in of(read_report(out, step.BENCH)[1], "mode")}


def test_contenders_on_loopback(tmp_path, capsys):
    pytest.importorskip("torchrec")
    found = over_link(tmp_path / "links.md", "rate=none", "modes=table_wise,replicated,sharded")
    said = capsys.readouterr().out
    assert re.search(r"rate none: \d+\.\d+ Gb/s", said) and "link=none" in said
    assert (tmp_path / "links.md").read_text() in said
    assert list(found) == ["table_wise", "replicated", "sharded"]
    assert found["replicated"]["loss"] == found["sharded"]["loss"]
    assert found["table_wise"]["loss"] == pytest.approx(found["sharded"]["loss"], rel=1e-5)
    # Each rank sends the pooled vectors of its tables to the other's samples, and takes back as
    # many gradients: the mean over two ranks is one vector for each table and sample.
    sent = {mode: record["sent_per_step"] for mode, record in found.items()}
    assert sent["table_wise"]["collective_bytes"] == BATCH * 6 * WIDTH * 4
    assert 0 < sent["sharded"]["collective_bytes"] < sent["replicated"]["collective_bytes"]
    assert len({record["dense_collective_bytes"] for record in sent.values()}) == 1
    assert all(record["nodes"] == 2 for record in found.values())


def test_without_permission_there_is_no_cable_and_nothing_is_left(monkeypatch):
    calls = []

    def refuse(*words):
        calls.append(words)
        return subprocess.CompletedProcess(words, int(words[0] == "tc"), "", "not for you\n")

    monkeypatch.setattr(links, "_call", refuse)
    for tool, user, says in (
        (None, 0, "iproute2"),
        ("ip", 1000, "root"),
        ("ip", 0, r"tc -n .* is not permitted here: not for you"),
    ):
        monkeypatch.setattr(links.shutil, "which", lambda word, tool=tool: tool)
        monkeypatch.setattr(links.os, "geteuid", lambda user=user: user)
        with pytest.raises(ConfigError, match=says), cable("1gbit"):
            pass
    made = [words[3] for words in calls if words[:3] == ("ip", "netns", "add")]
    assert len(made) == 2 and str(os.getpid()) in made[0]
    assert [words[3] for words in calls if words[:3] == ("ip", "netns", "delete")] == made


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_cable_is_throttled_at_both_ends_and_goes_with_an_error(error):
    def use() -> None:
        with cable("100mbit") as ends:
            assert str(os.getpid()) in call("ip", "netns", "list")
            for end in ends:
                shown = call(*end.prefix, "tc", "qdisc", "show", "dev", end.interface)
                assert "tbf" in shown and "100Mbit" in shown
            raise error

    try:
        use()
    except error:
        assert f"links-{os.getpid()}" not in call("ip", "netns", "list")
    except ConfigError as reason:
        pytest.skip(str(reason))
    else:
        pytest.fail("the error did not come through")


def test_when_a_rank_fails_the_other_is_ended(tmp_path, monkeypatch):
    (tmp_path / "fails_on_one.py").write_text(
        "import os, sys, time\n"
        f"open('{tmp_path}/' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.exit('error: rank 1 has had enough')\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"rank 1 failed(.|\n)*has had enough"):
        links_ranks(["-m", "fails_on_one"], (End(), End()), tmp_path)
    pid = int((tmp_path / "0").read_text() or 0) if (tmp_path / "0").exists() else 0
    assert pid == 0 or not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_cable_carries_no_more_than_its_rate_and_changes_no_bit(tmp_path, capsys):
    """An upper bound: a machine that is busy makes the link slower, never faster."""
    pytest.importorskip("torchrec")
    modes = "modes=replicated,sharded,auto,row_wise"
    fast = over_link(tmp_path / "fast.md", f"rate={NONE}", modes)
    try:
        with cable("200mbit"):
            pass
    except ConfigError as reason:
        pytest.skip(str(reason))
    capsys.readouterr()
    slow = over_link(tmp_path / "slow.md", "rate=200mbit", modes)
    found = re.search(r"rate 200mbit: (\d+\.\d+) Gb/s", capsys.readouterr().out)
    # What leaves the throttle at once is little of what is measured.
    assert found and 0 < float(found[1]) < 1.1 * 0.2
    exact = {found[name]["loss"] for found in (fast, slow) for name in fast if name != "row_wise"}
    assert len(exact) == 1
    assert f"links-{os.getpid()}" not in call("ip", "netns", "list")


SPEC = {"table_rows": [300, 40, 7], "zipf": 1.05, "batch": 24, "batches": 30, "seed": 0}


def test_batches_are_drawn_alike_and_split_over_ranks():
    whole, again = against_rank.draw(SPEC, 0, 1), against_rank.draw(SPEC, 0, 1)
    assert len(whole) == 30
    for (dense, (ids, offsets), labels), other in zip(whole, again, strict=True):
        assert torch.equal(ids, other[1][0]) and torch.equal(dense, other[0])
        assert dense.shape == (24, against_rank.DENSE) and set(labels.tolist()) <= {0.0, 1.0}
        assert len(ids) == 3 * 24 and offsets.tolist() == list(range(73))
        for table, rows in zip(ids.view(3, 24), SPEC["table_rows"], strict=True):
            assert table.min() >= 0 and table.max() < rows
    sizes = [len(against_rank.draw(SPEC, rank, 5)[0][2]) for rank in range(5)]
    assert sum(sizes) == 24 and max(sizes) - min(sizes) == 1
    first = torch.stack([ids.view(3, 24)[0] for _, (ids, _), _ in whole]).flatten()
    assert first.bincount().max() > 10 * len(first) / 300, "no row is hot"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkout_against_itself(tmp_path, ranks):
    out = tmp_path / "against.md"
    words = ["size=small", "batch=64", "ratio=0.1", "steps=6", "lead=2", "repetitions=2"]
    words += ["warmup=12", "modes=data,fused", f"ranks={ranks}", f"against={CHECKOUT}"]
    assert step.main([*words, "optim.embedding_lr=0.1", f"out={out}"]) == 0
    head, records = read_report(out, step.BENCH)
    assert str(CHECKOUT) not in out.read_text() and "against" not in head["settings"]
    blocks = of(records, "block")
    turns = [(block["repetition"], block["side"]) for block in blocks]
    assert turns == [(0, "this"), (0, "other"), (1, "other"), (1, "this")]
    assert all(len(block["step_ms"]) == 6 and min(block["step_ms"]) > 0 for block in blocks)
    (found,) = of(records, "against")
    assert found["mode"] == "data" and found["world_size"] == ranks and found["same"] is True
    assert tuple(found["commits"]) == SIDES
    assert found["commits"]["this"] == found["commits"]["other"]
    for side in SIDES:
        own = [ms for block in blocks if block["side"] == side for ms in block["step_ms"]]
        check_spread(found["step_ms"][side], own)
    threads = {record["thread"]: record for record in of(records, "thread")}
    assert {"training", "planning", "movement", "all", "process"} <= set(threads)
    for name in ("training", "planning", "movement", "all"):
        calls = threads[name]["calls"]
        assert calls["this"] == pytest.approx(calls["other"], rel=0.05)
        assert 0 < threads[name]["package_calls"]["this"] < calls["this"]
    assert not list(Path("/dev/shm").glob("*against*"))
