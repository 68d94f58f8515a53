"""The drop-in collection on several nodes (by host name): the bits and the state of one."""

from __future__ import annotations

import copy
import socket
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ebc_cases import Clicks, Pooled, batches, cached, loss_of, part
from node_cases import place_of
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagConfig

from distcache import lookahead
from distcache.engine import whole
from distcache.errors import MemoryTooSmallError
from distcache.store import memory as available

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
    for table, values in ebc.optimizer.state_dict()["state"].items():
        found |= {f"{table} {name}": value.clone() for name, value in values.items()}
    return {name: value.numpy() for name, value in found.items()}


def walk(rank: int, size: int, settings: dict) -> list[dict]:
    """Initial rows, and those after a run that goes on in a new collection, on each layout."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own, found = socket.gethostname, []
    data = [part(batch, rank, size) for batch in batches(10, tables=tables())]
    for sizes in LAYOUTS:
        node = place_of(rank, sizes)["GROUP_RANK"]
        socket.gethostname = lambda node=node: f"node{node}"
        first, second = (
            cached("adam", tables=tables(), rows=r, timeout_s=60, **settings) for r in (270, 240)
        )
        assert first.tables.world.nodes.sizes == sizes
        bytes_here = sum(rows.store.nbytes for rows in first.tables.rows)
        start = everything(first)
        steps(first, data[:5])
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        steps(second, data[5:])
        found.append({"start": start, "end": everything(second), "bytes": bytes_here})
        first.close()
        second.close()
    socket.gethostname = own
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("settings", [{}, {"placement": "sharded"}, {"state": "home"}], ids=str)
def test_nodes_have_the_bits_and_the_state_of_one(settings: dict) -> None:
    by_rank = run_ranks(walk, 3, settings, timeout=200)
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


def too_large(rank: int, size: int) -> str:
    """A node without the memory for whole tables says so; training could go on."""
    dist.init_process_group("gloo")
    socket.gethostname = lambda: f"node{rank}"
    ebc = cached("sgd", tables=tables(), rows=240, timeout_s=60)
    available.available_memory = lambda: 100
    with pytest.raises(MemoryTooSmallError) as caught:
        ebc.state_dict()
    ebc.close()
    dist.barrier()
    dist.destroy_process_group()
    return str(caught.value)


def test_copies_of_whole_tables_must_fit_a_node() -> None:
    for message in run_ranks(too_large, 2):
        assert "a copy of table 't0'" in message and whole._WAY_OUT in message
