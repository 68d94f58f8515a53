"""Items of a user's loader as batches, without ranks: forms, bad ones, positions, epochs."""

from __future__ import annotations

import pytest
import torch
from own_items import SCENARIO, Resumable, item, slices

from distcache.data.own import OwnBatches, as_batch
from distcache.errors import ConfigError, DataError


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
