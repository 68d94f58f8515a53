"""The bench of links: contenders on loopback and over a throttled cable, at a small size."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from bench_checks import check_spread, of, read_report
from launching import CHECKOUT

from distcache.bench import links, links_cable, links_probe
from distcache.bench.links_cable import LOOPBACK, NONE, NotPermittedError, cable
from distcache.bench.links_ranks import rank_environment, run_ranks
from distcache.bench.links_records import cell_records
from distcache.bench.links_tables import tables
from distcache.data.synthetic import ZipfTables
from distcache.errors import ConfigError

BATCH, WIDTH = 32, 8
SMALL = ["size=small", "scale=8", f"batch={BATCH}", f"width={WIDTH}", "steps=2", "lead=1"]
SMALL += ["warmup=3", "repetitions=2", "batches=multi_hot"]


@pytest.fixture(autouse=True)
def children(monkeypatch):
    """Ranks import this checkout, and take one thread."""
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def bench(out: Path, *arguments: str) -> list[dict]:
    assert links.main([*SMALL, *arguments, f"out={out}"]) == 0
    return read_report(out, tables)[1]


def test_contenders_on_loopback(tmp_path):
    pytest.importorskip("torchrec")
    records = bench(tmp_path / "links.md", "rates=none", "modes=table_wise,replicated,sharded")
    (batches,), (link,) = of(records, "batches"), of(records, "link")
    bags = (3, 2, 1, 12, 1, 1)
    assert batches["ids"] == BATCH * sum(bags) and batches["pooled"] == BATCH * len(bags)
    assert batches["rows"] == 25000 + 5000 + 1000 + 200 + 10 + 3
    whole = ZipfTables((200000, 5000, 1000, 200, 10, 3), 1.05, 0)
    expected = sum(whole.expected_distinct(at, BATCH * bag) for at, bag in enumerate(bags))
    assert batches["whole_distinct"] == pytest.approx(expected)
    assert batches["distinct"] < batches["whole_distinct"]
    assert link["nodes"] == 2 and link["broadcast_bits_per_second"] > 0
    found = {record["mode"]: record for record in of(records, "result")}
    assert list(found) == ["table_wise", "replicated", "sharded"]
    assert found["replicated"]["loss"] == found["sharded"]["loss"]
    assert found["table_wise"]["loss"] == pytest.approx(found["sharded"]["loss"], rel=1e-5)
    # Each rank sends the pooled vectors of its tables to the other's samples, and takes back as
    # many gradients: the mean over two ranks is one vector for each table and sample.
    sent = {mode: record["sent_per_step"] for mode, record in found.items()}
    assert sent["table_wise"]["collective_bytes"] == BATCH * len(bags) * WIDTH * 4
    assert 0 < sent["sharded"]["collective_bytes"] < sent["replicated"]["collective_bytes"]
    assert len({record["dense_collective_bytes"] for record in sent.values()}) == 1
    for mode, record in found.items():
        assert record["nodes"] == 2
        assert record["placement"] == (None if mode == "table_wise" else mode)
        assert (record["exchange_hidden"] is None) == (mode == "table_wise")


def turn(mode: str, repetition: int, step_ms: list[float], **more) -> dict:
    stages = {"stage_ms": {}, "stage_hidden_ms": {}}
    base = {"kind": "turn", "mode": mode, "repetition": repetition, "step_ms": step_ms}
    return base | stages | more


def test_results_are_those_of_the_turns():
    stages = {
        "stage_ms": {"fill": 1.0, "share_late": 2.0, "sync": 5.0, "apply": 9.0},
        "stage_hidden_ms": {"fill": 1.0, "ingest": 7.0},
    }
    mode = {"kind": "mode", "nodes": 2, "sent_per_step": {}, "loss": 0.5}
    found = [
        turn("yard", 0, [10.0, 12.0, 50.0]),
        turn("own", 0, [6.0, 6.0, 9.0], **stages),
        turn("own", 1, [8.0, 8.0, 8.0], **stages),
        turn("yard", 1, [16.0, 16.0, 1.0]),
        mode | {"mode": "yard"},
        mode | {"mode": "own", "placement": "sharded"},
    ]
    records = cell_records(found, {"rate": NONE, "batches": "one_hot"}, "yard", 24)
    yard, own = of(records, "result")
    assert (yard["mode"], own["mode"]) == ("yard", "own")
    check_spread(own["samples_per_second"], [4000.0, 3000.0])
    check_spread(own["ratio"], [2.0, 2.0])
    check_spread(yard["ratio"], [1.0, 1.0])
    assert own["exchange_ms"] == 8.0 and own["exchange_hidden"] == 1 / 8
    assert yard["exchange_ms"] is yard["exchange_hidden"] is None
    assert all(record["rate"] == NONE and record["batches"] == "one_hot" for record in records)
    assert len(of(records, "turn")) == 4


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("rates=fast", "rates=fast"),
        ("rates=0gbit", "rates=0gbit"),
        ("batches=hot", "batches=hot"),
        ("size=huge", "size=huge"),
        ("modes=sharded,nonsense", "nonsense"),
        ("steps=0", "steps=0"),
    ],
)
def test_bad_values_are_refused(capsys, argument, says):
    assert links.main([argument]) == 1
    assert says in capsys.readouterr().err


def test_without_iproute2_a_throttled_rate_is_left_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(links_cable.shutil, "which", lambda word: None)
    monkeypatch.setattr(links, "measure_rate", lambda options, rate, ends, more: [{"kind": rate}])
    assert links.main([*SMALL, "rates=none,1gbit", f"out={tmp_path / 'x.md'}"]) == 0
    records = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records[1:]] == ["batches", NONE, "refused"]
    assert records[-1]["rate"] == "1gbit" and "iproute2" in records[-1]["why"]
    assert "iproute2" in (tmp_path / "x.md").read_text()
    assert links.main([*SMALL, "rates=1gbit"]) == 1  # nothing is left to measure
    assert "iproute2" in capsys.readouterr().err


def test_without_root_there_is_no_cable(monkeypatch):
    monkeypatch.setattr(links_cable.shutil, "which", lambda word: word)
    monkeypatch.setattr(links_cable.os, "geteuid", lambda: 1000)
    with pytest.raises(NotPermittedError, match="root"), cable("1gbit"):
        pass


def test_a_step_that_is_refused_leaves_no_namespace(monkeypatch):
    calls = []

    def call(*words):
        calls.append(words)
        return subprocess.CompletedProcess(words, int(words[0] == "tc"), "", "not for you\n")

    monkeypatch.setattr(links_cable.shutil, "which", lambda word: word)
    monkeypatch.setattr(links_cable.os, "geteuid", lambda: 0)
    monkeypatch.setattr(links_cable, "_call", call)
    says = r"tc -n .* is not permitted here: not for you"
    with pytest.raises(NotPermittedError, match=says), cable("1gbit"):
        pass
    made = [words[3] for words in calls if words[:3] == ("ip", "netns", "add")]
    assert len(made) == 2 and str(os.getpid()) in made[0]
    assert [words[3] for words in calls if words[:3] == ("ip", "netns", "delete")] == made


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_cable_is_throttled_at_both_ends_and_goes_with_an_error(error):
    def use() -> None:
        with cable("100mbit") as ends:
            assert str(os.getpid()) in namespaces()
            for end in ends:
                shown = ["tc", "qdisc", "show", "dev", end.interface]
                done = subprocess.run([*end.prefix, *shown], capture_output=True, text=True)
                assert "tbf" in done.stdout and "100Mbit" in done.stdout
            raise error

    try:
        use()
    except error:
        assert f"links-{os.getpid()}" not in namespaces()
    except NotPermittedError as reason:
        pytest.skip(str(reason))
    else:
        pytest.fail("the error did not come through")


def test_ranks_are_two_nodes():
    first, second = (rank_environment(rank, LOOPBACK, 1234) for rank in (0, 1))
    assert first["LOCAL_WORLD_SIZE"] == second["LOCAL_WORLD_SIZE"] == "1"
    assert (first["GROUP_RANK"], second["GROUP_RANK"]) == ("0", "1")
    assert first["MASTER_PORT"] == second["MASTER_PORT"] == "1234"
    assert first["GLOO_SOCKET_IFNAME"] == "lo"


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
        run_ranks(LOOPBACK, NONE, ["fails_on_one"], tmp_path)
    pid = int((tmp_path / "0").read_text() or 0) if (tmp_path / "0").exists() else 0
    assert pid == 0 or not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_cable_carries_no_more_than_its_rate(tmp_path):
    """An upper bound: a machine that is busy makes the link slower, never faster."""
    out = tmp_path / "speed.json"
    try:
        with cable("200mbit") as ends:
            run_ranks(ends, "200mbit", [links_probe.MODULE, str(out)], tmp_path)
    except NotPermittedError as reason:
        pytest.skip(str(reason))
    found = json.loads(out.read_text())
    # 32 MiB, of which the burst of the throttle leaves at once.
    assert 0 < found["broadcast_bits_per_second"] < 1.05 * 200e6
    assert 0 < found["all_to_all_bits_per_second"] < 1.05 * 200e6
    assert found["nodes"] == 2


@pytest.mark.slow
def test_contenders_over_a_cable(tmp_path):
    pytest.importorskip("torchrec")
    modes = "modes=table_wise,row_wise,replicated,sharded,auto"
    records = bench(tmp_path / "links.md", "rates=none,500mbit", modes)
    if of(records, "refused"):
        pytest.skip(of(records, "refused")[0]["why"])
    found = of(records, "result")
    assert [record["rate"] for record in found] == [NONE] * 5 + ["500mbit"] * 5
    for record in found:
        np.testing.assert_allclose(record["loss"], found[0]["loss"], rtol=1e-5)
    exact = {record["loss"] for record in found if record["placement"] is not None}
    assert len(exact) == 1  # the link changes no bit, nor does the placement
    assert f"links-{os.getpid()}" not in namespaces()
