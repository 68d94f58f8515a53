"""distcache.fit without ranks: items as batches, positions, epochs; wrong settings, what does not
fit, TorchRec configs, the example."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from launching import TORCHRUN, environment, run
from own_items import ROWS, SCENARIO, Resumable, item, slices
from scenarios import SmallNet

import distcache
from distcache.config.keys import flat_settings
from distcache.data.own import OwnBatches, as_batch
from distcache.errors import ConfigError, DataError, StepTooLargeError
from distcache.fitting import own_config, table_specs


def test_global_batch_is_the_concatenation():
    dense, ids, labels = item(3, 0, 1)
    batch = as_batch((dense, ids, labels), SCENARIO.features, 3, 0).among([24, 0, 5], 2)
    assert (batch.global_size, batch.first_sample, batch.largest) == (29, 24, 24)
    assert as_batch((dense, ids, labels), SCENARIO.features, 3, 0).among([0, 0], 0).global_size == 1


BAD_ITEMS = {
    "two": (lambda d, i, y: (d, i), "is a tuple of 2; give"),
    "dict": (lambda d, i, y: {"dense": d}, "is a dict; give"),
    "dense": (lambda d, i, y: (d[0], i, y), r"dense is \[5\]"),
    "labels": (lambda d, i, y: (d, i, y[1:]), r"labels \[23\], ids have 24"),
    "ids": (lambda d, i, y: (d, 7, y), "ids are a int; give a KeyedJaggedTensor"),
    "offsets": (lambda d, i, y: (d, (i[0], i[1][:-6]), y), "ids have 22 samples"),
    "text": (lambda d, i, y: ("abc", i, y), "dense is a str, no tensor"),
    "label 2": (
        lambda d, i, y: (d, i, 2 * torch.ones(24)),
        r"sample 0 .*label 2; 24 of its labels",
    ),
    "label -1": (
        lambda d, i, y: (d, i, y.index_fill(0, torch.tensor(4), -1)),
        "sample 4 .*label -1",
    ),
    "label inf": (lambda d, i, y: (d, i, y[:, None] + torch.inf), "sample 0 .*label inf"),
    "label nan": (lambda d, i, y: (d, i, y.index_fill(0, torch.tensor(23), torch.nan)), "23 .*nan"),
}


@pytest.mark.parametrize(("change", "message"), BAD_ITEMS.values(), ids=BAD_ITEMS)
def test_bad_items_are_named(change, message):
    with pytest.raises(DataError, match=rf"train batch 3 of your loader.*{message}"):
        as_batch(change(*item(3, 0, 1)), SCENARIO.features, 3, 0)


def test_probabilities_and_bools_are_labels():
    dense, ids, labels = item(3, 0, 1)
    for good in (labels / 2, labels.bool(), labels * 0 + 0.25, (labels[:0])):
        size = len(good)
        bags = ids if size else (ids[0][:0], ids[1][:1])
        batch = as_batch((dense[:size], bags, good), SCENARIO.features, 3, 0)
        assert batch.labels.tolist() == good.float().tolist()


def test_other_features():
    dense, _, labels = item(0, 0, 1)
    jagged = SCENARIO.batch(0).ids
    with pytest.raises(DataError, match=r"has the features \['t_0', 't_1', 't_2'\]; .* \['a', 'b'"):
        as_batch((dense, jagged, labels), ("a", "b", "c"), 0, 0)


def test_positions_are_of_trained_batches_and_few():
    own = OwnBatches(Resumable(0, 1), SCENARIO.features, keep=4)
    own.open()
    batches = own.batches(0)
    for _ in range(9):
        next(batches)
    other = OwnBatches(Resumable(0, 1), SCENARIO.features)
    other.resume(own.position(6))
    other.open()
    assert next(other.batches(6)).index == 6 and other._loader.drawn == [6]
    assert len(own._positions) == 4
    with pytest.raises(DataError, match="after 2 steps is not known, only those after 6 to 9"):
        own.position(2)


def test_an_iterator_has_one_epoch():
    own = OwnBatches(iter(slices(0, 1, 2)), SCENARIO.features, epochs=2)
    own.open()
    with pytest.raises(ConfigError, match="epochs=2, but the loader is an iterator"):
        list(own.batches(0))


def test_a_sampler_hears_of_its_epoch():
    class Sampler:
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Loader(list):
        sampler = Sampler()

    own = OwnBatches(Loader(slices(0, 1, 2)), SCENARIO.features, epochs=3)
    own.open()
    assert len(list(own.batches(0))) == 6 and Sampler.epochs == [0, 1, 2]


def test_wrong_settings_are_named(tmp_path):
    def start(**changes):
        settings = changes.pop("settings", {})
        return distcache.fit([], SCENARIO.tables, SmallNet(5, 24), settings=settings, **changes)

    for changes, message in (
        ({"parallel": "fast"}, "parallel.mode=fast"),
        ({"optimizer": "lion"}, "optim.name=lion"),
        ({"settings": {"cache.row": 3}}, "cache.row: no such key: did you mean cache.rows"),
        ({"settings": {"cache": 3}}, "cache=3: cache is a section"),
        ({"settings": {"cache": {"row": 3}}}, "cache.row: no such key: did you mean cache.rows"),
        ({"settings": {5: 3}}, "5: no such key"),
        ({"settings": ["cache.rows"]}, r"settings=\['cache.rows'\] is no mapping"),
        ({"settings": {"model.pooling": "mean"}}, r"settings\['model.pooling'\] means nothing"),
        ({"settings": {"model": {"embedding_dim": 4}}}, r"\['model.embedding_dim'\] means nothing"),
        ({"settings": {"data.zipf": 2.0}}, r"\['data.zipf'\] means nothing to batches of your own"),
        ({"settings": {"parallel.mode": "host"}}, r"\['parallel.mode'\]: .* argument parallel="),
        ({"settings": {"optim": {"name": "sgd"}}}, r"\['optim.name'\]: .* argument optimizer="),
        ({"settings": {"cache.rows": "many"}}, "cache.rows=many: give a whole number or null"),
        ({"settings": {"cache.rows": 3, "cache.ratio": 0.1}}, "contradict each other"),
        (
            {"settings": {"cache.placement": "auto"}},
            r"auto .* settings\['data.global_batch_size'\]",
        ),
        ({"settings": {"cache.placement": "mixed"}}, r"mixed .* give settings\['data.global_b"),
        ({"settings": {"cache.split": "by_curve"}}, r"cache.split=by_curve .* give settings"),
        ({"settings": {"cache.policy": "static"}}, r"cache.policy=static .* give settings"),
        ({"settings": {"trainer.eval_every": 3}}, "there is no eval_loader"),
        (
            {"settings": {"data.batching": "hot_cold", "cache.statistics": "x"}},
            "batches of your own loader",
        ),
        ({"settings": {"trainer.resume": str(tmp_path / "no")}}, "is no folder"),
        ({"epochs": 0}, "epochs=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(**changes)
    with pytest.raises(ConfigError, match="tables is empty"):
        distcache.fit([], [], SmallNet(5, 24))


@pytest.mark.parametrize("settings", [{"run.digest": False}, {"run": {"digest": "false"}}])
def test_words_that_python_has_as_booleans(settings):
    config = own_config("data", "sgd", flat_settings(settings), 1)
    assert config.run.digest == "false"


def test_the_batch_size_may_stand_in_its_section():
    settings = {"cache.placement": "auto", "data": {"global_batch_size": 64}}
    assert own_config("data", "sgd", flat_settings(settings), 1).data.global_batch_size == 64


def test_keys_without_use_are_told_by_fit_too(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("distcache"), "propagate", True)
    caplog.set_level(logging.INFO)
    own = {"optim.betas": [0.5, 0.6], "cache": {"placement": "sharded"}, "run.save": False}
    distcache.fit(
        slices(0, 1, 2),
        SCENARIO.tables,
        SCENARIO.model(),
        settings=ROWS | own | {"run.dir": str(tmp_path)},
    )
    # A set, for pytest may listen to a logger that did not propagate besides.
    assert {line for line in caplog.messages if "without use" in line} == {
        "without use in this mode, on 1 rank(s): cache.placement=sharded, optim.betas=[0.5, 0.6]"
    }


def test_what_does_not_fit_is_named(tmp_path):
    class Column(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = SCENARIO.model()

        def forward(self, dense, pooled):
            return self.net(dense, pooled).unsqueeze(1)

    settings = ROWS | {"run.dir": str(tmp_path), "run.save": False}
    (tmp_path / "bad_lines.json").touch()  # of an earlier run in this folder
    for mode in ("data", "hybrid"):
        with pytest.raises(ConfigError, match=r"returned \[\d+, 1\] for \d+ samples.*squeeze"):
            distcache.fit(slices(0, 1), SCENARIO.tables, Column(), parallel=mode, settings=settings)
    assert not (tmp_path / "bad_lines.json").exists()
    few = settings | {"cache.rows": 20}
    with pytest.raises(StepTooLargeError, match="or lower the batch size of your loaders"):
        distcache.fit(slices(0, 1), SCENARIO.tables, SCENARIO.model(), settings=few)


def test_torchrec_configs_are_tables():
    from torchrec import EmbeddingBagConfig, PoolingType

    config = EmbeddingBagConfig(
        name="t", embedding_dim=8, num_embeddings=50, feature_names=["a"], pooling=PoolingType.MEAN
    )
    assert table_specs([config]) == [distcache.TableSpec("t", 50, 8, ("a",), "mean")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_runs(checkout, tmp_path, ranks):
    launcher = [sys.executable]
    if ranks > 1:
        launcher = [*TORCHRUN, "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    done = run(
        [*launcher, str(checkout / "examples" / "own_data.py")],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "20 steps, final loss 0." in done.stdout
