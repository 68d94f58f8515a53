"""Errors that refuse a step begin with the collection that refused it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import distcache
from distcache.errors import ConfigError, DistcacheError

USER = "CachedEmbeddingBagCollection of table 'user' (90 x 4)"
ITEM = "CachedEmbeddingBagCollection of tables 'item_0', 'item_1', 'item_2' and 1 more"


def collection(*names: str, **settings: Any) -> distcache.CachedEmbeddingBagCollection:
    """Return a collection with a table of 90 rows for each of `names`, all of feature `f`."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=90, embedding_dim=4, feature_names=["f"])
        for name in names
    ]
    settings = {"device": "cpu", "optimizer": distcache.optim.SGD(lr=0.1)} | settings
    return distcache.CachedEmbeddingBagCollection(tables, **settings)


def ids(*values: int) -> KeyedJaggedTensor:
    """Return a batch with one id for each sample of feature `f`."""
    ones = torch.ones(len(values), dtype=torch.int64)
    return KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor(values), ones)


def loss(ebc: torch.nn.Module, *values: int) -> torch.Tensor:
    return ebc(ids(*values)).values().sum()


def step_too_soon(ebc: Any) -> None:
    loss(ebc, 1)
    ebc.step()


def no_step_between(ebc: Any) -> None:
    loss(ebc, 1).backward()
    loss(ebc, 2)


def backward_twice(ebc: Any) -> None:
    total = loss(ebc, 1)
    total.backward(retain_graph=True)
    total.backward()


def backward_too_late(ebc: Any) -> None:
    total = loss(ebc, 1)
    total.backward(retain_graph=True)
    ebc.step()
    total.backward()


def reduce_before_the_last(ebc: Any) -> None:
    for batch in distcache.lookahead([ids(1), ids(2)], ebc, accumulate=2):
        ebc(batch).values().sum().backward()
        ebc.reduce()


def read_ahead(ebc: Any) -> None:
    for batch in distcache.lookahead([ids(1), ids(99)], ebc):
        ebc(batch).values().sum().backward()
        ebc.step()


def use_after_close(ebc: Any) -> None:
    ebc.close()
    loss(ebc, 1)


REFUSED = [
    lambda ebc: loss(ebc, 99),
    *(step_too_soon, no_step_between, backward_twice, backward_too_late),
    *(reduce_before_the_last, read_ahead, use_after_close),
]


@pytest.mark.parametrize("refused", REFUSED)
def test_a_refused_step_names_its_collection(refused: Callable[[Any], None]) -> None:
    both = {USER: collection("user"), ITEM: collection(*(f"item_{at}" for at in range(4)))}
    for title, ebc in both.items():
        with pytest.raises(DistcacheError) as error:
            refused(ebc)
        assert str(error.value).startswith(title)
        assert str(error.value).count(title) == 1


def test_a_cache_that_does_not_hold_the_step_names_its_collection() -> None:
    ebc = collection("user", rows=2)
    with pytest.raises(distcache.errors.StepTooLargeError) as error:
        loss(ebc, 1, 2, 3)
    assert str(error.value).startswith(f"{USER}: step 0 needs 3 slots")
    assert (error.value.rows, error.value.slots) == (3, 2)


def test_a_collection_without_an_optimizer_is_named() -> None:
    ebc = collection("user", optimizer=None)
    with pytest.raises(DistcacheError, match="no optimizer was given") as error:
        loss(ebc, 1).backward()
    assert str(error.value).startswith(f"{USER}: ")


def test_modules_of_one_table_show_its_size() -> None:
    for rows in (10, 20):
        module = distcache.CachedEmbedding(rows, 4, optimizer=distcache.optim.SGD(lr=0.1))
        with pytest.raises(DistcacheError, match=rf"^CachedEmbedding of table .* \({rows} x 4\): "):
            module(torch.tensor([rows]))


def test_a_table_of_too_many_rows_is_refused_by_name() -> None:
    for rows in (2**53 + 1, 2**63, 10**40):
        with pytest.raises(ConfigError, match=f"table 'user' has {rows:,} rows, more than the"):
            distcache.TableSpec("user", rows=rows, dim=4, features=("f",))
        with pytest.raises(ConfigError, match=f"table 'user' has {rows:,} rows, more than the"):
            distcache.CachedEmbedding(rows, 4, name="user", device="meta")
