"""Runs with every placement of cached rows: what they are drawn from, and how small caches may be.

A scenario has one reference, `resident`; whatever is drawn for it has its bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from scenarios import OPTIMIZERS, Outcome, Scenario, popularity_of, run_mode, table

from distcache.comm.world import World, close_world, open_world
from distcache.data.batch import JaggedIds
from distcache.engine.groups import Placement, TableGroup, group_bags, make_groups, region_slots
from distcache.parallel.cached import CachedSettings
from distcache.planner.victims import Policy
from distcache.store.rows import ACCESS

TABLES = (table("a", 300), table("b", 40, features=2), table("c", 7, dim=4), table("d", 1))
MEANS = (table("a", 200, pooling="mean"), table("c", 30, dim=4), table("e", 90, dim=12))
HALVES = tuple(
    replace(own, dtype=dtype)
    for own, dtype in zip(
        TABLES, (torch.float16, torch.bfloat16, torch.bfloat16, None), strict=True
    )
)
"""Tables of which some are stored in 2 bytes an element: groups of one width and three dtypes."""
KINDS = ("sharded", "mixed", "home", "mixed home")
POLICIES = [Policy(), Policy(), Policy(tail="lru"), Policy("lru"), Policy("lfu", "lru")]
POLICIES += [Policy(tail="frequency"), Policy("static")]


@dataclass(frozen=True)
class Job:
    """A run of `case`: an evaluation batch every `evals` steps (0: none); `how`: what is made of
    statistics (None: nothing)."""

    case: Scenario
    settings: CachedSettings
    evals: int = 0
    how: dict | None = None


def hot_of(case: Scenario, share: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Some rows of every table to replicate, the low ids, which are frequent, and a few others."""
    rng, found = np.random.default_rng(seed), []
    for spec in case.tables:
        first = np.arange(round(share * spec.rows))
        others = rng.integers(0, spec.rows, 2 if share < 1 else 0)
        found.append(np.unique(np.concatenate((first, others))))
    return tuple(found)


def placement_of(kind: str, case: Scenario, share: float = 0.1, early: bool = True) -> Placement:
    """The placement of a name of `KINDS`."""
    state = "home" if "home" in kind else "replicated"
    if kind == "home":
        return Placement("replicated", state)
    hot = hot_of(case, share) if "mixed" in kind else ()
    return Placement(kind.split()[0], state, hot, early=early)


def fitting_slots(
    case: Scenario, world: int, placement: Placement, evals: int = 0
) -> tuple[int, ...]:
    """C of each group, the smallest in which every step fits where ids keep their order."""
    groups = placement.groups(make_groups(case.tables, case.features, world))
    batches = [case.batch(step) for step in range(case.steps)]
    if evals:
        batches += [case.batch(1000 + s, kind="eval") for s in range(evals - 1, case.steps, evals)]
    return tuple(_fitting(group, batches, case.dtype) for group in groups)


def distinct_rows(group: TableGroup, ids: JaggedIds, dtype: torch.dtype) -> np.ndarray:
    """The distinct rows of a group that ids name, ascending."""
    bags = group_bags(group, ids, dtype)
    rows = bags.ids.copy()
    for start, stop, first in bags.pieces[:3].T if bags.pieces is not None else ():
        rows[start:stop] += first
    return np.unique(rows)


def _fitting(group: TableGroup, batches: list, dtype: torch.dtype) -> int:
    world, needs = group.layout.world_size, [1, 1]  # of the replicated and of the sharded region
    for batch in batches:
        rows = distinct_rows(group, batch.ids, dtype)
        replicated = np.ones(len(rows), bool) if group.hot is None else np.isin(rows, group.hot)
        for region, own in enumerate((rows[replicated], rows[~replicated])):
            homes = np.bincount(group.layout.home(own), minlength=world)
            needs[region] = max(needs[region], int(homes.max()))
    if group.hot is None:
        return world * needs[0]
    slots = 2 * world
    while True:
        found = region_slots(group, slots)
        held = not len(group.hot) or found.replicated >= world * needs[0]
        if held and found.sharded >= needs[1]:
            return slots
        slots += 1


def draw_case(seed: int, world: int, steps: int) -> Scenario:
    """A scenario."""
    rng = np.random.default_rng([seed, world])
    name = str(rng.choice(list(OPTIMIZERS)))
    spec, lr = OPTIMIZERS[name]
    drawn = rng.random()
    tables = HALVES if drawn < 0.2 else TABLES if drawn < 0.6 else MEANS
    return Scenario(
        tables,
        spec,
        lr,
        steps=steps,
        bag=int(rng.choice([1, 2, 3])),
        global_batch=int(rng.choice([7, 24, 40])),
        last_batch=[None, 1, 3][rng.integers(3)],
        weighted=bool(rng.random() < 0.5) and tables is not MEANS,  # means have no weights
        empty_ranks=bool(rng.random() < 0.3),
        dtype=torch.float64 if rng.random() < 0.3 else torch.float32,
        seed=seed,
    )


def draw_jobs(seed: int, world: int, runs: int, steps: int) -> list[Job]:
    """A scenario's reference and so many runs of it, whose placements and caches are drawn."""
    case = draw_case(seed, world, steps)
    common = {"dtype": case.dtype, "validate": True}
    jobs = [Job(case, CachedSettings("resident", schedule="serial", **common))]
    rng = np.random.default_rng([seed, world, 1])
    for number in range(runs):
        kind, share = KINDS[(seed + number) % len(KINDS)], float(rng.choice([0.02, 0.1, 0.4, 1.0]))
        placement = placement_of(kind, case, share, early=bool(rng.random() < 0.8))
        evals, policy = int(rng.choice([0, 0, 3, 5])), POLICIES[rng.integers(len(POLICIES))]
        how: dict | None = None
        if policy.needs_popularity or rng.random() < 0.3:
            how = {"classes": policy.needs_popularity}
            how["warm_start"] = float(rng.choice([0.0, 0.5, 1.0]))
        slots = fitting_slots(case, world, placement, evals)
        if rng.random() < 0.5:
            slots = tuple(count + world * 3 for count in slots)
        settings = CachedSettings(
            "data",
            slots,
            lookahead=int(rng.choice([0, 1, 4, 8])),
            prefetch=int(rng.choice([0, 1, 1, 2, 3])),
            policy=policy,
            schedule="overlapped" if rng.random() < 0.75 else "serial",
            result_delay=[None, 2][rng.integers(2)],
            placement=placement,
            access=ACCESS[(seed + number) % 3 == 0],
            **common,
        )
        jobs.append(Job(case, settings, evals, how))
    return jobs


def run_jobs(
    rank: int, size: int, groups: list[list[Job]], device: str = "cpu"
) -> list[list[Outcome]]:
    """Run all jobs of every group, in order."""
    world = open_world(device, "gloo", 60)
    found = [[run_job(world, job) for job in jobs] for jobs in groups]
    close_world(world)
    return found


def run_job(world: World, job: Job) -> Outcome:
    """One run; a note of what it was goes with an error."""
    how = job.how
    if how is not None:
        how = popularity_of(job.case, job.settings.slots, **how)
    try:
        return run_mode(world, job.case, job.settings, job.evals, how)
    except BaseException as error:
        error.add_note(f"in {job}")
        raise


def check_groups(by_rank: list[list[list[Outcome]]], groups: list[list[Job]]) -> None:
    """Every run has the bits of the first of its group."""
    for outcomes_of in by_rank:
        for jobs, outcomes, reference in zip(groups, outcomes_of, by_rank[0], strict=True):
            for job, outcome in zip(jobs, outcomes, strict=True):
                assert outcome.losses == reference[0].losses, job
                assert outcome.state_digest == reference[0].state_digest, job
