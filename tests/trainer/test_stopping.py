"""Signals to a whole process group, of which the workers of a `DataLoader` are part: they die, and
the run stops in order and goes on later to the same bits."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader, Dataset

import distcache
from distcache.comm.world import close_world, open_world
from distcache.errors import DataError
from distcache.stopping import StopRequest

PASSES, COUNT, LAST = 2, 10, 6
WAYS = [
    ("fork", True, signal.SIGTERM, 0),
    ("fork", False, signal.SIGINT, 2),
    ("spawn", True, signal.SIGINT, 2),
    ("spawn", False, signal.SIGTERM, 0),
]
"""How workers start, whether they persist, what the group of the last rank gets, and the window:
with 0 the loop has no step left to train when the workers die."""


class Items(Dataset):
    """Items of a rank. The worker that makes item `LAST` of the last one sends the signal `number`
    to its group, while the other one is still at the item before."""

    def __init__(self, rank: int, size: int, number: int | None = None) -> None:
        self.seed, self.number = rank, number if rank == size - 1 else None

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, at: int) -> Any:
        if at in (LAST - 1, LAST) and self.number is not None:
            time.sleep(60 if at < LAST else 0.3)
            os.killpg(0, self.number)
            time.sleep(60)
        drawn = torch.Generator().manual_seed(10 * at + self.seed)
        ids = torch.randint(50, (8,), generator=drawn)
        dense = torch.rand(8, 3, generator=drawn)
        return dense, (ids, torch.arange(9)), (ids % 2).float()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = torch.nn.Linear(7, 1)

    def forward(self, dense, pooled):
        return self.linear(torch.cat([dense, pooled], 1)).squeeze(1)


def loader(rank: int, size: int, how: tuple, number: int | None = None) -> DataLoader:
    method, persist = how[:2]
    more: dict[str, Any] = {"multiprocessing_context": method, "persistent_workers": persist}
    if method == "fork":  # then a dead worker is seen sooner, and no worker takes long to start
        more["timeout"] = 2
    data = Items(rank, size, number)
    return DataLoader(data, None, shuffle=False, num_workers=2, **more)


def fitted(world, folder: Path, items: Any, window: int = 2):
    tables = [distcache.TableSpec("t", rows=50, dim=4, features=("t",))]
    settings = {"run.dir": str(folder), "trainer.resume": "auto", "cache.rows": 30}
    settings |= {"cache.lookahead": window}
    return distcache.fit(items, tables, Net(), epochs=PASSES, settings=settings, world=world)


def digests(summary: dict) -> tuple:
    return summary["loss_digest"], summary["state_digest"]


def start(rank: int, size: int):
    """A rank in a process group of its own, which may have workers."""
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False
    return open_world("cpu", timeout_s=60)


def stop_fits(rank: int, size: int, home: str, ways: list[tuple]) -> list[Any]:
    """The digests of a whole run, then what comes of one for each of the ways."""
    world, folder = start(rank, size), Path(home)
    data = Items(rank, size)
    whole = fitted(world, folder / "whole", [data[at] for at in range(COUNT)]).summary
    seen: list[Any] = [digests(whole)]
    for way in ways:
        where = folder / f"{way[0]}-{way[1]}"
        stopped = fitted(world, where, loader(rank, size, way, way[2]), way[3])
        left = sorted(path.name for path in (where / "checkpoints").iterdir())
        rest = fitted(world, where, loader(rank, size, way)).summary
        steps = stopped.summary["steps"]
        seen.append((stopped.stopped_by, left == [f"step_{steps:08d}"], steps, rest["first_step"]))
        seen.append(digests(rest))
    close_world(world)
    return seen


SLOW = pytest.mark.slow
CASES = [(2, WAYS[:2]), pytest.param(1, WAYS, marks=SLOW), pytest.param(2, WAYS[2:], marks=SLOW)]


@pytest.mark.parametrize(("size", "ways"), CASES)
def test_fit_stops_in_order_though_the_workers_die(tmp_path, size, ways):
    for found in run_ranks(stop_fits, size, str(tmp_path), ways, timeout=100):
        whole, *others = found
        for (_, _, number, _), (by, saved, steps, first) in zip(ways, others[::2], strict=True):
            assert (by, saved, first) == (number, True, steps) and steps <= LAST
        assert others[1::2] == [whole] * len(ways)


def own_loop(rank: int, size: int, folder: str, how: tuple, number: int | None) -> Any:
    """A loop over a cached collection that goes on where it was; its signal, step and weights."""
    world = start(rank, size)
    close_world(world)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(5)
    bag = distcache.CachedEmbeddingBag(
        50, 4, mode="sum", include_last_offset=True, device="cpu", rows=30,
        optimizer=distcache.optim.Adagrad(lr=0.1), lookahead=how[3],
    )  # fmt: skip
    step, _ = distcache.load(folder, bag, missing_ok=True)
    items = loader(rank, size, how, number)
    with distcache.StopRequest() as stop:
        ahead = distcache.lookahead(skipping(items, step), bag, ids=lambda item: item[1])
        for _, ids, labels in ahead:
            (bag(*ids).sum(1) - labels).square().sum().backward()
            bag.step()
            step += 1
            if stop.agreed():
                break
        by = stop.agreed()
        distcache.save(f"{folder}/step_{step:08d}", bag, step=step)
        ahead.close()
    weight = bag.weight.tolist()
    bag.close()
    return by, step, weight


def skipping(items: DataLoader, count: int):
    for at, item in enumerate(items):
        if at >= count:
            yield item


@pytest.mark.parametrize(("size", "how"), [(2, WAYS[0]), pytest.param(1, WAYS[1], marks=SLOW)])
def test_a_loop_of_ones_own_stops_in_order_though_the_workers_die(tmp_path, size, how):
    whole = run_ranks(own_loop, size, str(tmp_path / "whole"), how, None)
    stopped = run_ranks(own_loop, size, str(tmp_path / "stopped"), how, how[2])
    rest = run_ranks(own_loop, size, str(tmp_path / "stopped"), how, None)
    assert {(by, step <= LAST) for by, step, _ in stopped} == {(how[2], True)}
    assert len({step for _, step, _ in stopped}) == 1
    for (by, step, weight), (_, _, expected) in zip(rest, whole, strict=True):
        assert (by, step) == (None, COUNT)
        assert weight == expected


def lost_worker(rank: int, size: int, folder: str) -> str:
    """What a run raises of which a worker is killed, without a stop."""
    world = start(rank, size)
    items = loader(rank, size, WAYS[1])
    items.dataset.__class__ = Dying  # which a DataLoader does not let be replaced
    try:
        fitted(world, Path(folder), items)
    except DataError as error:
        return str(error)
    finally:
        close_world(world, orderly=False)
    return "no error"


class Dying(Items):
    def __getitem__(self, at: int) -> Any:
        if at == LAST:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(at)


def test_without_a_stop_a_dead_worker_is_an_error_of_the_loader(tmp_path):
    (said,) = run_ranks(lost_worker, 1, str(tmp_path))
    assert re.match(r"train batch \d of your loader: ", said)


def test_handlers_come_back_and_a_request_elsewhere_has_none():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    with StopRequest():
        pass
    before = [signal.getsignal(number) for number in numbers]
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == stop.agreed() == signal.SIGTERM
    assert [signal.getsignal(number) for number in numbers] == before
