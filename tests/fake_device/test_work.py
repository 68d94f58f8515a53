"""What a step asks of the device, and who waits for it, by thread, in steps like all others.

The device does nothing before somebody waits for it, so a wait here is one that may be long.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ebc_cases import batches as clicks
from ebc_cases import cached
from fake_device.fake_cuda import DEVICE
from fake_device.process import run
from scenarios import OPTIMIZERS, Scenario, make_mode, table

from distcache import lookahead
from distcache.cache import DeviceCache
from distcache.comm.world import close_world, open_world
from distcache.engine.gradients import DenseGradients
from distcache.engine.groups import Placement
from distcache.engine.movement import RowMover
from distcache.engine.pipeline import SWITCH_S
from distcache.engine.step import StepContext
from distcache.layout import RowKind
from distcache.optim import (
    dense_optimizer,
    masked_step,
    row_update,
    state_tensors,
    uncount,
)
from distcache.parallel.cached import CachedSettings
from distcache.parallel.hybrid import jagged
from distcache.streams import TIMED_EVERY

Counts = dict[tuple[str, str], int]
"""How often each thread did what."""

STEPS = 2 * TIMED_EVERY
STEADY = [step for step in range(TIMED_EVERY, STEPS) if step % TIMED_EVERY > 2]
"""Steps whose training loop reads the times of none."""

MOVEMENT = "distcache-movement"

SCENARIO = Scenario((table("a", 300), table("b", 40, features=2)), steps=STEPS)


def case_of(optimizer: str) -> Scenario:
    """A small run with it."""
    spec, lr = OPTIMIZERS[optimizer]
    return replace(SCENARIO, optimizer=spec, lr=lr)


def of_training(counts: Counts) -> dict[str, int]:
    """What the training loop's thread and autograd's did."""
    found: Counter[str] = Counter()
    for (what, thread), count in counts.items():
        found[what] += count * (thread != MOVEMENT)
    return dict(+found)


def trainer(call: dict[str, Any]) -> list[Counts]:
    """The counts of each step of a trainer; `optimizer`, and `access` to the store."""
    case = case_of(call["optimizer"])
    world, found = open_world("cuda", "gloo", 60), []
    mode = make_mode(world, case, CachedSettings("data", (180,), 2, 1, access=call["access"]))
    for step in mode.stream(case.batch(s) for s in range(case.steps)):
        before = Counter(DEVICE.counts)
        mode.train_step(step)
        found.append(dict(Counter(DEVICE.counts) - before))
        if step.batch.index < STEPS / 2:  # threads end when all batches are planned and moved
            assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert mode.summary()["stage_ms"]["forward_backward"] > 0
    assert mode.clock.steps == STEPS / TIMED_EVERY
    mode.close()
    assert sys.getswitchinterval() == pytest.approx(5e-3)  # Python's own
    close_world(world)
    return found


def drop_in(call: dict[str, Any]) -> list[Counts]:
    """The same of a loop over a collection with a look-ahead: its forward, backward and step."""
    ebc, found = cached(device="cuda", rows=260, prefetch=1, store_access=call["access"]), []
    for batch in lookahead(clicks(STEPS), ebc):
        before = Counter(DEVICE.counts)
        pooled = ebc(batch.sparse_features).values()
        (pooled * pooled).sum().backward()
        ebc.step()
        found.append(dict(Counter(DEVICE.counts) - before))
    ebc.close()
    return found


TRAINED = [("sgd", "staged"), ("adagrad", "zero_copy"), ("adam", "staged"), ("adam", "zero_copy")]


def test_training_copies_nothing_to_the_device_and_waits_for_nothing(guard: Path) -> None:
    """Movement sends indices and batch, from pinned memory, and alone waits for what leaves."""
    of_trainer = [{"optimizer": name, "access": access} for name, access in TRAINED]
    of_drop_in = [{"access": access} for _, access in TRAINED[:2]]
    found = [*run(guard, trainer, of_trainer), *run(guard, drop_in, of_drop_in)]
    for call, (steps,) in zip([*of_trainer, *of_drop_in], found, strict=True):
        waits = sum(step.get(("host wait", MOVEMENT), 0) for step in steps)
        assert waits <= STEPS * (call["access"] == "staged"), call
        for step in STEADY:
            own = of_training(steps[step])
            assert own.pop("launch") > 0
            # A trainer's loss and flags, which are read two steps later.
            said = {"to host, pinned": 1, "bytes to host": 16}
            assert own == (said if "optimizer" in call else {}), (call, step)
            assert not any("pageable" in what for what, _ in steps[step]), (call, step)


def left_early(call: dict[str, Any]) -> list[int]:
    """Operations of each stream that are to come once the host has waited for that of the loop,
    after a stream of steps was left with rows on their way, and the trainer closed."""
    case = case_of("adagrad")
    world = open_world("cuda", "gloo", 60)
    mode = make_mode(world, case, CachedSettings("data", (280,), 2, 3, access=call["access"]))
    for step in mode.stream(case.batch(s) for s in range(case.steps)):
        mode.train_step(step)
        if step.batch.index == STEPS // 2:
            break
    mode.close()
    torch.cuda.current_stream().synchronize()
    close_world(world)
    return [stream.queued - stream.done for stream in DEVICE.streams]


def test_nothing_is_on_its_way_to_memory_that_was_let_go_of(guard: Path) -> None:
    for (left,) in run(guard, left_early, [{"access": "staged"}, {"access": "zero_copy"}]):
        assert len(left) > 3 and not any(left)


def handed_over(call: dict[str, Any]) -> list[bool]:
    """Of each index tensor that movement sends for the rows of a step, whether its memory is among
    what the training stream is told of; `empty`: where one rank has no ids."""
    case = replace(case_of("adagrad"), steps=8, empty_ranks=call["empty"])
    world, found, send = open_world("cuda", "gloo", 60), list[bool](), RowMover._send

    def sent(mover: RowMover, context: StepContext) -> None:
        send(mover, context)
        made = {id(tensor.memory) for tensor in context.made}
        for at in context.where:
            for tensor in (at.slots, at.fetch_slots, at.touched_rows, at.source_rows):
                found.append(id(tensor.memory) in made)

    with patch.object(RowMover, "_send", sent):
        mode = make_mode(world, case, CachedSettings("data", (280,), 2, 1))
        for step in mode.stream(case.batch(s, world.rank, 2) for s in range(case.steps)):
            mode.train_step(step)
        mode.close()
    close_world(world)
    return found


def test_all_that_movement_sends_is_handed_over(guard: Path) -> None:
    """Also where a rank names no rows, whose homes are asked for by others."""
    for by_rank in run(guard, handed_over, [{"empty": False}, {"empty": True}], ranks=2):
        for found in by_rank:
            assert len(found) == 4 * 8 and all(found)


def grown() -> list[list[float]]:
    """The rows of a cache that grew on a stream beside, while the first one took its memory."""
    cache, beside = (
        DeviceCache(2, RowKind(4, 4, torch.float32, torch.float32), "cuda"),
        torch.cuda.Stream(),
    )
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        rows = torch.arange(2)
        cache.fill(rows, rows, torch.ones(2, 4), torch.full((2, 4), 2.0))
        beside.synchronize()
        cache.ensure(100)
    for _ in range(2):
        torch.zeros(2, 4, device="cuda")
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(beside):
        return [part.tolist() for part in cache.kind.parts(cache.read(rows))]


def first_steps(call: dict[str, Any]) -> list[float]:
    """Seconds from the end of each of the first steps to the start of the next one's fill."""
    case = replace(case_of("adagrad"), steps=8)
    world = open_world("cuda", "gloo", 60)
    how = CachedSettings("data", (280,), 2, 3, placement=Placement(call["placement"]))
    mode, found = make_mode(world, case, how), []
    mode.streams.timed_every = 1
    for step in mode.stream(case.batch(s, world.rank, 2) for s in range(case.steps)):
        mode.train_step(step)
        found.append({span.name: span for span in step.context.spans})
    mode.close()
    close_world(world)
    return [after["fill"].start - step["apply"].end for step, after in pairwise(found)]


def test_nothing_moves_beside_the_first_step_of_several_ranks(guard: Path) -> None:
    """Its kernels are loaded while no other thread has the ranks wait for one another."""
    given = [{"placement": "replicated"}, {"placement": "sharded"}]
    for by_rank in run(guard, first_steps, given, ranks=2):
        assert min(gaps[0] for gaps in by_rank) > 0
        assert min(min(gaps) for gaps in by_rank) < 0  # and then it does


def masked(call: dict[str, Any]) -> tuple[list[list[float]], list[list[float]], list[int], int]:
    """Weights and state after steps of which one in two is masked, and of those that are not,
    launches of the masked ones, and parameters. `optimizer`."""
    gradients, ends, launches = [torch.nan, 0.5, torch.inf, -0.25], [], []
    for given in (gradients, [0.5, -0.25]):
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 2) for _ in range(8)))
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 1.0)
        model = model.to("cuda")
        optimizer = dense_optimizer(model.parameters(), row_update(call["optimizer"], 0.0), 0.1)
        dense = DenseGradients(model)
        for value in given:
            dense.flat.fill_(value)
            enabled = torch.tensor([math.isfinite(value)]).to("cuda")
            before = DEVICE.counts["launch", "MainThread"]
            masked_step(optimizer, enabled, [dense.flat])
            launches.append(DEVICE.counts["launch", "MainThread"] - before)
            if not math.isfinite(value):
                uncount(optimizer)
        found = [*model.parameters(), *state_tensors(optimizer, model).values()]
        ends.append([value.detach().cpu().flatten().tolist() for value in found])
    return *ends, launches, len(dense.parameters)


def test_a_masked_step_takes_few_launches_and_leaves_all_bits(guard: Path) -> None:
    kept = {"sgd": 1, "adagrad": 3, "adam": 4}
    found = run(guard, masked, [{"optimizer": name} for name in kept])
    for ((some, all_of_them, launches, count),), of_each in zip(found, kept.values(), strict=True):
        assert some == all_of_them and len(some) == count * of_each
        assert max(launches[1:4]) < count  # the first of all makes state


def bags_for_torchrec() -> tuple[list[list[float]], dict[str, int]]:
    """Bags as `hybrid` sends them to the device, and what that took."""
    ids, before = SCENARIO.batch(0).ids, Counter(DEVICE.counts)
    weighted = replace(ids, weights=torch.rand(len(ids.values)))
    given = [
        jagged(one, SCENARIO.global_batch + 1, torch.device("cuda")) for one in (ids, weighted)
    ]
    took = of_training(Counter(DEVICE.counts) - before)
    values = given[1].weights().tolist() + given[0].values().tolist()
    return [values, [*weighted.weights.tolist(), *ids.values.tolist()]], took


def called(work: Callable[[], Any]) -> Any:
    """What it gives."""
    return work()


def test_a_cache_that_grows_reads_what_it_leaves_and_bags_for_torchrec_are_pinned(
    guard: Path,
) -> None:
    (rows,), ((found, took),) = run(guard, called, [grown, bags_for_torchrec])
    assert rows == [[[1.0] * 4] * 2, [[2.0] * 4] * 2]
    assert found[0] == found[1]
    assert took.pop("to device, pinned") == 5 and not any("wait" in w or "page" in w for w in took)
