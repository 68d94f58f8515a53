"""Rows that ranks of a node share: over the network once, and each rank gets what it named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_streams import make_layout, sharded_streams
from shard_model import ranks_of
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
from distcache.step_plan import ShardPlan, StepPlan, Transfer, check_plan, check_plan_fully

SHAPES = [(2, 2), (1, 3), (3, 1), (2, 1, 2), (1, 1), (4,), (2, 3, 1)]


@examples(80)
@given(sharded_streams(shapes=SHAPES))
def test_rows_cross_to_a_node_once_and_are_sent_no_more_often(case: tuple) -> None:
    """Beside the plans where each rank gets its rows from their homes."""
    stream, layout, config = case
    direct = simulate(layout, replace(config, nodes=()), stream)
    for plans, want in zip(simulate(layout, config, stream), direct, strict=True):
        for kind in ("early", "late"):
            transfers, others = ([getattr(p.shard, kind) for p in of] for of in (plans, want))
            if others[0] is None:
                assert transfers == others
                continue
            for home, (transfer, other) in enumerate(zip(transfers, others, strict=True)):
                assert torch.equal(transfer.places, other.places)
                sent, named = (of.slots.split(of.send_counts) for of in (transfer, other))
                for ranks in ranks_of(config.nodes):
                    rows, asked = (torch.cat(of[ranks.start : ranks.stop]) for of in (sent, named))
                    asked = asked if home in ranks else asked.unique()
                    assert rows.sort().values.tolist() == asked.sort().values.tolist()
            assert total_sent(transfers) == total_sent(others)


def total_sent(transfers: Sequence[Transfer]) -> int:
    """Rows that leave a rank, on either leg."""
    kept = sum(of.send_counts[rank] for rank, of in enumerate(transfers))
    passed = sum(0 if of.relay is None else len(of.relay.passed) for of in transfers)
    return sum(len(of.slots) for of in transfers) - kept + passed


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


def with_late(shard: ShardPlan, **changes: object) -> ShardPlan:
    return replace(shard, late=replace(shard.late, **changes))


def with_relay(shard: ShardPlan, **changes: object) -> ShardPlan:
    return with_late(shard, relay=replace(shard.late.relay, **changes))


def first_of(values: torch.Tensor, value: int) -> torch.Tensor:
    """`values` with another first one."""
    return torch.cat((torch.tensor([value]), values[1:]))


def sent_to_all(shard: ShardPlan) -> ShardPlan:
    """Every row from its home to each rank that named it, as on one node."""
    return with_late(shard, slots=shard.slots[shard.source_rows], send_counts=shard.source_counts)


BREAKS: dict[str, tuple[str, Callable[[ShardPlan], ShardPlan]]] = {
    "receive counts": (
        "counts of a transfer",
        lambda s: with_late(s, receive_counts=(0, *s.late.receive_counts[1:])),
    ),
    "send counts": (
        "counts of a transfer",
        lambda s: with_late(s, send_counts=(0, *s.late.send_counts[1:])),
    ),
    "pass counts": ("counts of a transfer", lambda s: with_relay(s, pass_counts=(0, 0))),
    "mates' counts": ("counts of a transfer", lambda s: with_relay(s, receive_counts=(0, 0))),
    "order": ("counts of a transfer", lambda s: with_relay(s, order=s.late.relay.order[1:])),
    "runs": ("not every row is sent once", lambda s: replace(s, runs=())),
    "all copies": ("goes to a run of ranks twice or never", sent_to_all),
    "fewer ranks": ("goes to a run of ranks twice", lambda s: replace(s, runs=(1, 1))),
    "a stranger's row": (
        "that nobody asked for",
        lambda s: with_late(s, slots=first_of(s.late.slots, 1 << 20)),
    ),
    "one row twice": (
        "handed on that did not come, or twice",
        lambda s: with_relay(s, order=first_of(s.late.relay.order, int(s.late.relay.order[1]))),
    ),
    "a row from nowhere": (
        "handed on that did not come",
        lambda s: with_relay(s, passed=first_of(s.late.relay.passed, 1 << 20)),
    ),
    "to a mate twice": (
        "handed on that did not come, or twice",
        lambda s: with_relay(s, passed=first_of(s.late.relay.passed, int(s.late.relay.passed[1]))),
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_plan_is_refused(name: str) -> None:
    law, change = BREAKS[name]
    plan = shared_plans()[0]
    assert plan.shard.late.relay.pass_counts == (0, len(plan.shard.late.relay.passed))
    broken = replace(plan, shard=change(plan.shard))
    with pytest.raises(PlanError, match=law):
        check_plan_fully(broken, 60)
    if law.startswith(("counts", "not every")):  # the cheap laws alone see wrong counts
        with pytest.raises(PlanError, match=law):
            check_plan(broken)


SIZES = st.sampled_from([2, 3, 7, 8, 9, 16, 17, 32, 33, 64])


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
