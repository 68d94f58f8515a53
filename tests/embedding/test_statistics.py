"""A collection with statistics: the bits of one without, with fewer fetches; one and two ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ebc_cases import batches, kind_here, of_kind, part
from ebc_counts import counted, two_widths
from ebc_models import Pooled, cached
from ebc_training import assert_same, train, weights_of
from ranks import run_ranks

from distcache import lookahead
from distcache.errors import ConfigError
from distcache.popularity.statistics import write_statistics


def run(rank: int, size: int, name: str = "adagrad", restart: int = 0, **settings):
    """Losses, weights and fetched rows; `restart`: steps after which all is loaded anew."""
    data = [part(batch, rank, size) for batch in batches(10, tables=two_widths())]
    settings = {"rows": 260, "timeout_s": 60} | settings
    ebc = cached(name, two_widths(), **settings)
    model = Pooled(ebc)
    losses = []
    if restart:
        losses = train(model, ebc, lookahead(data[:restart], ebc))
        saved = {key: value.clone() for key, value in model.state_dict().items()}
        ebc.load_state_dict({k[4:]: v for k, v in saved.items() if k.startswith("ebc.")})
    losses += train(model, ebc, lookahead(data[restart:], ebc))
    weights = {name: value for name, value in weights_of(model).items() if name.startswith("ebc")}
    fetched = sum(rows.counts.rows_fetched for rows in ebc.tables.rows)
    hot = sum(len(own) for own in ebc.tables.engine._warm[0] if own is not None)
    slots = [rows.cache.slots for rows in ebc.tables.rows]
    ebc.close()
    return losses, weights, fetched, hot, slots


def same_bits(rank: int, size: int, folder: str) -> dict[str, int]:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo")
    fetched = {}
    for name in ("adagrad", "adam") if size == 1 else ("adam",):
        losses, weights, plain, _, slots = run(rank, size, name, policy="lru")
        for how, settings in {
            "warm": {"statistics": folder, "policy": "lru"},
            "half": {"statistics": folder, "warm_start": 0.5},
            "static": {"statistics": counted(), "policy": "static", "batch_size": 24},
            "tail": {"statistics": folder, "tail": "frequency"},
            "by_curve": {"statistics": folder, "split": "by_curve", "batch_size": 24},
            "given": {"split": {"t0": 150, "g": 60, "t2": 130}, "rows": None},
            "loaded": {"statistics": folder, "restart": 4},
        }.items():
            own_losses, own, moved, hot, own_slots = run(rank, size, name, **settings)
            assert own_losses == losses, how
            assert_same(own, weights)
            assert (hot > 0) == (how != "given"), how
            assert (own_slots == slots) == (how not in ("given", "by_curve")), how
            fetched[how] = moved
        assert fetched["warm"] < plain
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return fetched


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("world", [1, 2])
def test_statistics_change_no_bit(world: int, tmp_path) -> None:
    write_statistics(tmp_path, counted())
    run_ranks(of_kind, world, kind_here(), same_bits, str(tmp_path), timeout=200)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warm_start": 0.5}, r"warm_start=0\.5 fills .* give statistics="),
        ({"warm_start": 2}, r"warm_start=2 is a share"),
        ({"order": "popularity"}, r"order='popularity': this setting went, for .* leave it out"),
        ({"admission": True}, r"admission=True: this setting went, for .* leave it out"),
        ({"policy": "static"}, r"policy=static ranks .* give statistics="),
        ({"tail": "frequency"}, r"tail=frequency ranks .* give statistics="),
        ({"split": "by_curve"}, r"split=by_curve needs .* give statistics="),
        ({"split": 3}, r"split=3 is unknown"),
        ({"split": {"t9": 3}}, r"^split: t9=3 names no table: choose from t0, t1, t2"),
        (
            {"statistics": "/nowhere"},
            r"statistics=/nowhere holds neither.* -m distcache.analyze or distcache.preprocess",
        ),
        (
            {"statistics": counted(), "split": "by_curve"},
            r"split='by_curve' needs .* give batch_size=",
        ),
        (
            {"statistics": replace(counted(), tables=counted().tables[:2])},
            r"the given statistics \(fingerprint [0-9a-f]{16}\).* fingerprint [0-9a-f]{16}\)",
        ),
    ],
)
def test_settings_that_lack_something_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        cached(tables=two_widths(), **settings)
