"""Bags of one id each from the row leaf of a batch; others are those of the trainer."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from jagged import segments_of

from distcache.engine.gradients import DeviceBags, PooledLookup
from distcache.engine.groups import GroupBags


def plan_of(positions: torch.Tensor, rows: int, home_counts: tuple[int, ...]) -> SimpleNamespace:
    """What a lookup reads of a plan whose ids are at these of `rows` leaf rows, all named."""
    order, segments = segments_of(positions, rows)
    return SimpleNamespace(
        positions=positions,
        order=order,
        touched=torch.arange(rows),
        segments=segments,
        leaf_rows=rows,
        home_counts=home_counts,
        distinct=sum(home_counts),
    )


def on_device(positions: torch.Tensor, lengths: list[int], features: int, rows: int) -> DeviceBags:
    """Bags of these lengths, feature by feature, whose ids are at these of `rows` leaf rows."""
    plan = plan_of(positions, rows, (rows,))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    bags = GroupBags(features, positions.numpy(), offsets, None, None)
    found = DeviceBags.of(bags, plan, torch.device("cpu"))
    found.arrange()
    return found


def test_single_ids_and_the_same_as_jagged_bags_have_the_same_bits() -> None:
    """Five empty bags more take the other way, and change nothing for the bags beside them."""
    leaf, positions = torch.randn(9, 16), torch.randint(0, 9, (24,))
    found = []
    for features in (4, 5):
        own = leaf.clone().requires_grad_()
        bags = on_device(positions, [1] * 24 + [0] * (6 * features - 24), features, 9)
        assert bags.single == (features == 4)
        pooled = PooledLookup.apply(own, bags, None).view(6, features, 16)
        pooled[:, :4].cos().sum().backward()
        found.append((pooled[:, :4], own.grad))
        assert not pooled[:, 4:].any()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_rows_that_all_are_named_in_their_order_are_summed_where_they_lie() -> None:
    """Of one rank, and of sharded rows; replicated ones of several are in an order of their own."""
    rows, positions = 5, torch.tensor([4, 2, 0, 3, 1, 2], dtype=torch.int32)
    for homes, in_order in (((5,), True), ((0, 0), True), ((3, 2), False)):
        plan = plan_of(positions, rows, homes)
        bags = GroupBags(1, positions.numpy(), torch.arange(7), None, None)
        found = DeviceBags.of(bags, plan, torch.device("cpu"))
        assert (found.touched is None) == in_order
        plan.touched = torch.arange(rows - 1)  # a row that only other ranks name
        assert DeviceBags.of(bags, plan, torch.device("cpu")).touched is not None
