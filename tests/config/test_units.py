"""Sizes and shares with units, and suggestions for values of closed sets."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig

import distcache
from distcache.cli.compose import compose_overrides, to_config
from distcache.errors import ConfigError
from distcache.fitting import own_config

SIZES = {
    "1000": 1000,
    "1kB": 1000,
    "1KB": 1000,
    "2GB": 2 * 10**9,
    "1.5MiB": 3 << 19,
    "2g": 2 << 30,
    "3 TiB": 3 << 40,
    "12B": 12,
}


@pytest.mark.parametrize(("text", "count"), SIZES.items())
def test_sizes_are_read_with_their_units(text: str, count: int) -> None:
    config = to_config(compose_overrides([f"cache.bytes='{text}'"]))
    assert config.cache.bytes == count
    assert own_config("data", "sgd", {"cache.bytes": text}, 1).cache.bytes == count


def test_shares_are_read_in_percent() -> None:
    config = to_config(compose_overrides(["cache.ratio=15%", "optim=momentum_sgd"]))
    assert (config.cache.ratio, config.optim.momentum) == (0.15, 0.9)
    assert own_config("data", "sgd", {"cache.ratio": " 2.5 %"}, 1).cache.ratio == 0.025


def test_collections_take_units_too() -> None:
    tables = [
        EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["f"])
    ]
    sizes = {"1kB": 62, "1KiB": 64, "800B": 50}  # rows of 16 bytes
    for text, rows in sizes.items():
        ebc = distcache.CachedEmbeddingBagCollection(
            tables, device=torch.device("cpu"), optimizer=distcache.optim.SGD(lr=0.1), bytes=text
        )
        assert ebc.summary()["cache_rows"] == rows
    with pytest.raises(ConfigError, match=r"^ratio=150% is a share|^ratio=1.5 is a share"):
        distcache.CachedEmbeddingBagCollection(tables, ratio="150%")


@pytest.mark.parametrize("text", ["1QB", "much", "-1", "GB", "1 2"])
def test_sizes_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^cache.bytes={text}: give bytes, such as 4000000000"):
        own_config("data", "sgd", {"cache.bytes": text}, 1)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"parallel": "hybird"}, r"parallel.mode=hybird is unknown: did you mean hybrid\?"),
        ({"optimizer": "adagard"}, r"optim.name=adagard is unknown: did you mean adagrad\?"),
        ({"settings": {"cache.policy": "lruu"}}, r"cache.policy=lruu is .*: did you mean lru\?"),
        ({"settings": {"cache.policy": "x"}}, "cache.policy=x is unknown: choose lookahead, lfu"),
    ],
)
def test_close_values_are_suggested(given: dict, meant: str) -> None:
    tables = [distcache.TableSpec("t", 9, 4, ("f",))]
    with pytest.raises(ConfigError, match=meant):
        distcache.fit([], tables, torch.nn.Linear(1, 1), **given)
