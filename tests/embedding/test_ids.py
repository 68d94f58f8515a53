"""Ids as TorchRec has them beside plain bags: weights that are trained, deduplicated input, keys of
several sizes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from ebc_cases import (
    BATCH,
    Clicks,
    Pooled,
    assert_close,
    assert_same,
    batches,
    cached,
    configs,
    counted,
    draw,
    job,
    loss_of,
    mixed_configs,
    ranks,
    train,
    two_widths,
    values_of,
    weights_of,
)
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from distcache import lookahead
from distcache.errors import DataError


class Positions(Pooled):
    """A `Pooled` whose ids have weights by their place in the bag, which are trained."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__(ebc)
        features = [f for table in ebc.embedding_bag_configs() for f in table.feature_names]
        weights = PositionWeightedModuleCollection(dict.fromkeys(features, 3))
        with torch.no_grad():
            for own in weights.position_weights.values():
                own.copy_(torch.tensor([1.0, 0.5, 1.5]))
        self.ebc = FeatureProcessedEmbeddingBagCollection(ebc, weights)


def of_one_id(batch: Clicks) -> Clicks:
    """The same with one id in each bag."""
    ids = batch.sparse_features
    count = len(ids.lengths())
    values = torch.arange(count) * 7 % 5 % torch.tensor([5, 5, 5, 5, 1]).repeat_interleave(BATCH)
    return replace(
        batch, sparse_features=KeyedJaggedTensor(ids.keys(), values, None, values * 0 + 1)
    )


@pytest.mark.parametrize("case", ["bags", "single ids", "of two widths"])
@pytest.mark.parametrize("planned", [True, False])
def test_weights_by_position_are_trained_as_torchrecs(case: str, planned: bool) -> None:
    tables = two_widths() if case == "of two widths" else configs()
    data = [of_one_id(b) if case == "single ids" else b for b in batches(8, tables=tables)]
    ebc = cached("sgd", tables, rows=700 if case == "of two widths" else 300, is_weighted=True)
    plain = EmbeddingBagCollection(tables, is_weighted=True)
    own, other = Positions(ebc), Positions(plain)
    with torch.no_grad():
        tables_of = weights_of(ebc)
        for name, bag in plain.embedding_bags.items():
            bag.weight.copy_(tables_of[f"embedding_bags.{name}.weight"])
    dense = [p for name, p in other.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.SGD([{"params": dense}, {"params": plain.parameters()}], lr=0.1)
    expected = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(other, batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    losses = train(own, ebc, lookahead(data, ebc) if planned else data)
    assert losses == pytest.approx(expected, rel=1e-5)
    positions = [m.ebc._feature_processors.position_weights for m in (own, other)]
    for name, mine in positions[0].items():
        torch.testing.assert_close(mine, positions[1][name], rtol=1e-4, atol=1e-6)
    changed = [not torch.equal(w, torch.tensor([1.0, 0.5, 1.5])) for w in positions[0].values()]
    assert sum(changed) >= 4
    for name, value in weights_of(ebc).items():
        assert_close({name: value}, {name: plain.state_dict()[name]})


def test_gradients_of_weights_are_those_of_numbers() -> None:
    tables = mixed_configs()  # one of them a mean
    ebc = cached("sgd", tables, rows=1000, dtype=torch.float64, is_weighted=True)
    ebc.requires_grad_(False)  # gradcheck calls forward, and no step
    ids = draw(3, tables=tables).sparse_features

    def values(weights: Tensor) -> Tensor:
        own = KeyedJaggedTensor(ids.keys(), ids.values(), weights, ids.lengths())
        return ebc(own).values()

    weights = torch.rand(len(ids.values()), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(values, (weights,), fast_mode=False)
    gradient = torch.autograd.grad(values(weights).square().sum(), weights, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_weights_may_come_after_the_batch_was_read() -> None:
    data = batches(4)
    drawn = [torch.rand(len(b.sparse_features.values())) for b in data]

    def run(late: bool) -> dict[str, Tensor]:
        ebc = cached("adagrad", is_weighted=True)
        model, own = Pooled(ebc), copy.deepcopy(data)
        for batch, weights in zip(own if late else [], drawn, strict=False):
            batch.sparse_features._weights = torch.full_like(weights, torch.nan)
        for batch, weights in zip(lookahead(own, ebc), drawn, strict=True):
            batch.sparse_features._weights = weights
            loss_of(model, batch).backward()
            ebc.step()
        return weights_of(ebc)

    assert_same(run(late=True), run(late=False))
    ebc = cached(is_weighted=True)
    ids = data[0].sparse_features
    few = KeyedJaggedTensor(ids.keys(), ids.values(), None, ids.lengths())
    few._weights = torch.ones(3)
    with pytest.raises(DataError, match=r"weights of shape \[3\] for \d+ ids: give one for each"):
        ebc(few)


@pytest.mark.parametrize("count", [2, 4])
def test_weights_follow_ids_that_the_model_has_in_other_places(count: int) -> None:
    """Keys in another order than the batch that was read, or some of them."""
    tables, data = configs()[:count], batches(6, weighted=True)
    features = [feature for table in tables for feature in table.feature_names]

    class Reordered(Pooled):
        def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
            parts = ids.to_dict()
            keys = features[::-1]
            own = [parts[key] for key in keys]
            values, weights, lengths = (
                torch.cat([getattr(one, name)() for one in own])
                for name in ("values", "weights", "lengths")
            )
            return super().forward(dense, KeyedJaggedTensor(keys, values, weights, lengths))

    def run(model: type[Pooled], ahead: bool) -> dict[str, Tensor]:
        ebc = cached("sgd", tables, is_weighted=True)
        train(model(ebc), ebc, lookahead(data, ebc) if ahead else data)
        return weights_of(ebc)

    whole = run(Pooled, False)
    for ahead in (False, True):
        assert_same(run(Reordered, ahead), whole)


@job
def weights_on_ranks(rank: int, size: int) -> dict[str, Tensor]:
    """The gradients of this rank's weights in two micro-batches of two steps, by placement."""
    placements = {
        "replicated": {},
        "sharded": {"placement": "sharded"},
        "mixed": {"placement": "mixed", "replicated_share": 0.5},
    }
    found: dict[str, Tensor] = {}
    for name, how in placements.items():
        ebc = cached("sgd", two_widths(), rows=700, is_weighted=True, statistics=counted(), **how)
        model, data = (
            Pooled(ebc),
            [draw(10 * step + rank, tables=two_widths()) for step in range(4)],
        )
        for batch in data:
            ids = batch.sparse_features
            weights = torch.linspace(0.5, 1.5, len(ids.values())).requires_grad_()
            batch.sparse_features = KeyedJaggedTensor(
                ids.keys(), ids.values(), weights, ids.lengths()
            )
        for number, batch in enumerate(lookahead(data, ebc, accumulate=2)):
            loss_of(model, batch).backward()
            if number % 2:
                ebc.step()
        found[name] = torch.cat([b.sparse_features.weights().grad for b in data])
        ebc.close()
    return found


def test_gradients_of_weights_are_a_ranks_own_in_every_placement() -> None:
    for rank, by_placement in enumerate(ranks(weights_on_ranks)):
        one = by_placement["replicated"]
        for name, found in by_placement.items():
            assert torch.equal(found, one) and bool(found.any()), (rank, name)


@pytest.mark.parametrize("weighted", [False, True])
def test_deduplicated_input_is_looked_up_for_each_sample(weighted: bool) -> None:
    tables = configs()
    features = [feature for table in tables for feature in table.feature_names]
    strides = [3, 1, 5, 2, 4]
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(0, 4, (sum(strides),), generator=generator)
    limits = torch.tensor([400, 60, 60, 7, 1]).repeat_interleave(torch.tensor(strides))
    values = (
        (torch.rand(int(lengths.sum()), generator=generator))
        .mul(limits.repeat_interleave(lengths))
        .long()
    )
    weights = torch.rand(len(values), generator=generator) if weighted else None
    inverse = torch.stack([torch.randint(0, n, (BATCH,), generator=generator) for n in strides])
    keys = list(reversed(features))
    order = [features.index(key) for key in keys]

    def input_of(weights: Tensor | None) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            features,
            values,
            weights,
            lengths,
            stride_per_key_per_rank=[[stride] for stride in strides],
            inverse_indices=(keys, inverse[order]),
        )

    ebc = cached("sgd", tables, is_weighted=weighted)
    plain = EmbeddingBagCollection(tables, is_weighted=weighted)
    plain.load_state_dict(weights_of(ebc))
    mine, theirs = (
        [None, None]
        if weights is None
        else [weights.clone().requires_grad_(), weights.clone().requires_grad_()]
    )
    found, expected = ebc(input_of(mine)).values(), plain(input_of(theirs)).values()
    torch.testing.assert_close(found, expected)
    factor = torch.randn(found.shape, generator=generator)
    (found * factor).sum().backward()
    (expected * factor).sum().backward()
    if weighted:
        torch.testing.assert_close(mine.grad, theirs.grad)
    ebc.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_close(weights_of(ebc), plain.state_dict())
    for wrong in (-1, 3):
        beyond = input_of(weights)
        beyond._inverse_indices = (keys, inverse[order].index_fill(1, torch.tensor([5]), wrong))
        with pytest.raises(DataError, match=r"of feature 'f0' go from .* but it has 3 samples"):
            ebc(beyond)
    less = input_of(weights)
    less._inverse_indices = (keys[:-1], inverse[order][:-1])
    with pytest.raises(DataError, match=r"inverse_indices have no \['f0'\], only"):
        ebc(less)
    alone = input_of(weights)
    alone._inverse_indices = None
    with pytest.raises(DataError, match=r"\[3, 1, 5, 2, 4\] samples: give .* inverse_indices"):
        ebc(alone)


CONTRADICTIONS = {
    "stride": (2, "stride=2 .* of which stride is 3"),
    "stride_per_key": ([1, 5], r"stride_per_key=\[1, 5\] .* stride_per_key is \[3, 3\]"),
    "length_per_key": ([1, 5], r"length_per_key=\[1, 5\] .* length_per_key is \[3, 3\]"),
    "offset_per_key": ([0, 1, 6], r"offset_per_key=\[0, 1, 6\] .* is \[0, 3, 6\]"),
    "offsets": (
        torch.tensor([0, 2, 2, 3, 4, 5, 6]),
        r"offsets=\[0, 2, .* is \[0, 1, 2, 3, 4, 5",
    ),
    "stride_per_key_per_rank": (
        [[6]],
        r"per_rank=\[\[6\]\] .* 2 keys: .* as \[\[3\], \[3\]\]",
    ),
}
"""Fields of a KeyedJaggedTensor of two keys and three bags of one id each: a wrong value, and what
is said of it."""


@pytest.mark.usefixtures("kind")
def test_fields_that_contradict_the_lengths_are_refused_by_name() -> None:
    tables = configs()[2:]
    keys, values, lengths = ["f2", "f3"], torch.zeros(6, dtype=torch.int64), torch.ones(6).long()
    ebc = cached("sgd", tables)
    plain = values_of(ebc(KeyedJaggedTensor(keys, values, lengths=lengths)))
    right = {"stride": 3, "length_per_key": [3, 3], "offsets": torch.arange(7)}
    right |= {"stride_per_key_per_rank": [[2, 1], [3, 0]]}
    assert torch.equal(
        values_of(ebc(KeyedJaggedTensor(keys, values, lengths=lengths, **right))), plain
    )
    wrong = list(CONTRADICTIONS.items())
    for bad in ([[-1], [7]], [[3], [2]], torch.tensor([3, 3])):
        wrong.append(("stride_per_key_per_rank", (bad, "stride_per_key_per_rank=.*give")))
    for field, (value, message) in wrong:
        ids = KeyedJaggedTensor(keys, values, lengths=lengths, **{field: value})
        with pytest.raises(DataError, match=message):
            ebc(ids)
    assert torch.equal(values_of(ebc(KeyedJaggedTensor(keys, values, lengths=lengths))), plain)


@pytest.mark.usefixtures("sequences")
def test_sequences_may_be_of_several_sizes() -> None:
    tables = configs()
    features = ["f0", "f1", "g", "f2", "f3"]
    strides, lengths = [2, 0, 3, 1, 2], torch.tensor([2, 0, 1, 3, 0, 2, 1, 1])
    values = torch.tensor([3, 300, 5, 1, 2, 50, 6, 5, 0])[: int(lengths.sum())]
    values = torch.cat([values, torch.zeros(int(lengths.sum()) - len(values), dtype=torch.int64)])
    ids = KeyedJaggedTensor(
        features, values, None, lengths, stride_per_key_per_rank=[[n] for n in strides]
    )
    ec = cached("sgd", tables, need_indices=True)
    plain = EmbeddingCollection(tables, need_indices=True)
    plain.load_state_dict(weights_of(ec))
    assert isinstance(tables[0], EmbeddingConfig)
    found, expected = ec(ids), plain(ids)
    assert list(found) == list(expected)
    for name, one in expected.items():
        for part in ("values", "lengths", "offsets", "weights"):
            torch.testing.assert_close(getattr(found[name], part)(), getattr(one, part)())
    sum(one.values().square().sum() for one in found.values()).backward()
    sum(one.values().square().sum() for one in expected.values()).backward()
    ec.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_close(weights_of(ec), plain.state_dict())


@pytest.mark.usefixtures("kind")
def test_fx_sees_a_collection_as_a_leaf() -> None:
    ebc, data = cached("sgd"), batches(3)
    model = nn.ModuleDict({"inner": ebc})

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: KeyedJaggedTensor):
            return self.inner["inner"](ids)

    traced = torch.fx.symbolic_trace(Around())
    assert [node.target for node in traced.graph.nodes][1] == "inner.inner"
    for batch in lookahead(data, ebc):
        values = values_of(traced(batch.sparse_features))
        values.sum().backward()
        ebc.step()
    assert ebc.tables.steps == 3
