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
from distcache.engine.step import Flight
from distcache.parallel.cached import CachedSettings

STATE = {"sgd": lambda dim: 0, "rowwise_adagrad": lambda dim: 1, "adam": lambda dim: 2 * dim}
"""Floats of optimizer state of a row of width D."""


def held(flight: Flight) -> dict[int, int]:
    """Bytes of a step's rows on the device, by where they lie: copies, gradients and sums."""
    tensors: list[Tensor | None] = [*flight.sharded, *flight.leaves]
    tensors += [leaf.grad for leaf in flight.leaves]
    if flight.result is not None:
        tensors += flight.result.sums.tensors()
    parts = [t.untyped_storage() for t in tensors if t is not None]
    return {part.data_ptr(): part.nbytes() for part in parts if part.nbytes()}


def measure(rank: int, size: int) -> list[dict]:
    """For each placement and optimizer: bytes of slots and state, of the rows of steps as they were
    found, and what the summary says of both together; regions of the slots, and updates counted."""
    world, found = open_world("cpu", "gloo", 60), []
    for number, kind in enumerate(("replicated", *KINDS)):
        placement = placement_of(kind, CASE, 0.2) if number else None
        for name in STATE:
            spec, lr = OPTIMIZERS[name]
            settings = CachedSettings(
                "data", (), 4, 2, **({"placement": placement} if number else {})
            )
            # Room for movement to be ahead as far as P allows.
            slots = tuple(3 * c for c in fitting_slots(CASE, size, settings.placement))
            case = replace(CASE, optimizer=spec, lr=lr)
            mode = make_mode(world, case, replace(settings, slots=slots))
            most = 0
            for step in mode.stream(CASE.batch(s, rank, size) for s in range(CASE.steps)):
                mode.train_step(step)
                seen = held(step.flight)
                for ahead in list(mode.tables.stream._known):
                    seen |= held(ahead) if ahead.moved else {}
                most = max(most, sum(seen.values()))
            caches = [rows.cache for rows in mode.rows]
            found.append(
                {
                    "kind": kind,
                    "name": name,
                    "dims": [cache.dim for cache in caches],
                    "slots": [cache.slots for cache in caches],
                    "weights": sum(cache.weight.nbytes for cache in caches),
                    "state": [0 if c.state is None else len(c.state) for c in caches],
                    "state_bytes": sum(0 if c.state is None else c.state.nbytes for c in caches),
                    "regions": [(r.slots.replicated, r.slots.sharded) for r in mode.rows],
                    "said": mode.summary()["embedding_device_bytes"],
                    "most": most,
                    "applied": int(mode.applied),
                }
            )
            mode.close()
    close_world(world)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_state_lies_once_and_the_summary_bounds_what_a_rank_holds(world: int) -> None:
    by_rank = run_ranks(measure, world)
    for ranks in zip(*by_rank, strict=True):
        kind, name, regions = ranks[0]["kind"], ranks[0]["name"], ranks[0]["regions"]
        assert [r["regions"] for r in ranks] == [regions] * world
        assert len({r["applied"] for r in ranks}) == 1 and ranks[0]["applied"] == CASE.steps
        for group, (replicated, sharded) in enumerate(regions):
            assert ranks[0]["slots"][group] == replicated + sharded
            assert (replicated > 0) == (kind != "sharded") and (sharded > 0) == (
                kind in ("sharded", "mixed", "mixed home")
            )
            stateful = sum(r["state"][group] for r in ranks)
            copies = 1 if "home" in kind else world
            expected = copies * replicated + world * sharded
            assert stateful == (0 if name == "sgd" else expected), (kind, name)
        for rank in ranks:
            shape = zip(rank["slots"], rank["state"], rank["dims"], strict=True)
            both = sum(4 * (slots * dim + own * STATE[name](dim)) for slots, own, dim in shape)
            assert rank["weights"] + rank["state_bytes"] == both
            # The largest of the ranks is told: slots, state, and at least the rows that were seen.
            assert rank["most"] > 0 and both + rank["most"] <= rank["said"] <= both + 5 * max(
                r["most"] for r in ranks
            ), (kind, name, rank)
