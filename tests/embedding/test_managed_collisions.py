"""TorchRec's managed collisions around our collections: the numbers of TorchRec's own on one rank,
and errors where a map would differ between ranks, or from the map of a plan."""

from __future__ import annotations

from typing import Any
from unittest import mock

import ebc_cases
import pytest
import torch
from ebc_cases import Clicks, Pooled, cached, job, loss_of, part, plain_tables, ranks
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules import mc_modules
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from distcache import lookahead
from distcache.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH, DENSE = 16, 16, ebc_cases.DENSE
ROWS = {"t0": 24, "t1": 16}
KEYS = ("g", "f0", "f1")
POLICIES = {"lfu": mc_modules.LFU_EvictionPolicy, "lru": mc_modules.LRU_EvictionPolicy}


def tables() -> list[Any]:
    """`t0`, read by `f0`, and `t1`, by `f1` and `g`, which come in another order."""
    config = EmbeddingBagConfig if ebc_cases._kind == "bags" else EmbeddingConfig
    features = {"t0": ["f0"], "t1": ["f1", "g"]}
    return [
        config(name=name, num_embeddings=rows, embedding_dim=8, feature_names=features[name])
        for name, rows in ROWS.items()
    ]


def draw(step: int, size: int = BATCH) -> Clicks:
    """A batch whose ids, of 2^40, change with the steps: more than a table has rows."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(KEYS) * size,), generator=generator)
    drawn = torch.rand(int(lengths.sum()), generator=generator) ** 2
    ids = ((drawn * 20).long() + step) * 7919 % (1 << 40)
    dense = torch.randn(size, DENSE, generator=generator, dtype=torch.float64)
    label = (dense[:, :1] > 0).double()
    return Clicks(dense, KeyedJaggedTensor(list(KEYS), ids, lengths=lengths), label)


class Rows(nn.Module):
    """TorchRec's wrapper, as a collection that returns rows alone."""

    def __init__(self, policy: str, collection: nn.Module) -> None:
        super().__init__()
        cpu = torch.device("cpu")
        maps = {
            name: mc_modules.MCHManagedCollisionModule(
                rows, cpu, POLICIES[policy](), eviction_interval=4, input_hash_size=1 << 40
            )
            for name, rows in ROWS.items()
        }
        if ebc_cases._kind == "bags":
            self.embedding_bag_configs = collection.embedding_bag_configs
            configs = collection.embedding_bag_configs()
            kind = ManagedCollisionEmbeddingBagCollection
        else:
            configs = collection.embedding_configs()
            kind = ManagedCollisionEmbeddingCollection
        self.embedding_configs = lambda: configs
        mcc = mc_modules.ManagedCollisionCollection(maps, configs)
        self.around = kind(collection, mcc)

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        # TorchRec's own collections return float32 whatever their weights are.
        with mock.patch.object(torch.Tensor, "float", lambda tensor: tensor):
            return self.around(ids)[0]


def model_over(policy: str, collection: nn.Module) -> nn.Module:
    return Pooled(Rows(policy, collection)).double()


def train(model: nn.Module, optimizers: list[Any], batches: list[Clicks]) -> list[float]:
    losses = []
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def evaluated(model: nn.Module) -> Tensor:
    model.eval()
    batch = draw(99)
    with torch.no_grad():
        return model(batch.dense_features, batch.sparse_features)


def small_collection(**settings: Any) -> Any:
    return cached("sgd", tables(), dtype=torch.float64, rows=40, timeout_s=60, **settings)


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_are_those_of_torchrec(kind, policy):
    collection = small_collection()
    ours = model_over(policy, collection)
    plain = model_over(policy, plain_tables(tables()))
    plain.load_state_dict(ours.state_dict())
    batches = [draw(step) for step in range(STEPS)]
    dense = torch.optim.SGD(ours.parameters(), lr=0.1)
    found = train(ours, [collection.optimizer, dense], batches)
    expected = train(plain, [torch.optim.SGD(plain.parameters(), lr=0.1)], batches)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(evaluated(ours), evaluated(plain), rtol=0, atol=1e-12)
    states = ours.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(states[name], value, rtol=0, atol=1e-12, msg=name)
    collection.close()


@pytest.mark.parametrize("whole_model", [False, True])
def test_lookahead_is_refused(kind, whole_model):
    collection = small_collection()
    model = model_over("lfu", collection)
    with pytest.raises(ConfigError, match="before TorchRec's managed collisions map them"):
        lookahead([draw(0)], model if whole_model else collection)
    collection.close()


@job
def train_on_ranks(rank: int, size: int) -> dict:
    collection = small_collection(device="cpu")
    model = model_over("lfu", collection)
    batch = part(draw(0), rank, size)
    with pytest.raises(ConfigError) as caught:
        loss_of(model, batch)
    logits = evaluated(model)
    collection.close()
    return {"error": str(caught.value), "evaluates": bool(torch.isfinite(logits).all())}


def test_training_on_several_ranks_is_refused():
    for found in ranks(train_on_ranks):
        assert "on 2 ranks one row would stand for different ids" in found["error"]
        assert found["evaluates"]


def test_removed_setting_is_refused():
    with pytest.raises(ConfigError, match=r"reset_evicted: this key was removed \(TorchRec's"):
        small_collection(reset_evicted=True)
