"""Replaying a trace counts what whole plans count, and refuses what training refuses; MIN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_streams import BODIES, make_layout, streams, using
from protocol_cases import CASE, SLOTS, make, train
from ranks import run_ranks
from simulator import record_ids, simulate

from distcache.comm.world import close_world, open_world
from distcache.errors import ConfigError, DataError
from distcache.layout import RowLayout
from distcache.planner.home import Parts
from distcache.planner.victims import Policy
from distcache.replay import Case, GroupCounts, Outcome, belady, replay
from distcache.trace import Recorder, Trace, record_source


def recorded(steps: Sequence[Sequence[np.ndarray]], layout: RowLayout) -> Trace:
    recorder = Recorder(layout.offsets, [layout.world_size])
    for parts in steps:
        recorder.add(lambda rank, _, parts=parts: parts[rank])
    return recorder.finish()


def counted(plans: list, stream: list, prefetch: int) -> Outcome:
    """What whole plans of all ranks come to; a step is tight if it takes a slot that one of the P
    steps before it used."""
    last: dict[int, int] = {}
    tight = 0
    for now, (step, rows) in enumerate(zip(plans, stream, strict=True)):
        leaving = [row for plan in step for row in plan.evict_rows.tolist()]
        tight += any(last[row] >= now - prefetch for row in leaving)
        last.update(dict.fromkeys(np.concatenate(rows).tolist(), now))
    fetched = sum(len(p.fetch_rows) for step in plans for p in step)
    left = sum(len(p.evict_rows) for step in plans for p in step)
    counts = GroupCounts(
        ids=sum(len(part) for step in stream for part in step),
        lookups_hit=sum(p.lookup_hits for step in plans for p in step),
        distinct=sum(step[0].distinct for step in plans),
        fetched=fetched,
        written_back=left,
    )
    return Outcome(Case(Policy(), (1,)), len(plans), (counts,), tight_steps=tight)


@examples(300)
@given(streams(), st.sampled_from(BODIES))
def test_a_case_counts_what_whole_plans_count(case: tuple, body: str) -> None:
    stream, layout, config = case
    world, ids = layout.world_size, sum(len(part) for step in stream for part in step)
    if ids == 0:
        with pytest.raises(DataError, match="no id in any training step"):
            recorded(stream, layout)
        return
    asked = Case(config.policy, (config.slots,), config.lookahead, config.prefetch, world)
    with using(body), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Parts, "of", lambda slots, rows: Parts(slots, rows, config.shelves, config.bits)
        )
        plans = list(simulate(layout, config, stream))
        trace = recorded(stream, layout)
        (outcome,) = replay(trace, [asked], lambda case, group: config.popularity)
    expected = counted(plans, stream, config.prefetch)
    assert outcome.groups == expected.groups and outcome.refused is None
    # Of pinned rows that leave, and are named again, the last use counts as the step before.
    stay = config.popularity is not None or config.policy.resident == "auto"
    assert outcome.steps == expected.steps
    most = expected.steps if stay else expected.tight_steps
    assert expected.tight_steps <= outcome.tight_steps <= most


@st.composite
def traces(draw: st.DrawFn, rows: int, steps: int, most: int) -> tuple[list[np.ndarray], Trace]:
    seed, skew = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([1.0, 2.5]))
    rng = np.random.default_rng(seed)
    stream = [
        (rng.random(rng.integers(1, most + 1)) ** skew * rows).astype(np.int64)
        for _ in range(draw(st.integers(1, steps)))
    ]
    return stream, record_ids(stream, rows, worlds=(1, 3))


def fewest(steps: Sequence[set[int]], slots: int) -> int:
    """The least rows fetched over all choices of what stays after each step."""
    costs = {frozenset[int](): 0}
    for named in steps:
        after: dict[frozenset[int], int] = {}
        for cached, cost in costs.items():
            spent = cost + len(named - cached)
            others = sorted(cached - named)
            kept = min(len(others), slots - len(named))
            for stays in combinations(others, kept):
                state = frozenset(named) | frozenset(stays)
                after[state] = min(after.get(state, spent), spent)
        costs = after
    return min(costs.values())


@examples(150)
@given(case=traces(rows=7, steps=9, most=5), spare=st.integers(0, 3))
def test_no_choice_fetches_fewer(case: tuple, spare: int) -> None:
    stream, trace = case
    home = trace.homes[1][0]
    slots = int(home.distinct.max()) + spare
    sets = [set(step.tolist()) for step in stream]
    assert belady(home, slots)[:, 0].sum() == fewest(sets, slots)


@examples(200)
@given(case=traces(rows=60, steps=25, most=20), spare=st.integers(0, 20))
def test_a_window_over_everything_is_the_optimum(case: tuple, spare: int) -> None:
    stream, trace = case
    home = trace.homes[1][0]
    slots = int(home.distinct.max()) + spare
    fetched, hits, evicted = belady(home, slots).T
    assert (fetched - evicted).cumsum().max() <= slots
    ahead = Case(Policy(), (slots,), lookahead=len(stream), prefetch=0)
    cases = [Case(None, (slots,)), ahead, Case(Policy("lru"), (slots,), prefetch=0)]
    least, ahead, lru = replay(trace, cases)
    assert ahead.fetched == least.fetched == fetched.sum()
    assert ahead.written_back == least.written_back
    assert lru.fetched >= least.fetched
    assert least.lookups_hit == hits.sum()
    many = 3 * max(int(part.distinct.max()) for part in trace.homes[3]) + slots
    (three,) = replay(trace, [Case(None, (many,), world_size=3)])
    parts = [belady(part, -(-many // 3))[:, 0].sum() for part in trace.homes[3]]
    assert (three.fetched, three.ids) == (sum(parts), least.ids)


def test_a_step_that_does_not_fit_is_said_for_that_case_alone() -> None:
    steps = [[np.arange(5)], [np.arange(11)], [np.arange(12)]]
    trace = recorded(steps, make_layout(100, 1))
    small, enough, least = replay(
        trace, [Case(Policy(), (10,)), Case(Policy(), (12,)), Case(None, (11,))]
    )
    assert small.refused == (
        "step 1: home rank 0 of group 0 has 11 distinct rows for 10 slots; all steps fit in 12 "
        "slots per rank"
    )
    assert small.groups == (GroupCounts(),)
    assert small.hit_rate is None and small.hit_rate_lookups is None
    assert enough.refused is None and enough.fetched == 12
    assert least.refused is not None and "step 2" in least.refused


def test_groups_are_summed_told_one_by_one_and_refused_by_name() -> None:
    rng, told = np.random.default_rng(0), []
    traces = [record_ids(list(rng.integers(0, rows, (9, 6))), rows) for rows in (20, 7)]
    cases = [Case(Policy(), slots, 2, 1) for slots in ((12, 6), (12, 1))]
    both, refused = replay(traces, cases, progress=told.append)
    parts = zip(traces, (12, 6), strict=True)
    alone = [replay(trace, [Case(Policy(), (slots,), 2, 1)])[0] for trace, slots in parts]
    assert both.groups == (alone[0].groups[0], alone[1].groups[0])
    assert both.tight_steps <= alone[0].tight_steps + alone[1].tight_steps
    assert refused.refused is not None and "of group 1" in refused.refused
    assert told == [both, refused] and [outcome.case for outcome in told] == cases
    assert [Case(policy, (1,)).label for policy in (Policy(), None)] == ["lookahead 8, lfu", "MIN"]


def test_cases_that_cannot_be_served_are_refused() -> None:
    trace = record_ids([np.arange(4)], 4, worlds=(1, 3))
    with pytest.raises(ConfigError, match=r"recorded for world sizes 1, 3, not 2"):
        replay(trace, [Case(Policy(), (4,), world_size=2)])
    with pytest.raises(ConfigError, match="slots for 2 groups, not 1"):
        replay(trace, [Case(Policy(), (4, 4))])
    with pytest.raises(ConfigError, match=r"frequency ranks rows by statistics"):
        replay(trace, [Case(Policy("frequency"), (4,))])
    with pytest.raises(ConfigError, match="1 and 2 steps"):
        replay([trace, record_ids([np.arange(4)] * 2, 4)], [Case(Policy(), (4, 4))])
    for wrong in ({"slots": ()}, {"slots": (0,)}, {"lookahead": -1}, {"prefetch": -1}):
        with pytest.raises(ConfigError, match="at least"):
            Case(**{"policy": Policy(), "slots": (4,), **wrong})
    with pytest.raises(ConfigError, match="world size 0 must be at least 1"):
        Case(Policy(), (4,), world_size=0)


STEPS = 24


class _Source:
    """`CASE` as a batch source."""

    features, train_batch = CASE.features, staticmethod(CASE.batch)
    eval_batch = staticmethod(partial(CASE.batch, kind="eval"))


def _train(rank: int, world_size: int) -> list[dict[str, Any]]:
    world = open_world("cpu", timeout_s=60)
    found = []
    for evals in (False, True):
        mode = make(world, lookahead=2, prefetch=1)
        order = _order(evals)
        draw = {"train": CASE.batch, "eval": _Source.eval_batch}
        train(mode, (draw[kind](step, rank, world_size) for kind, step in order))
        found.append(mode.summary())
        mode.close()
    close_world(world)
    return found


def _order(evals: bool) -> list[tuple[str, int]]:
    kinds = ("train", "eval") if evals else ("train",)
    return [(kind, step) for step in range(STEPS) for kind in kinds]


@pytest.mark.parametrize("world", [1, 2])
def test_two_groups_and_bags(world: int) -> None:
    for evals, found in zip((False, True), run_ranks(_train, world)[0], strict=True):
        traces = record_source(_Source(), CASE.tables, (world,), _order(evals))
        case = Case(Policy(), SLOTS, lookahead=2, prefetch=1, world_size=world)
        (expected,) = replay(traces, [case])
        assert expected.refused is None and expected.written_back > 0
        assert 0 < expected.fetched < expected.distinct, "nothing is fetched, or nothing found"
        row_bytes = [(8 + 8) * 4, (4 + 4) * 4]
        counts = {
            "rows_fetched": expected.fetched,
            "rows_written_back": expected.written_back,
            "hit_rate": expected.hit_rate,
            "hit_rate_lookups": expected.hit_rate_lookups,
            "host_to_device_bytes": expected.bytes_moved(row_bytes)[0],
            "device_to_host_bytes": expected.bytes_moved(row_bytes)[1],
        }
        assert {key: found[key] for key in counts} == counts
        (other,) = replay(traces, [replace(case, lookahead=0)])
        assert other.fetched != expected.fetched, "the window decides nothing here"


def test_the_page_on_replay_runs_as_it_stands(
    checkout: Path, capsys: pytest.CaptureFixture
) -> None:
    page = (checkout / "docs/replay.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    exec(compile(code, "replay.md", "exec"), {})
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in shown] == ["MIN", "lookahead", "lookahead", "lru"]
    fetched = [int(line[-2]) for line in shown]
    assert fetched[0] <= min(fetched[1:]) and fetched[1] <= fetched[3]
    assert {line[-1] for line in shown} == {"None"}
