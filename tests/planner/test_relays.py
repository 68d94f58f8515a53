"""Rows that ranks of a node share go over the network once: what breaks a law of that is refused,
and both legs are reached by what `test_laws` draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_streams import make_layout
from simulator import PlannerSettings, simulate

from distcache.comm.world import Nodes
from distcache.errors import PlanError
from distcache.planner.shard import (
    Routes,
    carriers,
    has_several,
    make_routes,
    mask_type,
    pack,
    unpack,
)
from distcache.step_plan import StepPlan, check_plan, check_plan_fully


def shared_plans() -> list[StepPlan]:
    """Plans of the second step of two nodes, whose ranks share some rows and not others."""
    config = PlannerSettings(60, 3, 2, hot=np.empty(0, np.int64), nodes=(2, 2))
    rng = np.random.default_rng(1)
    stream = [[rng.permutation(40)[:24] for _ in range(4)] for _ in range(2)]
    return list(simulate(make_layout(40, 4), config, stream))[1]


def test_rows_are_handed_on_and_rows_are_not() -> None:
    """What the random streams are meant to reach is reached: on both legs, at both times."""
    late = [plan.shard.late for plan in shared_plans()]
    assert all(len(of.relay.passed) > 0 for of in late)
    assert all(sum(of.relay.pass_counts) < sum(of.receive_counts) for of in late)
    config = PlannerSettings(60, 3, 0, hot=np.empty(0, np.int64), nodes=(3, 1))
    stream = [[np.arange(40)] * 4] * 2
    plans = list(simulate(make_layout(40, 4), config, stream))[1]
    assert [plan.shard.early.relay is None for plan in plans] == [False, False, False, True]
    passed = [plan.shard.early.relay.pass_counts for plan in plans[:3]]
    assert passed == [(0, 10, 10), (0, 0, 0), (0, 0, 0)]  # the peer of rank 3 hands to both mates
    assert plans[3].shard.runs == (3, 1) and plans[0].shard.runs == (1, 1, 1, 1)


def changed(value: object, path: str, change: Callable) -> object:
    """`value` with a field, named from the outside in, as `change` makes of it."""
    name, _, rest = path.partition(".")
    inner = getattr(value, name)
    return replace(value, **{name: changed(inner, rest, change) if rest else change(inner)})


def first(choose: Callable[[torch.Tensor], int]) -> Callable:
    """Another first value."""
    return lambda values: torch.cat((torch.tensor([choose(values)]), values[1:]))


COUNTS, PASSED = "counts of a transfer", "handed on that did not come, or twice"
BREAKS = [
    ("late.receive_counts", lambda counts: (0, *counts[1:]), COUNTS),
    ("late.send_counts", lambda counts: (0, *counts[1:]), COUNTS),
    ("late.relay.pass_counts", lambda counts: (0, 0), COUNTS),
    ("late.relay.receive_counts", lambda counts: (0, 0), COUNTS),
    ("late.relay.order", lambda order: order[1:], COUNTS),
    ("late.relay.order", first(lambda order: int(order[1])), PASSED),
    ("late.relay.passed", first(lambda passed: 1 << 20), PASSED),
    ("late.relay.passed", first(lambda passed: int(passed[1])), PASSED),
    ("late.slots", first(lambda slots: 1 << 20), "that nobody asked for"),
    ("runs", lambda runs: (), "not every row is sent once"),
    ("runs", lambda runs: (1, 1), "goes to a run of ranks twice"),
]


@pytest.mark.parametrize(("path", "change", "law"), BREAKS)
def test_a_broken_plan_is_refused(path: str, change: Callable, law: str) -> None:
    plan = shared_plans()[0]
    broken = replace(plan, shard=changed(plan.shard, path, change))
    with pytest.raises(PlanError, match=law):
        check_plan_fully(broken, 60)
    if law in (COUNTS, "not every row is sent once"):  # the cheap laws alone see wrong counts
        with pytest.raises(PlanError, match=law):
            check_plan(broken)


def test_rows_sent_to_each_rank_that_named_them_are_refused() -> None:
    """As on one node."""
    plan = shared_plans()[0]
    shard = plan.shard
    own = {"slots": shard.slots[shard.source_rows], "send_counts": shard.source_counts}
    broken = replace(plan, shard=replace(shard, late=replace(shard.late, **own)))
    with pytest.raises(PlanError, match="goes to a run of ranks twice or never"):
        check_plan_fully(broken, 60)


SIZES = st.sampled_from([2, 3, 7, 8, 9, 16, 17, 32, 33, 64])


@examples(100)
@given(SIZES, st.data())
def test_masks_of_any_size_of_node(size: int, data: st.DataObject) -> None:
    """Packed and unpacked; who carries a row, by a plain search."""
    named = data.draw(st.lists(st.sets(st.integers(0, size - 1), min_size=1), max_size=9))
    first = data.draw(st.lists(st.integers(0, size - 1), min_size=len(named), max_size=len(named)))
    masks = np.array([sum(1 << rank for rank in of) for of in named], mask_type(size))
    routes = Routes(Nodes((1, size)), 1)
    numbers = pack(masks)
    assert len(numbers) == routes.numbers(0, len(masks)) and routes.numbers(1, 9) == 0
    assert unpack(numbers, len(masks), size).tolist() == masks.tolist()
    assert has_several(masks).tolist() == [i for i, of in enumerate(named) if len(of) > 1]
    found = carriers(masks, np.array(first, np.int64), size).tolist()
    want = [
        next(r % size for r in range(start, start + size) if r % size in of)
        for of, start in zip(named, first, strict=True)
    ]
    assert found == want


def test_where_rows_are_handed_on() -> None:
    assert make_routes(Nodes((4,)), 0) is None
    assert make_routes(Nodes((1, 1)), 0) is None
    assert make_routes(Nodes((1, 65)), 0) is None  # a mask has 64 bits
    assert Routes(Nodes((2, 65, 64)), 0).runs == (1, 1, *[1] * 65, 64)
    assert Routes(Nodes((2, 65, 64)), 3).runs == (2, *[1] * 65, 64)
    assert not Routes(Nodes((2, 65)), 3).hands_on and Routes(Nodes((2, 65)), 0).hands_on
