"""TorchRec's managed collisions around our collections: the numbers of TorchRec's own over whole
tables on one process with the global batch, ahead or not, on any number of ranks."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import ebc_cases
import pytest
import torch
import torch.distributed as dist
from ebc_cases import Clicks, Pooled, cached, job, loss_of, part, plain_tables, ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.modules import hash_mc_evictions, mc_modules
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

import distcache
from distcache import lookahead
from distcache.embedding import collisions
from distcache.errors import ConfigError, NonFiniteLossError, PeerError, PlanError

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH, DENSE = 16, 16, ebc_cases.DENSE
ROWS = {"t0": 24, "t1": 16}
KEYS = ("g", "f0", "f1")
CPU = torch.device("cpu")


def tables() -> list[Any]:
    """`t0`, read by `f0`, and `t1`, by `f1` and `g`, which come in another order."""
    config = EmbeddingBagConfig if ebc_cases._kind == "bags" else EmbeddingConfig
    features = {"t0": ["f0"], "t1": ["f1", "g"]}
    return [
        config(name=name, num_embeddings=rows, embedding_dim=8, feature_names=features[name])
        for name, rows in ROWS.items()
    ]


def draw(step: int, size: int = BATCH) -> Clicks:
    """A batch whose ids, of 2^40, change with the steps: more than a table has rows."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(KEYS) * size,), generator=generator)
    drawn = torch.rand(int(lengths.sum()), generator=generator) ** 2
    ids = ((drawn * 20).long() + step) * 7919 % (1 << 40)
    dense = torch.randn(size, DENSE, generator=generator, dtype=torch.float64)
    label = (dense[:, :1] > 0).double()
    weights = torch.rand(len(ids), generator=generator, dtype=torch.float64) + 0.5
    return Clicks(dense, KeyedJaggedTensor(list(KEYS), ids, weights, lengths), label)


def batches(steps: int = STEPS) -> list[Clicks]:
    return [draw(step) for step in range(steps)]


POLICIES: dict[str, Callable[[], mc_modules.MCHEvictionPolicy]] = {
    "lfu": mc_modules.LFU_EvictionPolicy,
    "lru": mc_modules.LRU_EvictionPolicy,
    "weighted": mc_modules.LRU_EvictionPolicy,
    "distance": lambda: mc_modules.DistanceLFU_EvictionPolicy(0.5),
    "drawn": lambda: mc_modules.LFU_EvictionPolicy(
        functools.partial(mc_modules.probabilistic_threshold_filter, per_id_probability=0.5)
    ),
}


def module(policy: str, rows: int, interval: int) -> mc_modules.ManagedCollisionModule:
    """The collision module of a table."""
    if policy != "mpzch":
        how = (POLICIES[policy](), interval)
        return mc_modules.MCHManagedCollisionModule(rows, CPU, *how, input_hash_size=1 << 40)
    return HashZchManagedCollisionModule(
        zch_size=rows,
        device=CPU,
        total_num_buckets=1,
        max_probe=4,
        eviction_policy_name=HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
        eviction_config=HashZchEvictionConfig(features=[], single_ttl=2),
    )


class Rows(nn.Module):
    """TorchRec's wrapper, as a collection that gives rows alone."""

    def __init__(self, policy: str, collection: nn.Module) -> None:
        super().__init__()
        own = {name: module(policy, rows, 4 - at) for at, (name, rows) in enumerate(ROWS.items())}
        bags = ebc_cases._kind == "bags"
        if bags:
            self.embedding_bag_configs = collection.embedding_bag_configs
            configs = collection.embedding_bag_configs()
        else:
            configs = collection.embedding_configs()
        self.embedding_configs = lambda: configs
        mcc = mc_modules.ManagedCollisionCollection(own, configs)
        kind = (
            ManagedCollisionEmbeddingBagCollection if bags else ManagedCollisionEmbeddingCollection
        )
        self.around = kind(collection, mcc, return_remapped_features=True)

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        # TorchRec's own collections give float32 whatever their weights are.
        with mock.patch.object(torch.Tensor, "float", lambda own: own):
            found, self.numbers = self.around(ids)
        return found


def maps_of(model: nn.Module) -> dict[str, Tensor]:
    """What the collision modules have, by table and name."""
    mcc = model.ebc.around._managed_collision_collection
    return {name: value.detach().clone() for name, value in mcc.state_dict().items()}


def ours(policy: str, name: str = "sgd", **settings: Any) -> tuple[Any, nn.Module]:
    """A cached collection and the model around it, in float64."""
    settings = {"dtype": torch.float64, "rows": 40, "timeout_s": 60} | settings
    if policy == "weighted":
        settings["is_weighted"] = True
    collection = cached(name, tables(), **settings)
    return collection, Pooled(Rows(policy, collection)).double()


class Plain:
    """The same over TorchRec's own collection, from the weights `start`."""

    def __init__(self, policy: str, start: dict[str, Tensor]) -> None:
        collection = plain_tables(tables())
        if policy == "weighted":
            collection._is_weighted = True
        self.model = Pooled(Rows(policy, collection)).double()
        self.model.load_state_dict(start)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch: Clicks) -> float:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def evaluated(model: nn.Module, batch: Clicks) -> Tensor:
    """The logits of an evaluation."""
    model.eval()
    token = collisions._clock.set(0.0)  # whatever the time is
    with torch.no_grad():
        found = model(batch.dense_features, batch.sparse_features)
    collisions._clock.reset(token)
    model.train()
    return found


def clock_of(at: int) -> float:
    """The time at which batch `at` is read, seconds: half an hour between two."""
    return 1800.0 * at


def expected(policy: str, start: dict[str, Tensor], steps: list[Clicks], looks: int) -> dict:
    """What TorchRec's own does; evaluated and its maps looked at after `looks` steps."""
    plain, found = Plain(policy, start), {"losses": list[float]()}
    for at, batch in enumerate(steps):
        token = collisions._clock.set(clock_of(at))
        found["losses"].append(plain.step(batch))
        collisions._clock.reset(token)
        if at + 1 == looks:
            found |= {"logits": evaluated(plain.model, draw(99)), "maps": maps_of(plain.model)}
    return found | {"end": {k: v.clone() for k, v in plain.model.state_dict().items()}}


def train(
    collection: Any, model: nn.Module, steps: list[Clicks], ahead: bool, looks: int = -1
) -> dict:
    """The same of ours, in or out of a look-ahead."""
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    found: dict[str, Any] = {"losses": []}
    for at, batch in enumerate(lookahead(steps, collection) if ahead else steps):
        dense.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        collection.step()
        dense.step()
        found["losses"].append(loss.item())
        if at + 1 == looks:
            own = part(draw(99), *rank_of()) if looks % 2 else draw(99)
            found |= {"logits": evaluated(inner, own), "maps": maps_of(inner)}
    return found


def rank_of() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_as_expected(found: dict, want: dict) -> None:
    torch.testing.assert_close(found["losses"], want["losses"], rtol=0, atol=1e-12)
    for name, value in want["end"].items():
        torch.testing.assert_close(found["end"][name], value, rtol=0, atol=1e-12, msg=name)
    if "maps" in want:
        torch.testing.assert_close(found["logits"], want["logits"], rtol=0, atol=1e-12)
        assert found["maps"].keys() == want["maps"].keys()
        for name, value in want["maps"].items():
            assert torch.equal(found["maps"][name], value), name


def _kernel(input, identities, max_probe, circular_probe=False, exp_hours=-1, readonly=False,
            local_sizes=None, offsets=None, metadata=None, output_on_uvm=False,
            disable_fallback=False, _modulo_identity_DPRECATED=False, input_metadata=None,
            eviction_threshold=-1, *rest):  # fmt: skip
    """MPZCH on the CPU, where FBGEMM only reads: one id after the other."""
    size, found, evicted = len(identities), [], []
    for at, id in enumerate(input.tolist()):
        slots = [(id * 2654435761 + probe) % size for probe in range(max_probe)]
        there = [int(identities[slot]) for slot in slots]
        slot = next((s for s, own in zip(slots, there, strict=True) if own == id), None)
        if slot is None and not readonly:
            slot = next((s for s, own in zip(slots, there, strict=True) if own == -1), None)
            if slot is None:
                old = [s for s in slots if int(metadata[s]) < eviction_threshold]
                slot = old[0] if old else None
                evicted += old[:1]
            if slot is not None:
                identities[slot] = id
        found.append(slots[0] if slot is None else slot)
        if slot is not None and not readonly:
            metadata[slot] = input_metadata[at]
    if not readonly:
        _runs.append(len(input))
    return torch.tensor(found, dtype=torch.int64), torch.tensor(evicted, dtype=torch.int64)


_runs: list[int] = []
"""Ids of each run of the kernel that wrote."""


@functools.cache
def with_kernel() -> Any:
    """Let MPZCH train on the CPU in this process."""
    library = torch.library.Library("fbgemm", "IMPL")
    library.impl("zero_collision_hash", _kernel, "CPU", allow_override=True)
    hash_mc_evictions.time = collisions._Time()
    return library


def read_clock(first: int = 0) -> Any:
    """Stands for `time` where batches are read: `clock_of` each in turn."""
    ticks = itertools.count(first)
    return types.SimpleNamespace(time=lambda: clock_of(next(ticks)))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", ["lfu", "lru", "distance"])
def test_as_torchrecs_own(kind, policy, ahead, monkeypatch):
    if policy == "lru":  # in the order of the modules
        monkeypatch.setattr(sys.modules[__name__], "KEYS", ("f0", "f1", "g"))
    collection, model = ours(policy)
    start = weights_of(model)
    found = train(collection, model, batches(), ahead, looks=6)
    assert_as_expected(found | {"end": weights_of(model)}, expected(policy, start, batches(), 6))
    collection.close()


@job
def _on_ranks(rank: int, size: int, policies: tuple[str, ...], ahead: bool) -> dict:
    with_kernel()
    found, ddp = {}, DistributedDataParallel
    for policy in policies:
        collisions.time = read_clock(0 if rank == 0 else 1000)  # rank 0's counts
        collection, model = ours(policy, device="cpu")
        start = weights_of(model)
        # One whose sharders know TorchRec's wrapper by its class.
        outer = ddp(model) if policy != "lfu" else DistributedModelParallel(model, device=CPU)
        own = [part(batch, rank, size) for batch in batches()]
        found[policy] = train(collection, outer, own, ahead, looks=5)
        found[policy] |= {"end": weights_of(model), "start": start, "runs": sum(_runs)}
        collection.close()
    return found


def _compare_with_one(policies: tuple[str, ...], ahead: bool) -> None:
    with_kernel()
    by_rank = ranks(_on_ranks, policies, ahead)
    for policy in policies:
        one, two = (found[policy] for found in by_rank)
        both = one | {"logits": torch.cat([one["logits"], two["logits"]])}
        both["losses"] = [(a + b) / 2 for a, b in zip(one["losses"], two["losses"], strict=True)]
        assert_as_expected(both, expected(policy, one["start"], batches(), 5))
        for name, value in one["maps"].items():
            assert torch.equal(value, two["maps"][name]), name
        if policy == "mpzch":  # its kernel, whose order on a GPU is nobody's, ran on rank 0 alone
            assert one["runs"] and not two["runs"]


@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_have_the_map_of_the_global_batch(ahead):
    _compare_with_one(("lfu", "weighted", "distance", "mpzch"), ahead)


def test_ranks_have_the_map_of_the_global_batch_for_sequences(sequences):
    _compare_with_one(("lru",), True)


@job
def _end(rank: int, size: int, fails: bool) -> dict:
    """Rank 1's data end, or fail, three batches before the others'."""
    collection, model = ours("lru")

    def own() -> Iterator[Clicks]:
        for at, batch in enumerate(batches()):
            if rank and at == STEPS - 3:
                if fails:
                    raise ValueError("no more of this")
                return
            yield part(batch, rank, size)

    found, seen = {"start": weights_of(model)}, []
    try:
        for batch in lookahead(own(), collection):
            loss_of(model, batch).backward()
            collection.step()
            seen.append(batch)
    except (ValueError, PeerError) as error:
        found["error"] = str(error)
    found |= {"steps": len(seen), "count": collection.reader.collisions.maps.count}
    collection.close()
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_end_after_the_same_step(fails):
    found = ranks(_end, fails)
    assert [own["steps"] for own in found] == [own["count"] for own in found] == [STEPS - 3] * 2
    assert all("no more of this" in own.get("error", "") for own in found) == fails


@pytest.mark.parametrize("ahead", [False, True])
def test_mpzch_sees_the_clock_of_the_batch(monkeypatch, ahead):
    with_kernel()
    monkeypatch.setattr(collisions, "time", read_clock())
    collection, model = ours("mpzch", lookahead=4)
    start = weights_of(model)
    _runs.clear()
    found = train(collection, model, batches(), ahead, looks=6)
    assert len(_runs) <= (STEPS + (STEPS - 6) * ahead) * len(ROWS), (
        "once in each look-ahead, and never where it is trained"
    )
    want = expected("mpzch", start, batches(), 6)
    assert_as_expected(found | {"end": weights_of(model)}, want)
    collection.close()


def _drawn(rank: int, size: int, ahead: bool) -> dict:
    collection, model = ours("drawn")
    torch.manual_seed(rank)
    own = [part(batch, rank, size) for batch in batches()]
    found = train(collection, DistributedDataParallel(model) if size > 1 else model, own, ahead)
    found |= {"maps": maps_of(model), "draw": torch.rand(1)}
    collection.close()
    return found


@job
def _drawn_on_ranks(rank: int, size: int, ahead: bool) -> dict:
    return _drawn(rank, size, ahead)


def test_draws_are_of_the_batch():
    once, again = _drawn(0, 1, False), _drawn(0, 1, True)
    assert once["losses"] == again["losses"]
    for found in (again, *ranks(_drawn_on_ranks, True)):
        for name, value in once["maps"].items():
            assert torch.equal(value, found["maps"][name]), name
    assert torch.equal(once["draw"], again["draw"]), "torch's own generator is left alone"


def test_an_epoch_left_early_and_two_more():
    collection, model = ours("lru")
    start, stream = weights_of(model), lookahead(batches(6), collection)
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for stop in (3, 6, 6):
        for batch in itertools.islice(iter(stream), stop):
            dense.zero_grad()
            loss_of(model, batch).backward()
            collection.step()
            dense.step()
            seen.append(batch)
    losses = expected("lru", start, [draw(at) for at in (*range(3), *range(6), *range(6))], 0)
    assert_as_expected({"losses": losses["losses"], "end": weights_of(model)}, losses)
    assert len(seen) == 15
    collection.close()


def _saved(rank: int, size: int, folder: str, ahead: bool, at: int = 7) -> dict:
    losses, steps = [], [part(batch, rank, size) for batch in batches()]
    for low, high in ((0, at), (at, STEPS)):  # 7: inside both tables' intervals
        collection, model = ours("distance")
        outer = DistributedDataParallel(model) if size > 1 else model
        start = weights_of(model)
        if low:
            step, _ = distcache.load(folder, outer)
            assert step == low
        # Ahead of the save, a look-ahead has read what comes after it.
        stream = lookahead(steps[low:], collection) if ahead else steps[low:]
        part_of = list[float]()
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in itertools.islice(stream, high - low):
            dense.zero_grad()
            loss = loss_of(outer, batch)
            loss.backward()
            collection.step()
            dense.step()
            part_of.append(loss.item())
        losses += part_of
        if not low:
            distcache.save(folder, outer, step=high)
            first = start
        found = {"end": weights_of(model), "start": first, "losses": losses}
        collection.close()
    return found


@job
def _saved_on_ranks(rank: int, size: int, folder: str, ahead: bool) -> dict:
    return _saved(rank, size, folder, ahead)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_checkpoint_has_history_and_counters(tmp_path, ahead):
    found = _saved(0, 1, str(tmp_path / "one"), ahead)
    want = expected("distance", found["start"], batches(), 0)
    assert_as_expected(found, want)
    one, two = ranks(_saved_on_ranks, str(tmp_path / "two"), ahead)
    losses = [(a + b) / 2 for a, b in zip(one["losses"], two["losses"], strict=True)]
    assert_as_expected(one | {"losses": losses}, want)


def test_a_checkpoint_right_after_an_eviction_has_no_history(tmp_path):
    found = _saved(0, 1, str(tmp_path), True, at=8)
    assert_as_expected(found, expected("distance", found["start"], batches(), 0))


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 2, 0]])  # of a batch, of the modules
def test_a_teacher_may_see_a_batch_first(order):
    def steps() -> list[Clicks]:
        found = batches(8)
        for batch in found:
            batch.sparse_features = batch.sparse_features.permute(order)
        return found

    def logits_then_batch(stream: Any) -> Iterator[Clicks]:
        for batch in stream:
            seen.append(evaluated(teacher, batch))
            yield batch

    collection, model = ours("lfu")
    losses = train(collection, model, steps(), True)["losses"]
    collection.close()
    collection, model = ours("lfu")
    teacher, seen = copy.deepcopy(model).requires_grad_(False), list[Tensor]()
    stream = logits_then_batch(lookahead(steps(), collection))
    assert train(collection, model, stream, False)["losses"] == losses and len(seen) == 8
    collection.close()


def _loaded(rank: int, size: int, policy: str, ahead: bool) -> dict:
    """A map is loaded before step 9; the model evaluates when every fourth batch is asked for."""
    if policy == "mpzch":
        with_kernel()
        collisions.time = read_clock(0 if rank == 0 else 1000)
    other, (collection, model) = ours(policy)[1], ours(policy)
    mcc = model.ebc.around._managed_collision_collection
    outer = DistributedDataParallel(model) if size > 1 else model
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    own, losses = [part(batch, rank, size) for batch in batches()], []
    for at, batch in enumerate(lookahead(own, collection) if ahead else own):
        model.train()
        if at == 9:
            mcc.load_state_dict(maps_of(other))
        dense.zero_grad()
        loss = loss_of(outer, batch)
        loss.backward()
        collection.step()
        dense.step()
        losses.append(loss.item())
        if at % 4 == 1:
            evaluated(model, part(draw(99), rank, size))
            model.eval()
    found = {"losses": losses, "end": weights_of(model)}
    collection.close()
    return found


@job
def _loaded_on_ranks(rank: int, size: int, policy: str, ahead: bool) -> dict:
    return _loaded(rank, size, policy, ahead)


@pytest.mark.parametrize("policy", ["lru", "mpzch"])
def test_a_map_that_is_loaded_meanwhile_counts(monkeypatch, policy):
    """Plans that were made with another map are made again."""
    monkeypatch.setattr(collisions, "time", collisions.time)
    found = [_loaded(0, 1, policy, False), _loaded(0, 1, policy, True)]
    found += ranks(_loaded_on_ranks, policy, True)
    assert found[0]["losses"] == found[1]["losses"]
    found[2]["losses"] = [
        (a + b) / 2 for a, b in zip(found[2]["losses"], found[3]["losses"], strict=True)
    ]
    for own in found[1:3]:
        assert_as_expected(own, found[0])


def test_a_model_that_evaluates_when_the_next_batch_is_asked_for():
    collection, model = ours("lfu")
    start, losses = weights_of(model), []
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    for at, batch in enumerate(lookahead(batches(), collection)):
        model.train()
        dense.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        collection.step()
        dense.step()
        losses.append(loss.item())
        if at % 4 == 1:
            evaluated(model, draw(99))
            model.eval()
    found = {"losses": losses, "end": weights_of(model)}
    assert_as_expected(found, expected("lfu", start, batches(), 0))
    collection.close()


def test_micro_batches_are_mapped_in_turn():
    collection, model = ours("lru", rows=40)
    plain = Plain("lru", weights_of(model))
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    for at, batch in enumerate(lookahead(batches(), collection, accumulate=2)):
        losses = [loss_of(own, batch) for own in (model, plain.model)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)
        if at % 2:
            collection.step()
            for one in (dense, plain.optimizer):
                one.step()
                one.zero_grad()
        if at % 4 == 1:
            logits = [evaluated(own, draw(99)) for own in (model, plain.model)]
            torch.testing.assert_close(*logits, rtol=0, atol=1e-12)
    assert_as_expected(
        {"losses": [], "end": weights_of(model)}, {"losses": [], "end": plain.model.state_dict()}
    )
    collection.close()


def test_a_batch_that_backward_runs_again_counts_once():
    """As activation checkpointing does."""
    found = []
    for again in (False, True):
        collection, model = ours("lru")
        for batch in lookahead(batches(), collection):
            if again:
                how = (loss_of, model, batch)
                torch.utils.checkpoint.checkpoint(*how, use_reentrant=False).backward()
            else:
                loss_of(model, batch).backward()
            collection.step()
        found.append(weights_of(model))
        collection.close()
    ebc_cases.assert_same(*found)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_that_comes_twice_counts_twice(ahead):
    collection, model = ours("lru")
    plain = Plain("lru", weights_of(model))
    for batch in lookahead(batches(), collection) if ahead else batches():
        for own in (model, plain.model):
            with torch.no_grad():
                loss_of(own, batch)
        plain.step(batch)
        loss_of(model, batch).backward()
        collection.step()
        for own in model.over.parameters():
            own.data.sub_(0.1 * own.grad)
            own.grad = None
    end = plain.model.state_dict()
    assert_as_expected({"losses": [], "end": weights_of(model)}, {"losses": [], "end": end})
    collection.close()


def test_two_forwards_of_a_batch_are_one_step_while_its_rows_are_the_same():
    collection, model = ours("lru")
    plain = Plain("lru", weights_of(model))
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    for own in (model, plain.model):
        for one in own.ebc.around._managed_collision_collection.children():
            for part_of in one.values():
                part_of._eviction_interval = 13  # of 16 forwards: the first of a step
    for batch in lookahead(batches(8), collection):
        for own, steps in ((model, (collection, dense)), (plain.model, (plain.optimizer,))):
            own.zero_grad()
            (loss_of(own, batch) * loss_of(own, batch)).backward()
            for one in steps:
                one.step()
    end = plain.model.state_dict()
    assert_as_expected({"losses": [], "end": weights_of(model)}, {"losses": [], "end": end})
    collection.close()


# -----------------------------------------------------------------------------
# Rows that start anew.


class Anew(Plain):
    """TorchRec's own, Adagrad over whole tables, whose rows start anew when their ids leave.

    `evicted`: how many ids left, by table, and `resets`: how many rows started anew.
    """

    def __init__(self, policy: str, start: dict[str, Tensor]) -> None:
        super().__init__(policy, start)
        update = ebc_cases.UPDATES["adagrad"]
        around = self.model.ebc.around
        self.weights = getattr(around._embedding_module, ebc_cases.key_of_tables())
        self.rows = torch.optim.Adagrad(
            self.weights.parameters(),
            update.lr,
            eps=update.eps,
            initial_accumulator_value=update.initial_accumulator,
        )
        dense = [*self.model.over.parameters(), *self.model.queries]
        self.optimizer = torch.optim.SGD(dense, lr=0.1)
        self.count, self.resets, self.evicted = 0, 0, dict.fromkeys(ROWS, 0)
        self._known = dict[int, set[int]]()
        around._managed_collision_collection.register_forward_hook(self._mapped)

    @torch.no_grad()
    def _mapped(self, mcc: nn.Module, args: Any, output: Any) -> None:
        if not mcc.training:
            return
        self.count += 1
        for at, (config, slots) in enumerate(zip(tables(), mcc.evict().values(), strict=True)):
            if slots is None:
                continue
            own, weight = mcc._managed_collision_modules[config.name], self.weights[config.name]
            ids = getattr(own, "_mch_sorted_raw_ids", None)
            if ids is not None:
                known = {id for id in ids.tolist() if id < 1 << 40}
                self.evicted[config.name] += len(self._known.get(at, known) - known)
                self._known[at] = known
            self.resets += len(slots)
            state = torch.random.get_rng_state()
            torch.manual_seed(zlib.crc32(f"0/{at}/{self.count}".encode()))
            fresh = torch.empty(len(slots.unique()), config.embedding_dim)
            config.init_fn(fresh)
            torch.random.set_rng_state(state)
            weight.weight[slots.unique()] = fresh.double()
            self.rows.state[weight.weight]["sum"][slots.unique()] = 0.1

    def step(self, batch: Clicks) -> float:
        self.rows.zero_grad()
        loss = super().step(batch)
        self.rows.step()
        return loss


def skewed(steps: int) -> list[Clicks]:
    """Batches in which other ids are often looked up after some steps, so that those of before are
    evicted by how often they were used, too."""
    found = batches(steps)
    for at, batch in enumerate(found):
        values = batch.sparse_features.values()
        often = torch.arange(len(values)) % 3 > 0
        values[often] = (values[often] % 9) + 1000 * (at // 4)
    return found


def anew(policy: str, start: dict[str, Tensor], looks: int) -> dict:
    """What `expected` gives, and the ids that left."""
    plain, found = Anew(policy, start), {"losses": list[float]()}
    for at, batch in enumerate(skewed(24)):
        token = collisions._clock.set(clock_of(at))
        found["losses"].append(plain.step(batch))
        collisions._clock.reset(token)
        if at + 1 == looks:
            found |= {"logits": evaluated(plain.model, draw(99)), "maps": maps_of(plain.model)}
    end = {k: v.clone() for k, v in plain.model.state_dict().items()}
    sums = {name: plain.rows.state[own.weight]["sum"] for name, own in plain.weights.items()}
    counts = {"resets": plain.resets, "evicted": plain.evicted}
    return found | counts | {"end": end, "sums": sums}


def trained_anew(
    policy: str, ahead: bool, rank: int = 0, size: int = 1, looks: int = 9, **how: Any
) -> dict:
    """The same of ours."""
    collection, model = ours(policy, "adagrad", **{"reset_evicted": True} | how)
    start, outer = weights_of(model), DistributedDataParallel(model) if size > 1 else model
    steps = [part(batch, rank, size) for batch in skewed(24)]
    found = train(collection, outer, steps, ahead, looks)
    sums = collection.optimizer.state_dict()["state"]
    found["sums"] = {name: sums[name]["sum"].clone() for name in ROWS}
    found |= {"end": weights_of(model), "start": start}
    collection.close()
    return found


def assert_anew(found: dict, want: dict) -> None:
    assert_as_expected(found, want)
    for name, own in want["sums"].items():
        torch.testing.assert_close(found["sums"][name], own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", ["lfu", "lru", "mpzch"])
def test_rows_of_evicted_ids_start_anew(kind, policy, ahead, monkeypatch):
    if policy == "mpzch":
        with_kernel()
        monkeypatch.setattr(collisions, "time", read_clock())
    found = trained_anew(policy, ahead, looks=10)
    want = anew(policy, found["start"], 10)
    assert want["resets"] > 5 and (policy == "mpzch" or min(want["evicted"].values()) > 5)
    assert_anew(found, want)
    assert found["losses"] != trained_anew(policy, ahead, reset_evicted=False)["losses"]


def test_rows_start_anew_after_a_checkpoint_as_without(tmp_path):
    found = []
    for stops in ((24,), (11, 24)):
        begin = 0
        for end in stops:
            collection, model = ours("lfu", "adagrad", reset_evicted=True)
            if begin:
                distcache.load(tmp_path / "saved", model)
            for batch in lookahead(skewed(24)[begin:end], collection):
                loss_of(model, batch).backward()
                collection.step()
            if end < stops[-1]:
                distcache.save(tmp_path / "saved", model, step=end)
            begin, weights = end, weights_of(model)
            collection.close()
        found.append(weights)
    ebc_cases.assert_same(*found)


def test_rows_that_start_anew_do_not_hide_that_training_has_stopped():
    collection, model = ours("lfu", "adagrad", reset_evicted=True, on_nonfinite="stop")
    stopped = list[int]()
    for at, batch in enumerate(skewed(12)):  # ids are evicted with every third or fourth
        try:
            loss = loss_of(model, batch)
            (loss * float("inf") if at == 6 else loss).backward()
            collection.step()
        except NonFiniteLossError:
            stopped.append(at)
            collection.optimizer.zero_grad()
    assert stopped == [6, 7, 8, 9, 10, 11]
    collection.close()


@job
def _anew_on_ranks(rank: int, size: int, policy: str, ahead: bool, placement: str) -> dict:
    with_kernel()
    collisions.time = read_clock(0 if rank == 0 else 1000)
    return trained_anew(policy, ahead, rank, size, device="cpu", placement=placement)


@pytest.mark.parametrize(
    "policy, ahead, placement",
    [("lfu", False, "replicated"), ("lfu", True, "sharded"), ("mpzch", True, "replicated")],
)
def test_rows_start_anew_on_all_ranks(policy, ahead, placement):
    with_kernel()
    one, two = ranks(_anew_on_ranks, policy, ahead, placement)
    both = one | {"logits": torch.cat([one["logits"], two["logits"]])}
    both["losses"] = [(a + b) / 2 for a, b in zip(one["losses"], two["losses"], strict=True)]
    assert_anew(both, anew(policy, one["start"], 9))


def test_what_cannot_be_told_of_raises():
    config = EmbeddingBagConfig
    twice = [config(name=n, num_embeddings=8, embedding_dim=8, feature_names=["f"]) for n in "ab"]
    mcc = mc_modules.ManagedCollisionCollection({n: module("lru", 8, 2) for n in "ab"}, twice)
    with pytest.raises(ConfigError, match="feature 'f' is read by two tables"):
        ManagedCollisionEmbeddingBagCollection(cached("sgd", twice), mcc)
    collection, model = ours("lru")
    stream = lookahead(batches(), collection)
    batch = next(stream)
    with pytest.raises(PlanError, match="did not come from its collision modules"):
        collection(batch.sparse_features)
    loss_of(model, batch).backward()
    collection.close()
    with pytest.raises(ConfigError, match="accumulate=2 with reset_evicted=True"):
        lookahead(batches(), ours("lru", reset_evicted=True)[0], accumulate=2)
    with pytest.raises(ConfigError, match="reset_evicted=1 is not True or False"):
        ours("lru", reset_evicted=1)


@job
def _drifts(rank: int, size: int) -> None:
    collection, model = ours("lru")
    mcc = model.ebc.around._managed_collision_collection
    mcc._managed_collision_modules["t0"]._eviction_interval += rank
    own = [part(batch, rank, size) for batch in batches()]
    train(collection, model, own, False)


def test_ranks_whose_maps_differ_are_told():
    with pytest.raises(RuntimeError, match="map otherwise than rank 0's"):
        ranks(_drifts)
