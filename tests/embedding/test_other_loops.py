"""One optimizer of rows and dense part, and loops of training libraries with it, those of the
examples: the bits of a plain loop, on one rank and under DDP.

The libraries are those of requirements/loops.txt, in an environment of their own.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from ebc_cases import assert_same, job, ranks, weights_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import distcache
from distcache import RowsAndDense
from distcache.errors import ConfigError, PlanError

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 20
"""Batches of an epoch."""


def example(name: str) -> Any:
    """A module of the examples."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return example("clicks").Net()


def few(rank: int) -> tuple:
    """The examples' loaders, of STEPS batches and a few."""
    return loaders(rank, samples=STEPS * 64)


loaders = example("clicks").loaders


def finished(model: Any) -> dict[str, Tensor]:
    """The weights of a net that is done with."""
    found = weights_of(model)
    model.close()
    return found


def plain(rank: int, size: int, **how: Any) -> dict[str, Tensor]:
    """The weights after two epochs of a plain loop."""
    model, loss_of = net(), example("clicks").loss_of
    ddp = DistributedDataParallel(model) if size > 1 else model
    dense, tables = torch.optim.Adam(model.parameters(), lr=0.01), (model.users, model.items)
    optimizers, every = (*(own.optimizer for own in tables), dense), how.get("accumulate", 1)
    first = [group["lr"] for own in optimizers for group in own.param_groups]
    stream = example("clicks").ahead(few(rank)[0], model, every)
    for epoch in range(2):
        groups = [group for own in optimizers for group in own.param_groups]
        for group, lr in zip(groups, first, strict=True):
            group["lr"] = lr * how.get("rate", 1.0) ** epoch
        for at, batch in enumerate(islice(stream, how.get("limit")), start=1):
            cast = torch.autocast("cpu", torch.bfloat16) if how.get("bf16") else nullcontext()
            last = at % every == 0
            with nullcontext() if last or size == 1 else ddp.no_sync():
                with cast:
                    loss = loss_of(ddp(batch), batch) / every
                loss.backward()
            if last:
                rows = [p for own in tables for p in own.optimizer.param_groups[0]["params"]]
                if "clip" in how:
                    nn.utils.clip_grad_norm_([*model.parameters(), *rows], how["clip"])
                for own in optimizers:
                    own.step()
                dense.zero_grad()
    return finished(model)


# -----------------------------------------------------------------------------
# The optimizer alone.


def step(model: Any, optimizer: Any, at: int, closure: bool = False, **scaled: Any) -> None:
    batch = list(few(0)[0])[at]

    def backward() -> Tensor:
        optimizer.zero_grad()
        loss = example("clicks").loss_of(model(batch), batch)
        (scaled["scaler"].scale(loss) if scaled else loss).backward()
        return loss

    if closure:
        assert optimizer.step(backward) > 0
    elif scaled:
        backward()
        scaled["scaler"].step(optimizer)
        scaled["scaler"].update()
    else:
        backward()
        optimizer.step()


def made(seed: int = 0) -> tuple[Any, RowsAndDense]:
    model = net(seed)
    return model, RowsAndDense(torch.optim.Adam(model.parameters(), lr=0.01), model)


def test_it_steps_scales_and_resumes_rows_and_dense_part(one_thread, tmp_path) -> None:
    model, optimizer = made()
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.1, 0.1]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step(model, optimizer, 0, closure=True)
    step(model, optimizer, 1, scaler=scaler)
    rates.step()
    assert model.users.optimizer.param_groups[0]["lr"] == 0.05
    before = weights_of(model)
    with torch.no_grad():
        model.layers[0].weight[0, 0] = torch.inf
    step(model, optimizer, 2, scaler=scaler)  # is left out, and the scale halved
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    model.load_state_dict(before)
    step(model, optimizer, 3)
    assert model.users.tables.counts == [3]
    state = copy.deepcopy(optimizer.state_dict())
    weights = weights_of(model)
    distcache.save(tmp_path / "saved", model, [optimizer], step=3)
    step(model, optimizer, 4)

    other, same = made(1)
    other.load_state_dict(weights)
    same.load_state_dict(state)
    step(other, same, 4)
    assert_same(weights_of(other), weights_of(model))
    distcache.load(tmp_path / "saved", other, [same])
    step(other, same, 4)
    assert_same(finished(other), finished(model))


def test_it_wants_a_dense_optimizer_and_collections(one_thread) -> None:
    model, optimizer = made()
    for dense, of in ((optimizer.dense, nn.Linear(1, 1)), (model.users, model)):
        with pytest.raises(ConfigError, match="give the optimizer of the dense part"):
            RowsAndDense(dense, of)
    with pytest.raises(ConfigError, match="state of 0 collections"):
        optimizer.load_state_dict({"dense": {}})
    with pytest.raises(PlanError, match="neither copied nor pickled"):
        copy.deepcopy(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0})
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 1.0, 0.1, 0.1]
    model.close()


# -----------------------------------------------------------------------------
# Libraries.


def lightning(rank: int, size: int, folder: Path) -> None:
    module = example("with_lightning")
    quiet = {"num_sanity_val_steps": 2, "limit_val_batches": 2, "enable_checkpointing": False}

    def fit(seed: int = 0, epochs: int = 2, **how: Any) -> dict[str, Tensor]:
        own = net(seed)
        module.fit(own, rank, size, max_epochs=epochs, **quiet | how)
        return finished(own)

    middle = {"val_check_interval": 0.5, "gradient_clip_val": 0.05}
    expected = plain(rank, size, accumulate=2, clip=0.05, rate=0.8)
    assert_same(fit(accumulate=2, **middle), expected)
    assert_same(fit(precision="bf16-mixed"), plain(rank, size, bf16=True, rate=0.8))
    expected = plain(rank, size, rate=0.8)
    saving = sys.modules["lightning"].pytorch.callbacks.ModelCheckpoint(folder, save_last=True)
    fit(epochs=1, enable_checkpointing=True, callbacks=[saving])
    assert_same(fit(seed=1, path=folder / "last.ckpt"), expected)
    assert_same(fit(limit_train_batches=7), plain(rank, size, rate=0.8, limit=7))


def accelerate(rank: int, size: int, folder: Path) -> None:
    accelerator = sys.modules["accelerate"].Accelerator
    own, how = net(), accelerator(cpu=True, gradient_accumulation_steps=2)
    example("with_accelerate").fit(own, how, clip=0.05)
    assert_same(finished(own), plain(rank, size, accumulate=2, clip=0.05))


def torchtnt(rank: int, size: int, folder: Path) -> None:
    own = net()
    example("with_torchtnt").fit(own, rank, size, accumulate=2)
    assert_same(finished(own), plain(rank, size, accumulate=2))


def ignite(rank: int, size: int, folder: Path) -> None:
    own = net()
    example("with_ignite").fit(own, rank, size)
    assert_same(finished(own), plain(rank, size))


LIBRARIES: dict[str, Callable] = {
    own.__name__: own for own in (lightning, accelerate, torchtnt, ignite)
}


@job
def of_library(rank: int, size: int, name: str, folder: Path) -> dict:
    module = example(f"with_{name}")
    module.loaders = few
    LIBRARIES[name](rank, size, folder)
    return {}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("size", [1, 2])
def test_a_library_gives_the_bits_of_a_plain_loop(size, name, tmp_path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: it is in requirements/loops.txt")
    ranks(of_library, name, tmp_path, size=size)
