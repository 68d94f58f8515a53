"""What placements take on devices: state once over the ranks, and the bound of a step's rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_cases import KINDS, fitting_slots, placement_of
from protocol_cases import CASE
from ranks import run_ranks
from scenarios import OPTIMIZERS, make_mode
from torch import Tensor

from distcache.comm.world import close_world, open_world
from distcache.engine.groups import Placement
from distcache.engine.step import Flight
from distcache.parallel.cached import CachedSettings

STATE = {"sgd": lambda dim: 0, "rowwise_adagrad": lambda dim: 1, "adam": lambda dim: 2 * dim}
"""Floats of optimizer state of a row of width D."""
RUNS = [(kind, name) for kind in ("replicated", *KINDS) for name in STATE]


def held(flight: Flight) -> dict[int, int]:
    """Bytes of a step's rows on the device, by where they lie: copies, gradients and sums."""
    tensors: list[Tensor | None] = [*flight.sharded, *flight.leaves]
    tensors += [leaf.grad for leaf in flight.leaves]
    if flight.result is not None:
        tensors += flight.result.sums.tensors()
    parts = [t.untyped_storage() for t in tensors if t is not None]
    return {part.data_ptr(): part.nbytes() for part in parts if part.nbytes()}


def measure(rank: int, size: int) -> list[tuple]:
    """For each run and group of tables the slots of its regions and those with state; the most
    bytes of rows that were found on the device, and what the summary says of all beyond slots."""
    world, found = open_world("cpu", "gloo", 60), []
    for kind, name in RUNS:
        placement = Placement() if kind == "replicated" else placement_of(kind, CASE, 0.2)
        spec, lr = OPTIMIZERS[name]
        # Room for movement to be ahead as far as P allows.
        slots = tuple(3 * c for c in fitting_slots(CASE, size, placement))
        settings = CachedSettings("data", slots, 4, 2, placement=placement)
        mode, most = make_mode(world, replace(CASE, optimizer=spec, lr=lr), settings), 0
        for step in mode.stream(CASE.batch(s, rank, size) for s in range(CASE.steps)):
            mode.train_step(step)
            seen = held(step.flight)
            for ahead in list(mode.tables.stream._known):
                seen |= held(ahead) if ahead.moved else {}
            most = max(most, sum(seen.values()))
        assert int(mode.applied) == CASE.steps
        regions, stateful, said = [], [], mode.summary()["embedding_device_bytes"]
        for rows in mode.rows:
            cache, regions = rows.cache, [*regions, (rows.slots.replicated, rows.slots.sharded)]
            stateful.append(0 if cache.state is None else len(cache.state))
            tensors = [cache.weight, *([] if cache.state is None else [cache.state])]
            floats = cache.slots * cache.dim + stateful[-1] * STATE[name](cache.dim)
            assert sum(tensor.nbytes for tensor in tensors) == 4 * floats
            assert cache.slots == sum(regions[-1])
            said -= 4 * floats
        found.append((regions, stateful, most, said))
        mode.close()
    close_world(world)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_state_lies_once_and_the_summary_bounds_what_a_rank_holds(world: int) -> None:
    by_run = zip(*run_ranks(measure, world), strict=True)
    for (kind, name), ranks in zip(RUNS, by_run, strict=True):
        regions, states, most, said = zip(*ranks, strict=True)
        assert all(own == regions[0] for own in regions)
        for (replicated, sharded), stateful in zip(
            regions[0], zip(*states, strict=True), strict=True
        ):
            assert (replicated > 0) == (kind != "sharded")
            assert (sharded > 0) == (kind in ("sharded", "mixed", "mixed home"))
            copies = 1 if "home" in kind else world
            expected = copies * replicated + world * sharded
            assert sum(stateful) == (0 if name == "sgd" else expected), (kind, name)
        for seen, told in zip(most, said, strict=True):
            # The largest of the ranks is told: at least the rows that were seen.
            assert 0 < seen <= told <= 5 * max(most), (kind, name, told)
