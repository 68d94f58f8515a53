"""Copies of a collection, of which weight averaging and teachers are made: they read its tables."""

from __future__ import annotations

import copy
import gc
import logging
import weakref

import pytest
import torch
from ebc_cases import (
    Pooled,
    assert_same,
    batches,
    cached,
    configs,
    dense_optimizer,
    dlrm,
    draw,
    expected,
    job,
    key_of_tables,
    loss_of,
    made,
    mine,
    ranks,
    train,
    values_of,
    weights_of,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrec import EmbeddingBagConfig

import distcache
from distcache import CachedEmbeddingBagCollection, lookahead
from distcache.errors import PlanError

pytestmark = pytest.mark.usefixtures("one_thread", "kind")

OTHER = 900
"""A batch that nobody trains on."""


def outputs(model: nn.Module, seed: int = OTHER) -> torch.Tensor:
    """What a model says of a batch."""
    batch = draw(seed)
    with torch.no_grad():
        return model(batch.dense_features, batch.sparse_features)


def test_a_copy_reads_what_the_first_has_learned_and_changes_nothing(caplog) -> None:
    ebc, model = made()
    with caplog.at_level(logging.WARNING, "distcache"):
        twin = copy.deepcopy(ebc)
        again = copy.deepcopy(twin)
    assert len(caplog.messages) == 1 and "distcache.save" in caplog.messages[0]
    assert type(twin) is type(ebc) and twin.trainable is not ebc.trainable
    twin.eval()
    dense = dense_optimizer(model)
    for number, batch in enumerate(lookahead(batches(), ebc)):
        train(model, ebc, [batch], dense)
        with torch.no_grad():
            mine, theirs = (own(draw(OTHER).sparse_features) for own in (ebc, again))
        assert torch.equal(values_of(mine), values_of(theirs))
        if number % 3 == 0:  # of the batch that is open, or of one of its own
            found = twin((batch if number % 2 else draw(OTHER)).sparse_features)
            assert not values_of(found).requires_grad
    assert_same(weights_of(model), expected())
    assert_same(weights_of(twin), weights_of(ebc))
    twin.close()
    twin.load_state_dict(weights_of(ebc))
    assert_same(weights_of(model), expected())


def test_a_copy_is_not_trained() -> None:
    ebc, model = made()
    twin = copy.deepcopy(model)
    with pytest.raises(PlanError, match=r"copy .*cannot be trained.*eval\(\).*no_grad"):
        loss_of(twin, draw(1)).backward()
    loss_of(twin.eval(), draw(1)).backward()
    for step in (twin_of(twin).step, copy.deepcopy(ebc).step):
        with pytest.raises(PlanError, match="cannot step"):
            step()
    frozen = copy.deepcopy(model).requires_grad_(False)  # a teacher, in training mode
    dense = dense_optimizer(model)
    for batch in lookahead(batches(), ebc):
        loss = loss_of(frozen, batch)
        assert not loss.requires_grad
        train(model, ebc, [batch], dense)
    assert_same(weights_of(model), expected())


def twin_of(model: nn.Module) -> nn.Module:
    """The collection of a model."""
    return model.ebc if isinstance(model, Pooled) else model.sparse_arch.embedding_bag_collection


@pytest.mark.parametrize("ahead", [True, False])
def test_a_teacher_of_the_same_batch_changes_nothing(ahead: bool) -> None:
    """It comes first, so it opens the step; all its parameters are frozen."""
    ebc, model = made()
    teacher = copy.deepcopy(model).requires_grad_(False)
    both, dense = nn.ModuleList([teacher, model]), dense_optimizer(model)
    stream = lookahead(batches(), both) if ahead else batches()
    for batch in stream:
        with torch.no_grad():
            told = teacher(batch.dense_features, batch.sparse_features)
        dense.zero_grad()
        logits = model(batch.dense_features, batch.sparse_features)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.to(logits))
        (loss + 0.0 * (logits - told).square().mean()).backward()
        ebc.step()
        dense.step()
    assert_same(weights_of(model), expected())


def test_a_teacher_may_read_another_batch_between_forward_and_backward() -> None:
    ebc, model = made()
    teacher, dense = copy.deepcopy(model).eval(), dense_optimizer(model)
    for batch in lookahead(batches(), ebc):
        dense.zero_grad()
        loss = loss_of(model, batch)
        loss_of(teacher, draw(OTHER))
        loss.backward()
        ebc.step()
        dense.step()
    assert_same(weights_of(model), expected())


def test_averages_of_a_whole_model_are_of_its_dense_part() -> None:
    ebc, model = made()
    plain = [p.detach().clone() for p in model.parameters()]
    average = AveragedModel(model)
    moving = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    dense, sums = dense_optimizer(model), [torch.zeros_like(p) for p in plain]
    for count, batch in enumerate(lookahead(batches(), ebc), 1):
        train(model, ebc, [batch], dense)
        average.update_parameters(model)
        moving.update_parameters(model)
        weight = 1.0 if count == 1 else 0.1
        for own, mean, parameter in zip(plain, sums, model.parameters(), strict=True):
            own.lerp_(parameter.detach(), weight)
            mean.add_(parameter.detach())
    for mean, of in zip(sums, average.module.parameters(), strict=True):
        torch.testing.assert_close(of, mean / count)
    for own, of in zip(plain, moving.module.parameters(), strict=True):
        torch.testing.assert_close(of, own)
    assert_same(weights_of(model), expected())
    other = dlrm(ebc)
    for average_of in (average, moving):
        state = {
            k: v for k, v in average_of.module.state_dict().items() if key_of_tables() not in k
        }
        other.load_state_dict(state, strict=False)
        assert torch.equal(outputs(average_of.eval()), outputs(other))
    assert_same(weights_of(model), expected())


def test_checkpoints_have_the_tables_of_a_model_with_its_teacher_once(tmp_path) -> None:
    ebc, model = made()
    both = nn.ModuleDict({"teacher": copy.deepcopy(model), "student": model})
    train(model, ebc, lookahead(batches(4), both))
    distcache.save(tmp_path / "saved", both, step=4)
    kept = weights_of(both)
    train(model, ebc, batches(2))
    assert distcache.load(tmp_path / "saved", both) == (4, {})
    assert_same(weights_of(both), kept)
    assert ebc.tables.counts == [4] * len(configs())


def test_copies_on_meta_and_before_the_first_use() -> None:
    ebc = cached(device="meta", init="torch")
    twin = copy.deepcopy(ebc)
    ids = draw(1).sparse_features
    assert values_of(twin(ids)).is_meta
    ebc.to_empty(device="cpu")
    twin.to_empty(device="cpu")
    train(dlrm(ebc), ebc, batches(3))
    with torch.no_grad():
        assert torch.equal(values_of(twin(ids)), values_of(ebc(ids)))
    waiting = copy.deepcopy(cached())
    with torch.no_grad():
        waiting(ids)  # the first is gone but for its tables
    own = weakref.ref(waiting.tables)
    del waiting, twin, ebc
    gc.collect()
    assert own() is None


def test_a_subclass_keeps_what_it_added() -> None:
    class Mine(CachedEmbeddingBagCollection):
        def __init__(self) -> None:
            table = EmbeddingBagConfig(
                name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"]
            )
            super().__init__([table], device="cpu")
            self.added = [1]

    first = Mine()
    twin = copy.deepcopy(first)
    twin.added.append(2)
    assert isinstance(twin, Mine) and first.added == [1]
    assert twin.embedding_bag_configs()[0] is not first.embedding_bag_configs()[0]


@job
def averaged(rank: int, size: int) -> dict:
    ebc, model = made(timeout_s=60)
    average = AveragedModel(model)
    for batch in lookahead(mine(rank, size), ebc):
        train(model, ebc, [batch], dense_optimizer(model))
        average.update_parameters(model)
        outputs(average)
    found = weights_of(model) | {"out": outputs(average)}
    ebc.close()
    return found


def test_on_several_ranks() -> None:
    first, second = ranks(averaged)
    tables = [name for name in first if key_of_tables() in name]
    for name in tables:
        assert torch.equal(first[name], second[name])
