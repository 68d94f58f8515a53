"""The bench of batchings: hot samples by size of the hot set, runs side by side, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from bench_checks import of, read_report

from distcache.bench import batching
from distcache.bench.batching_tables import tables


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The records of a small report over two sources."""
    folder = tmp_path_factory.mktemp("bench")
    rng = np.random.default_rng(0)
    users = folder / "users.txt"
    users.write_text(
        "".join(
            " ".join(map(str, [user, *np.unique(rng.zipf(1.3, 20) % 300)])) + "\n"
            for user in range(100)
        )
    )
    out = folder / "batching.md"
    given = ["data=synthetic,interactions", f"interactions={users}", "scale=5000", "samples=3000"]
    given += ["ratio=0.5", "batch=64", "eval_steps=2", "hot=0.05,0.3", f"out={out}"]
    assert batching.main(given) == 0
    return read_report(out, tables)[1]


def test_more_hot_rows_make_more_hot_samples(report):
    shares = of(report, "hot_samples")
    assert [(r["source"], r["share"]) for r in shares] == [
        (source, share) for source in ("synthetic", "interactions") for share in (0.05, 0.3)
    ]
    for few, many in (shares[:2], shares[2:]):
        assert 0 < few["hot_rows"] < many["hot_rows"] <= many["distinct"] <= many["rows"]
        assert 0 < few["hot_lookups"] < many["hot_lookups"] <= 1
        assert 0 <= few["hot_samples"] < many["hot_samples"] < 1
        assert many["hot_samples"] < many["hot_lookups"]


def test_batchings_train_as_many_samples(report):
    runs = of(report, "run")
    assert [(r["source"], r["batching"]) for r in runs] == [
        (source, kind) for source in ("synthetic", "interactions") for kind in batching.BATCHINGS
    ]
    for plain, apart, split in (runs[:3], runs[3:]):
        assert plain["samples"] == apart["samples"] == split["samples"]
        assert split["steps"] == plain["steps"] and 0 < split["hot_samples"] < 1
        assert split["final_loss"] == pytest.approx(plain["final_loss"], rel=1e-4)
        assert plain["hot_steps"] is None
        assert apart["hot_steps"] + apart["cold_steps"] == apart["steps"] >= plain["steps"]
        assert apart["hot_rows_fetched"] == apart["hot_host_bytes"] == 0
        assert apart["evaluations"] > plain["evaluations"] == 1
        assert apart["wall_s"] > apart["train_s"] > 0


def test_wrong_options_are_refused(capfd):
    assert batching.main(["data=amazon"]) == 1
    assert batching.main(["data=interactions"]) == 1
    assert batching.main(["batchings=hot"]) == 1
    assert batching.main(["hot=1.5"]) == 1
    assert batching.main(["samples=0"]) == 1
    assert "give interactions=<file>" in capfd.readouterr().err
