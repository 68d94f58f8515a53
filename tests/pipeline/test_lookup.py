"""Bags of a batch from its row leaf, sample by sample, against loops over features and samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from jagged import segments_of

from distcache.engine.gradients import (
    DeviceBags,
    PooledLookup,
    RowLookup,
    bags_of_one,
    join_pooled,
)
from distcache.engine.groups import GroupBags

CPU = torch.device("cpu")


def batch_of(seed: int, samples: int, features: int, rows: int, kind: str, mean: bool):
    """`(bags, plan)` of random ids over `rows` leaf rows, `kind` single, jagged or weighted."""
    generator = torch.Generator().manual_seed(seed)
    count = samples * features
    lengths = torch.ones(count, dtype=torch.int64)
    if kind != "single":
        lengths = torch.randint(0, 4, (count,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = int(offsets[-1])
    positions = torch.randint(0, rows, (ids,), generator=generator)
    weights = torch.rand(ids, generator=generator, dtype=torch.float64)
    weights = weights if kind == "weighted" else None
    scale = 1 / lengths.clamp(min=1).to(torch.float64).unsqueeze(1) if mean else None
    bags = GroupBags(features, positions.numpy(), offsets, weights, scale)
    order, segments = segments_of(positions, rows)
    whole, none = torch.arange(rows), torch.zeros(0, dtype=torch.int64)
    plan = SimpleNamespace(
        positions=positions, order=order, touched=whole, segments=segments, slots=whole,
        source_rows=none, touched_rows=none, leaf_rows=rows, shard=None,
    )  # fmt: skip
    return bags, plan


def expected(leaf: torch.Tensor, bags: GroupBags, positions: torch.Tensor) -> torch.Tensor:
    """`[b, F * D]`, a sum at a time, recorded by autograd."""
    samples = (len(bags.offsets) - 1) // bags.features
    by_sample = []
    for sample in range(samples):
        pooled = []
        for feature in range(bags.features):
            bag = feature * samples + sample
            total = torch.zeros(leaf.shape[1], dtype=leaf.dtype)
            for at in range(int(bags.offsets[bag]), int(bags.offsets[bag + 1])):
                row = leaf[positions[at]]
                total = total + (row if bags.weights is None else row * bags.weights[at])
            pooled.append(total if bags.scale is None else total * bags.scale[bag])
        by_sample.append(torch.cat(pooled))
    return torch.stack(by_sample)


@examples(60)
@given(
    seed=st.integers(0, 1 << 30),
    samples=st.integers(1, 6),
    features=st.integers(1, 5),
    dim=st.sampled_from([1, 3, 8]),
    kind=st.sampled_from(["single", "jagged", "weighted"]),
    mean=st.booleans(),
)
def test_bags_and_gradients_equal_a_loop(seed, samples, features, dim, kind, mean) -> None:
    bags, plan = batch_of(seed, samples, features, 7, kind, mean)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(7, dim, generator=generator, dtype=torch.float64)
    upstream = torch.randn(samples, features * dim, generator=generator, dtype=torch.float64)
    leaf, twin = values.clone().requires_grad_(), values.clone().requires_grad_()
    on_device = DeviceBags(bags, plan, CPU)
    assert on_device.single == (bool((bags.offsets.diff() == 1).all()) and bags.weights is None)
    pooled, wanted = PooledLookup.apply(leaf, on_device), expected(twin, bags, plan.positions)
    torch.testing.assert_close(pooled, wanted, rtol=1e-13, atol=1e-13)
    pooled.backward(upstream)
    if wanted.requires_grad:  # else there is no id
        wanted.backward(upstream)
    gradient = torch.zeros_like(values) if twin.grad is None else twin.grad
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-13, atol=1e-13)


def test_single_ids_and_the_same_as_jagged_bags_have_the_same_bits() -> None:
    """An empty bag more takes the other way, and changes nothing for the bags beside it."""
    bags, plan = batch_of(5, 6, 4, 9, "single", mean=False)
    leaf = torch.randn(9, 16)
    pooled = PooledLookup.apply(leaf, DeviceBags(bags, plan, CPU))
    lengths = torch.cat((torch.ones(24, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    wider = GroupBags(5, bags.rows, offsets, None, None)
    other = PooledLookup.apply(leaf, DeviceBags(wider, plan, CPU)).view(6, 5, 16)
    assert torch.equal(pooled.view(6, 4, 16), other[:, :4]) and not other[:, 4].any()


@pytest.mark.parametrize(("samples", "features"), [(0, 3), (0, 0), (4, 0)])
def test_nothing_to_look_up(samples: int, features: int) -> None:
    bags, plan = batch_of(1, samples, features, 2, "single", mean=True)
    leaf = torch.randn(2, 4, requires_grad=True)
    pooled = PooledLookup.apply(leaf, DeviceBags(bags, plan, CPU))
    assert pooled.shape == (0, features * 4)
    pooled.sum().backward()
    assert torch.equal(leaf.grad, torch.zeros(2, 4))


def test_rows_of_single_ids_stay_in_the_order_of_the_ids() -> None:
    bags, plan = batch_of(3, 5, 3, 6, "jagged", mean=False)
    leaf = torch.randn(6, 2)
    ids = len(plan.positions)
    counts = [ids // 2, 0, ids - ids // 2]
    rows = RowLookup.apply(leaf, DeviceBags(bags_of_one(bags), plan, CPU, counts))
    assert torch.equal(torch.cat(rows), leaf[plan.positions])


def test_groups_of_two_widths_are_joined_by_feature() -> None:
    narrow, wide = torch.randn(3, 2 * 4), torch.randn(3, 8)
    groups = [SimpleNamespace(features=(0, 2), dim=4), SimpleNamespace(features=(1,), dim=8)]
    joined = join_pooled(groups, [narrow, wide])
    assert torch.equal(joined, torch.cat((narrow[:, :4], wide, narrow[:, 4:]), dim=1))
