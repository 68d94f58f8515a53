"""The bench of links: the step's bench on loopback and over a throttled cable, at a small size."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from benchmark_checks import of, read_report
from launching import CHECKOUT

from benchmarks import links, step
from benchmarks.links import NONE, cable
from benchmarks.ranks import End, run_ranks
from distcache.errors import ConfigError

BATCH, WIDTH = 32, 8
SMALL = ["size=small", "data.bag_size=[3,2,1,12,1,1]", f"batch={2 * BATCH}", f"width={WIDTH}"]
SMALL += ["steps=2", "lead=1", "warmup=3", "warmup_most=6", "repetitions=2", "ratio=0.2"]
SMALL += ["optim.embedding_lr=0.1"]


@pytest.fixture(autouse=True)
def children(monkeypatch):
    """Ranks import this checkout, and take one thread."""
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def call(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout


def bench(out: Path, *arguments: str) -> dict[str, dict]:
    assert links.main([*SMALL, *arguments, f"out={out}"]) == 0
    return {record["mode"]: record for record in of(read_report(out, step.BENCH)[1], "mode")}


def test_contenders_on_loopback(tmp_path, capsys):
    pytest.importorskip("torchrec")
    found = bench(tmp_path / "links.md", "rate=none", "modes=table_wise,replicated,sharded")
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
        run_ranks(["-m", "fails_on_one"], (End(), End()), tmp_path)
    pid = int((tmp_path / "0").read_text() or 0) if (tmp_path / "0").exists() else 0
    assert pid == 0 or not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_cable_carries_no_more_than_its_rate_and_changes_no_bit(tmp_path, capsys):
    """An upper bound: a machine that is busy makes the link slower, never faster."""
    pytest.importorskip("torchrec")
    modes = "modes=replicated,sharded,auto,row_wise"
    fast = bench(tmp_path / "fast.md", f"rate={NONE}", modes)
    try:
        with cable("200mbit"):
            pass
    except ConfigError as reason:
        pytest.skip(str(reason))
    capsys.readouterr()
    slow = bench(tmp_path / "slow.md", "rate=200mbit", modes)
    found = re.search(r"rate 200mbit: (\d+\.\d+) Gb/s", capsys.readouterr().out)
    # What leaves the throttle at once is little of what is measured.
    assert found and 0 < float(found[1]) < 1.1 * 0.2
    exact = {found[name]["loss"] for found in (fast, slow) for name in fast if name != "row_wise"}
    assert len(exact) == 1
    assert f"links-{os.getpid()}" not in call("ip", "netns", "list")
