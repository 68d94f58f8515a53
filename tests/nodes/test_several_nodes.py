"""Several nodes, each with its part of the rows: the bits of one node with the same ranks; bytes of
sharded rows between nodes, counted from the ids; the drop-in (by host name);
checkpoints: the files of one node's, whatever wrote them, and the same trajectory.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ebc_cases import Clicks, Pooled, batches, cached, loss_of, part
from node_cases import open_nodes, place_of
from placement_cases import distinct_rows
from ranks import run_ranks
from scenarios import (
    OPTIMIZERS,
    Outcome,
    Scenario,
    finish,
    make_mode,
    popularity_of,
    table,
)
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from distcache import lookahead
from distcache.checkpoint import files as checkpoint_files
from distcache.checkpoint.state import TrainerState
from distcache.comm.world import Nodes, World, close_world
from distcache.engine import full_tables
from distcache.engine.groups import Placement, TableGroup, make_groups
from distcache.errors import ConfigError, DistcacheError, MemoryTooSmallError, PlanError
from distcache.optim import row_update
from distcache.parallel.cached import CachedSettings
from distcache.store import memory as available

HALF = replace(table("c", 7, dim=4), dtype=torch.bfloat16)
TABLES = (table("a", 300), table("b", 40, features=2), HALF)
CASE = Scenario(TABLES, row_update("adagrad"), steps=10, global_batch=48, last_batch=3)
SLOTS = (160, 16)
WORLD = 4
PLACEMENTS = {
    "sharded": Placement("sharded"),
    "mixed": Placement("mixed", "home", hot=tuple(np.arange(count) for count in (20, 5, 1))),
    "all late": Placement("sharded", early=False),
}
SHARING = CachedSettings("data", SLOTS, 3, 2, validate=True)
ROOMY = CachedSettings("data", (280, 16), 6, 2, validate=True)
RUNS = {name: replace(SHARING, placement=own) for name, own in PLACEMENTS.items()} | {
    "replicated": ROOMY,
    "state at home": replace(ROOMY, placement=Placement(state="home"), schedule="serial"),
    "host": CachedSettings("host"),
    "resident": CachedSettings("resident"),
}


@dataclass(frozen=True)
class Run:
    """A run's losses and digest, what this rank has cached, and what it sent, bytes by counter."""

    losses: list[float]
    state: str
    cached: np.ndarray
    sent: dict[str, int]


def run_all(rank: int, size: int, layouts: Sequence[tuple[int, ...]]) -> list[dict[str, Run]]:
    """Every run on the nodes of each layout."""
    found = []
    for sizes in layouts:
        world = open_nodes(rank, sizes)
        found.append({name: run_one(world, settings) for name, settings in RUNS.items()})
        close_world(world)
    return found


def run_one(world: World, settings: CachedSettings) -> Run:
    """A run with evaluations, which are not counted; its counters are read when it is over."""
    mode, losses = make_mode(world, CASE, settings), []
    order = [(step, "train") for step in range(CASE.steps)] + [(2, "eval"), (5, "eval")]
    batches = (CASE.batch(step, world.rank, world.size, kind) for step, kind in sorted(order))
    for step in mode.stream(batches):
        if step.batch.kind == "eval":
            mode.eval_step(step)
        else:
            losses.append(mode.train_step(step).loss)
    outcome, counters = finish(mode, CASE, losses), mode.counters
    sent = {"inter_node_bytes": 0} | counters.values()
    return Run(outcome.losses, outcome.state_digest, outcome.cached, sent)


def named_rows(placement: Placement) -> Iterator[tuple[TableGroup, list[np.ndarray]]]:
    """For each step and group: the distinct sharded rows that each rank names."""
    groups = placement.groups(make_groups(CASE.tables, CASE.features, WORLD))
    for step in range(CASE.steps):
        ids = [CASE.batch(step, rank, WORLD).ids for rank in range(WORLD)]
        for group in groups:
            rows = [distinct_rows(group, part, CASE.dtype) for part in ids]
            yield group, [part[~np.isin(part, group.hot)] for part in rows]


def bytes_between(placement: Placement, sizes: tuple[int, ...]) -> int:
    """Bytes of sharded rows and of their gradients between nodes: from each home to each rank of
    another node that requested a row, and back."""
    nodes = Nodes(sizes)
    total = 0
    for group, named in named_rows(placement):
        row_bytes = (2 if group.layout.dtype else 4) * group.dim
        for rank, rows in enumerate(named):
            homes = group.layout.home(rows).tolist()
            crossing = sum(nodes.of(home) != nodes.of(rank) for home in homes)
            total += (row_bytes + 4 * group.dim) * crossing
    return total


NODES = [(4,), (2, 2), (1, 3)]


@pytest.fixture(scope="module")
def by_nodes() -> dict[tuple[int, ...], dict[str, list[Run]]]:
    """The runs of every rank, by the nodes' sizes and by name."""
    by_rank = run_ranks(run_all, WORLD, NODES, timeout=200)
    return {
        sizes: {name: [of_rank[place][name] for of_rank in by_rank] for name in RUNS}
        for place, sizes in enumerate(NODES)
    }


def total(runs: list[Run], counter: str) -> int:
    return sum(run.sent[counter] for run in runs)


@pytest.mark.parametrize("name", RUNS)
def test_nodes_have_the_bits_of_one(by_nodes: dict, name: str) -> None:
    one = by_nodes[(4,)][name]
    for sizes in NODES:
        for rank, run in enumerate(by_nodes[sizes][name]):
            assert run.losses == one[rank].losses
            assert rank or run.state == one[0].state, "rank 0 has the whole tables"
            assert np.array_equal(run.cached, one[rank].cached), (sizes, rank)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_bytes_between_nodes(by_nodes: dict, name: str) -> None:
    one = by_nodes[(4,)][name]
    for sizes in ((2, 2), (1, 3)):
        runs = by_nodes[sizes][name]
        for counter in ("collective_bytes", "dense_collective_bytes", "planning_bytes"):
            assert total(runs, counter) == total(one, counter), (sizes, counter)
        if name == "mixed":
            continue  # whose replicated rows go round a ring
        last = (np.cumsum(sizes) - 1).tolist()
        dense = sum(runs[rank].sent["dense_collective_bytes"] for rank in last)
        between = total(runs, "inter_node_bytes") - dense
        assert between == bytes_between(PLACEMENTS[name], sizes) > 0


LAYOUTS = [(3,), (1, 2), (1, 1, 1)]


def tables() -> list[EmbeddingBagConfig]:
    """Initial rows of three kinds: as they are, in a range, and by a function."""
    told = ({}, {"weight_init_min": 1.0, "weight_init_max": 2.0},
            {"init_fn": partial(torch.nn.init.normal_, std=0.1)})  # fmt: skip
    return [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=90 - i, embedding_dim=8, feature_names=[f"f{i}"], **how
        )
        for i, how in enumerate(told)
    ]


def steps(ebc, data: list[Clicks]) -> None:
    """The dense part stays as it is: this is about rows."""
    model = DistributedDataParallel(Pooled(ebc))
    for batch in lookahead(data, ebc):
        model.zero_grad()
        loss_of(model, batch).backward()
        ebc.step()


def everything(ebc) -> dict:
    """Weights and optimizer state of all tables."""
    found = {f"weight {name}": value.clone() for name, value in ebc.state_dict().items()}
    for owner, values in ebc.optimizer.state_dict()["state"].items():
        found |= {f"{owner} {name}": value.clone() for name, value in values.items()}
    return {name: value.numpy() for name, value in found.items()}


WALKS = ({}, {"placement": "sharded"}, {"state": "home"})


def walks(rank: int, size: int) -> list[list[dict]]:
    dist.init_process_group("gloo")
    found = [walk(rank, size, settings) for settings in WALKS]
    dist.barrier()
    dist.destroy_process_group()
    return found


def walk(rank: int, size: int, settings: dict) -> list[dict]:
    """Initial rows, and those after a run that goes on in a new collection, on each layout."""
    own, found = socket.gethostname, []
    data = [part(batch, rank, size) for batch in batches(10, tables=tables())]
    for sizes in LAYOUTS:
        node = place_of(rank, sizes)["GROUP_RANK"]
        socket.gethostname = lambda node=node: f"node{node}"
        first, second = (
            cached("adam", tables=tables(), rows=r, timeout_s=60, **settings) for r in (270, 240)
        )
        assert first.tables.world.nodes.sizes == sizes
        bytes_here = sum(rows.store.nbytes for rows in first.tables.engine.rows)
        start = everything(first)
        steps(first, data[:5])
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        steps(second, data[5:])
        found.append({"start": start, "end": everything(second), "bytes": bytes_here})
        first.close()
        second.close()
    socket.gethostname = own
    return found


def test_nodes_have_the_bits_and_the_state_of_one() -> None:
    for by_rank in zip(*run_ranks(walks, 3, timeout=200), strict=True):
        check_walk(by_rank)


def check_walk(by_rank: Sequence[list[dict]]) -> None:
    want = by_rank[0][0]
    assert {float(v) for k, v in want["end"].items() if k.endswith(" step")} == {10.0}
    assert want["start"]["weight embedding_bags.t1.weight"].min() >= 1
    for found in by_rank:
        for layout in found:
            for when in ("start", "end"):
                assert layout[when].keys() == want[when].keys()
                for name, value in want[when].items():
                    assert (layout[when][name] == value).all(), (when, name)
    # 90 + 89 + 88 rows are 89 blocks of 3, a row of each home; weight and two moments of float32.
    for at, sizes in enumerate(LAYOUTS):
        for rank, found in enumerate(by_rank):
            own = sizes[0] if rank < sizes[0] else sizes[-1]
            rows = 89 * own
            page = -(-rows * 8 * 4 // 4096) * 4096
            assert found[at]["bytes"] == page + rows * 16 * 4


def drawn(rank: int, size: int) -> list[dict]:
    """Initial rows from torch's generator, rank 0's on every node, and weights that nodes do not
    have whole."""
    dist.init_process_group("gloo")
    own, found = socket.gethostname, []
    for sizes in LAYOUTS:
        node = place_of(rank, sizes)["GROUP_RANK"]
        socket.gethostname = lambda node=node: f"node{node}"
        torch.manual_seed(rank)
        ebc = cached("adam", tables=tables(), init="torch", rows=270, timeout_s=60)
        found.append(everything(ebc))
        if len(sizes) > 1:
            with pytest.raises(PlanError, match=r"weights of table 't0' lie on \d nodes, each of"):
                ebc.embedding_bags["t1"]
        else:
            assert ebc.embedding_bags["t1"].weight.shape == (89, 8)
        ebc.close()
    socket.gethostname = own
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_rows_of_torchs_generator_are_rank_0s_on_every_node() -> None:
    torch.manual_seed(0)
    want = EmbeddingBagCollection(tables()).state_dict()
    for found in run_ranks(drawn, 3):
        for layout in found:
            for name, value in want.items():
                assert (layout[f"weight {name}"] == value.numpy()).all()
            assert not any(v.any() for k, v in layout.items() if "exp_avg" in k)


def too_large(rank: int, size: int) -> str:
    """A node without the memory for whole tables says so; training could go on."""
    dist.init_process_group("gloo")
    socket.gethostname = lambda: f"node{rank}"
    ebc = cached("sgd", tables=tables(), rows=240, device="cpu", timeout_s=60)
    available.available_memory = lambda: 100
    with pytest.raises(MemoryTooSmallError) as caught:
        ebc.state_dict()
    ebc.close()
    dist.barrier()
    dist.destroy_process_group()
    return str(caught.value)


def test_copies_of_whole_tables_must_fit_a_node() -> None:
    for message in run_ranks(too_large, 2):
        assert "a copy of table 't0'" in message and full_tables._WAY_OUT in message


MANY = (*TABLES, table("d", 1))
SAVED = Scenario(MANY, *OPTIMIZERS["adam"], steps=12, weighted=True)
SAVING = CachedSettings("data", (236, 68), 6, 2)


def identity(size: int) -> dict[str, Any]:
    tables = tuple((spec.name, spec.rows, spec.dim) for spec in SAVED.tables)
    return checkpoints.identity_of("data", size, "float32", "adam", 0, SAVED.global_batch, tables)


def part_of_run(
    world: World, steps: range, source: Path | None, target: Path, popular: bool
) -> Outcome:
    """Some steps of the scenario, from the checkpoint `source` on; ends with one in `target`."""
    popularity = popularity_of(SAVED, SAVING.slots) if popular else None
    mode = make_mode(world, SAVED, SAVING, popularity)
    mode.scratch = target.parent
    if source is not None:
        state = checkpoints.resume(source, mode, identity(world.size), world)
        assert state.step == steps.start
    batches = [SAVED.batch(step, world.rank, world.size) for step in steps]
    losses = [mode.train_step(step).loss for step in mode.stream(batches)]
    mode.flush()
    checkpoints.save(target, mode, identity(world.size), TrainerState(steps.stop), world)
    return finish(mode, SAVED, losses)


def wander(rank: int, size: int, home: str, way: list[tuple[int, ...]], popular: bool) -> list:
    """The scenario in as many parts as `way` has nodes, each on other nodes than the one before."""
    full_tables.BLOCK_BYTES = 3 << 10  # several blocks of each table
    found, source = [], None
    cuts = np.linspace(0, SAVED.steps, len(way) + 1, dtype=int)
    for at, sizes in enumerate(way):
        world = open_nodes(rank, sizes)
        target = Path(home, f"part{at}", "model")
        steps = range(int(cuts[at]), int(cuts[at + 1]))
        found.append(part_of_run(world, steps, source, target, popular and at % 2 == 0))
        assert list(target.parent.iterdir()) == [target]
        source = target
        close_world(world)
    return found


def test_from_one_node_to_several_and_back(tmp_path: Path) -> None:
    one, several = (3,), (1, 2)
    straight = run_ranks(wander, 3, str(tmp_path / "straight"), [one], False)[0][0]
    files = [tmp_path / "straight" / "part0"]
    for name, way in (("there", [one, several, one]), ("back", [several, several])):
        found = run_ranks(wander, 3, str(tmp_path / name), way, True)[0]
        assert [loss for part in found for loss in part.losses] == straight.losses
        assert found[-1].state_digest == straight.state_digest
        files.append(tmp_path / name / f"part{len(way) - 1}")
    first, *others = (checkpoints.tensors(folder / "model") for folder in files)
    assert first["tables.a.exp_avg"].shape == (300, 8) and first["tables.a.exp_avg"].any()
    for other in others:
        assert first.keys() == other.keys()
        for name, value in first.items():
            assert torch.equal(value, other[name]), name


def own_folders(rank: int, size: int, home: str) -> tuple[str, str, list[str]]:
    """Save into folders that the two nodes do not share; what `check_run_folder` says of them."""
    checkpoint_files.PATIENCE_S = 0.2
    world = open_nodes(rank, (1, 1))
    folder, messages = Path(home, f"node{rank}"), []
    folder.mkdir()
    mode = SimpleNamespace(state_dict=lambda _: {"rows": torch.ones(3)})
    for action in (
        lambda: checkpoints.save(folder / "model", mode, identity(2), TrainerState(1), world),
        lambda: checkpoint_files.check_run_folder(world, folder, "run.save=true"),
    ):
        with pytest.raises(DistcacheError) as caught:
            action()
        assert isinstance(caught.value, ConfigError) is bool(messages)
        messages.append(str(caught.value))
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    checkpoint_files.logger.addHandler(handler)
    checkpoint_files.check_run_folder(world, folder, None)
    checkpoint_files.check_run_folder(world, Path(home), "run.save=true")
    close_world(world)
    return (*messages, logged)


def test_folders_that_nodes_do_not_share_are_refused(tmp_path: Path) -> None:
    for rank, (saving, starting, logged) in enumerate(run_ranks(own_folders, 2, str(tmp_path))):
        assert "not saved" in saving and "ranks [1]" in saving and f"node{rank}/model" in saving
        assert "run.save=true" in starting and "ranks [1]" in starting
        assert len(logged) == (rank == 0)
    assert [list(Path(tmp_path, f"node{rank}").iterdir()) for rank in range(2)] == [[], []]


def test_temporary_files_are_unnamed_and_a_full_disk_says_so(tmp_path, monkeypatch) -> None:
    part = full_tables.disk_zeros((1000, 4), torch.float64, tmp_path)
    assert part.shape == (1000, 4) and part.dtype == torch.float64 and not part.any()
    part[999, 3] = 1
    assert list(tmp_path.iterdir()) == [] and part.sum() == 1
    assert full_tables.disk_zeros((0, 4), torch.float32, tmp_path).shape == (0, 4)

    def full(fd: int, start: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(DistcacheError, match=r"No space left.*make room there"):
        full_tables.disk_zeros((1000, 4), torch.float64, tmp_path)
