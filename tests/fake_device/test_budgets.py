"""What a step may ask of the device, by thread: budgets, counted, never timed.

The model has the shape of the yardstick, DLRM over Criteo Kaggle's 26 features, all of one width;
counts do not depend on its sizes. A launch is an operation of torch, or of a kernel of `ops`, that
is queued on the device. What ranks send one another is queued there too and done by nobody: no
number here means anything.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ebc_cases import UPDATES
from fake_device.fake_cuda import DEVICE
from fake_device.process import run
from scenarios import OPTIMIZERS, Scenario, make_mode, table
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import distcache
from distcache import CachedEmbeddingBagCollection, lookahead
from distcache.comm.link import Link
from distcache.comm.world import World, close_world, open_world
from distcache.models import DLRM, initialise
from distcache.optim import dense_optimizer, row_update
from distcache.parallel.cached import CachedSettings

LAUNCHES, OWN_LAUNCHES, EXCHANGE_LAUNCHES, COLLECTIVES = 100, 25, 10, 4
"""Of training, autograd's thread included: all, of a loop that launches the dense part kernel by
kernel; those that are not the dense part's, and its graph's, one of a trainer; what two ranks may
add to these; and what they exchange."""

SLOTS = 5600
STEPS, COUNTED = 10, (5, 8)
"""Steps of a run, and those that are counted: rows leave and come at each, none is timed."""

TABLES, DENSE, DIM, BATCH = 26, 5, 8, 1100
MOVEMENT = "distcache-movement"


@dataclass(frozen=True)
class Kaggle(Scenario):
    """One id a feature and sample; the table of one row has more than 32 * 32 occurrences, so that
    three passes add them up, as the few rows of Kaggle's small tables take at 16,384 samples."""

    def model(self) -> nn.Module:
        return dlrm(self.seed)


def dlrm(seed: int = 0) -> DLRM:
    """Four layers below and four above, as over 512, 256, 64, 64 and 512, 512, 256, 1."""
    return initialise(DLRM(DENSE, TABLES, DIM, [32, 16, 16, DIM], [32, 32, 16, 1]), seed)


def kaggle(optimizer: str, ranks: int) -> Kaggle:
    """Rows that are drawn evenly, so that most of a step's are new."""
    rows = [1, *[60] * (TABLES - 3), 2000, 4000]
    spec, lr = OPTIMIZERS[optimizer]
    tables = tuple(table(f"t{at}", count, DIM) for at, count in enumerate(rows))
    sizes = {"global_batch": BATCH * ranks, "steps": STEPS, "bag": 1, "skew": 1.0}
    return Kaggle(tables, spec, lr, **sizes)


class Sent:
    """A collective that is on the device, for which nobody waits."""

    def wait(self, *args: Any) -> bool:
        return True


@functools.cache
def nobody_listens() -> None:
    """From now on collectives of tensors of the device are queued there, as NCCL's, whatever comes
    of them, and the host takes no part in them."""
    make = Link.__init__

    def made(link: Link, world: World, group: Any, *args: Any) -> None:
        make(link, world, group, *args)
        if world.size > 1 and group is world.device_group:
            link._on_host = link._staged = False

    def queued(plain: Callable) -> Callable:
        def collective(tensor: torch.Tensor, *args: Any, **how: Any) -> Any:
            if not tensor.is_cuda:
                return plain(tensor, *args, **how)
            DEVICE.count("collective")
            DEVICE.queue(tensor.host.zero_, launch=True)
            return Sent()

        return collective

    Link.__init__ = made
    dist.all_to_all_single = queued(dist.all_to_all_single)
    dist.all_reduce = queued(dist.all_reduce)


def of_training(before: Counter) -> Counter:
    """What the loop's thread and autograd's have done since, and whoever copied pageable memory."""
    found: Counter[str] = Counter()
    for (what, thread), count in (DEVICE.counts - before).items():
        found[what] += count * (thread != MOVEMENT or "pageable" in what)
    return +found


def of_dense(optimizer: str) -> Counter:
    """What the dense part takes by itself: forward, backward, and a step of torch's optimizer."""
    model, found = dlrm().to("cuda"), Counter()
    own = dense_optimizer(model.parameters(), row_update(optimizer, 0.0), 0.1)
    for _ in range(2):  # the first step makes state
        dense, pooled = torch.zeros(9, DENSE), torch.zeros(9, TABLES * DIM)
        dense, pooled = dense.to("cuda"), pooled.to("cuda").requires_grad_()
        before = Counter(DEVICE.counts)
        logits = model(dense, pooled)
        logits.backward(logits.detach())
        own.step()
        found = of_training(before)
        own.zero_grad()
    return found


def trainer(call: dict[str, Any]) -> list[Counter]:
    """What each step of a trainer takes."""
    case, found = kaggle(call["optimizer"], call["ranks"]), []
    world = open_world("cuda", "gloo", 60)
    settings = CachedSettings("data", (SLOTS,), 2, 1, access=call["access"], cuda_graph=True)
    mode = make_mode(world, case, settings)
    for step in mode.stream(case.batch(s, world.rank, world.size) for s in range(STEPS)):
        before = Counter(DEVICE.counts)
        mode.train_step(step)
        found.append(of_training(before))
    assert mode.summary()["rows_written_back"] > 100 * STEPS
    mode.close()
    close_world(world)
    return found


def drop_in(call: dict[str, Any]) -> list[Counter]:
    """The same of a loop over a collection, whose user keeps the loss where it is."""
    if call["ranks"] > 1:
        dist.init_process_group("gloo")
    case, update = kaggle(call["optimizer"], call["ranks"]), UPDATES[call["optimizer"]]
    tables = [
        EmbeddingBagConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=DIM, feature_names=list(t.features)
        )
        for t in case.tables
    ]
    rank = dist.get_rank() if call["ranks"] > 1 else 0
    local = [case.batch(step, rank, call["ranks"]) for step in range(STEPS)]
    given = [batch.ids for batch in local]
    ids = [KeyedJaggedTensor(list(i.features), i.values, lengths=i.offsets.diff()) for i in given]
    ebc = CachedEmbeddingBagCollection(
        tables, device="cuda", optimizer=update, rows=SLOTS, store_access=call["access"]
    )
    model = dlrm().to("cuda")
    gradients = distcache.DenseGradients(model)
    dense = dense_optimizer(model.parameters(), update, 0.1)
    found = []
    for batch, features in zip(local, lookahead(ids, ebc), strict=True):
        values, labels = (t.pin_memory().to("cuda") for t in (batch.dense, batch.labels))
        before = Counter(DEVICE.counts)
        dense.zero_grad()
        logits = model(values, ebc(features).values())
        binary_cross_entropy_with_logits(logits, labels).backward()
        gradients.sum()
        ebc.step()
        dense.step()
        found.append(of_training(before))
    assert ebc.summary()["rows_written_back"] > 100 * STEPS
    ebc.close()
    gradients.close()
    if call["ranks"] > 1:
        dist.barrier()
        dist.destroy_process_group()
    return found


def counted(call: dict[str, Any]) -> tuple[list[Counter], Counter]:
    """What steps take, and the dense part of one. `loop`, `optimizer`, `access`, `ranks`."""
    if call["ranks"] > 1:
        nobody_listens()
    return call["loop"](call), of_dense(call["optimizer"])


TRAINED = (("sgd", "staged"), ("adagrad", "zero_copy"), ("adam", "staged"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_keeps_its_budget(guard: Path, ranks: int) -> None:
    given = [
        {"loop": loop, "optimizer": name, "access": access, "ranks": ranks}
        for loop in (trainer, drop_in)
        for name, access in (TRAINED if ranks == 1 or loop is trainer else TRAINED[1:2])
    ]
    for call, by_rank in zip(given, run(guard, counted, given, ranks=ranks), strict=True):
        for steps, dense in by_rank:
            for step in map(Counter, steps[slice(*COUNTED)]):
                own, sent = step.pop("launch"), step.pop("collective", 0)
                if call["loop"] is not trainer:
                    assert dense["launch"] < own <= LAUNCHES, (call, own)
                    own -= dense["launch"]
                assert own <= OWN_LAUNCHES + EXCHANGE_LAUNCHES * (ranks > 1), (call, own)
                assert sent <= COLLECTIVES * (ranks > 1), (call, sent)
                # A trainer's loss and flags of each rank, which are read two steps later.
                said = {"to host, pinned": 1, "bytes to host": 16 * ranks}
                assert step == (said if call["loop"] is trainer else {}), call
