"""What training loops may not ask for: bad ids, keys and sizes, wrong arguments."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from ebc_cases import (
    assert_same,
    batches,
    cached,
    configs,
    counted,
    draw,
    expected,
    made,
    train,
    two_widths,
    values_of,
    weights_of,
)
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import distcache
from distcache import lookahead
from distcache.errors import ConfigError, DataError, PlanError, StepTooLargeError

pytestmark = pytest.mark.usefixtures("one_thread", "kind")


def test_bad_ids_keys_and_sizes_are_named(kind) -> None:
    ebc, model = made()
    ids = draw(0).sparse_features
    wrong = KeyedJaggedTensor(["f0", "f1", "h", "f2", "f3"], ids.values(), lengths=ids.lengths())
    with pytest.raises(DataError, match=r"feature 'g' of table 't1' is not among .*'h'"):
        ebc(wrong)
    with pytest.raises(DataError, match="feature 'g' of table 't1'"):
        next(lookahead([wrong], ebc))
    values = ids.values().clone()
    values[0] = 400
    beyond = KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths())
    with pytest.raises(DataError, match=r"feature 'f0'.*id 400 is not in table 't0'.*on_bad_id=h"):
        ebc(beyond)
    assert torch.isfinite(values_of(made(on_bad_id="hash")[0](beyond))).all()
    tight, other = made(rows=40)
    with pytest.raises(StepTooLargeError, match=r"set rows=(\d+)") as refusal:
        train(other, tight, lookahead(batches(), tight))
    enough = int(str(refusal.value).split("rows=")[1].split()[0])
    tight, other = made(rows=enough)
    train(other, tight, [draw(0)])
    if kind == "bags":
        with pytest.raises(DataError, match="is_weighted=True, but"):
            cached(is_weighted=True)(ids)
    else:
        with pytest.raises(ConfigError, match="Collection: is_weighted=True: no such setting"):
            cached(is_weighted=True)
    with pytest.raises(DataError, match="no KeyedJaggedTensor"):
        ebc(ids.values())
    train(model, ebc, lookahead(batches(), ebc))  # none of it has done harm
    assert_same(weights_of(model), expected())


def test_wrong_arguments_are_named(kind) -> None:
    ebc, model = made()
    with pytest.raises(ConfigError, match=r"give one of distcache.optim"):
        type(ebc)(configs(), optimizer=torch.optim.SGD)
    other = EmbeddingConfig if kind == "bags" else EmbeddingBagConfig
    with pytest.raises(ConfigError, match=rf"^tables: {other.__name__}\(.* is no torchrec\.Embed"):
        cached(tables=[other(4, 8, "t")])
    for settings, message in (
        ({"rows": 10, "ratio": 0.5}, "at most one of rows, ratio, bytes"),
        ({"policy": "belady"}, "policy='belady' is not 'lookahead' or 'lfu'"),
        ({"policy": "lru", "tail": "lru"}, "tail=lru orders what policy=lookahead leaves open"),
        ({"tail": "frequency"}, "tail=frequency ranks .* give statistics="),
        ({"policy": "lfu", "half_life": 0.5}, "^half_life=0.5 is out of range"),
        ({"lookahead": -1}, "lookahead=-1"),
        ({"store_access": "direct"}, "store_access='direct' is not 'staged' or 'zero_copy'"),
        ({"dtype": torch.float16}, "dtype=torch.float16"),
        ({"window": 3}, "window=3: no such setting: there are rows, ratio, bytes, lookahead"),
        ({"cache_row": 3}, "cache_row=3: no such setting: did you mean rows"),
        ({"tables": []}, "at least one"),
        ({"tables": configs()[0]}, "give a list of Embedding.*Config, not Embedding.*Config"),
        ({"rows": "1000"}, "rows='1000' must be a whole number of at least 1"),
        ({"rows": True}, "rows=True must be a whole number"),
        ({"bytes": "1g"}, "bytes='1g' must be a whole number"),
        ({"batch_size": -1}, "batch_size=-1 must be a whole number of at least 1"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"seed": "x"}, "seed='x' must be a whole number"),
        ({"statistics": 5}, "statistics=5 is neither a folder nor"),
        ({"policy": "lru", "half_life": 5}, "half_life=5 is for counts, which policy=lru does"),
        (
            {"tail": "lru", "half_life": 5},
            "half_life=5 is for counts, which tail=lru does",
        ),
        ({"placement": "spread"}, "placement='spread'"),
        ({"placement": "mixed"}, "needs to know how often rows are looked up"),
        ({"replicated_share": 0.5}, "replicated_share=0.5 is a key of placement=mixed and"),
        ({"placement": "sharded", "reduction": "native"}, "placement=sharded sums them at"),
        ({"state": "home", "reduction": "native"}, "state=home sums them at their homes"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore'"),
        ({"timeout_s": 0}, "timeout_s=0: give seconds above 0"),
        ({"device": "meta"}, "device=meta"),
    ):
        with pytest.raises(ConfigError, match=message):
            cached(**settings)
    with pytest.raises(ConfigError, match="CachedEmbeddingCollection, got list"):
        lookahead([], [ebc])
    with pytest.raises(ConfigError, match="accumulate=0"):
        lookahead([], ebc, accumulate=0)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PlanError, match=r"neither copied nor pickled.*state_dict\(\)"):
            copied(model)
    with pytest.raises(ConfigError, match=r"cannot become cpu, torch.float64"):
        model.double()
    assert model.to("cpu") is model
    with pytest.raises(ConfigError, match="no other group"):
        ebc.optimizer.add_param_group({"params": [torch.zeros(1)]})
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = distcache.nothing


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
            r"the given statistics are .*\(fingerprint [0-9a-f]{16}\).* fingerprint [0-9a-f]{16}\)",
        ),
    ],
)
def test_settings_that_lack_something_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        cached(tables=two_widths(), **settings)
