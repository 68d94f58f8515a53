"""Loops on ranks: jobs in processes of their own, DDP over cached tables, whole runs."""

from __future__ import annotations

import functools
import gc
import threading

import numpy as np
import torch
import torch.distributed as dist
from ebc_cases import Clicks, batches, key_of_tables, kind_here, of_kind, part
from ebc_models import cached, dlrm
from ebc_training import train, weights_of, written_back
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

from distcache import lookahead

EXACT_STEPS = 12


def job(work):
    """`work(rank, size, ...)` inside a job of its own, which ends in order."""

    @functools.wraps(work)
    def run(rank: int, size: int, *args):
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        try:
            found = work(rank, size, *args)
            gc.collect()
            left = [t.name for t in threading.enumerate() if t.name.startswith("distcache")]
            assert not left, left
            dist.barrier()
        finally:
            dist.destroy_process_group()
        return as_arrays(found)

    return run


def as_arrays(value, back: bool = False):
    """Tensors as NumPy arrays, which travel between processes, or the way back."""
    if isinstance(value, dict):
        return {key: as_arrays(own, back) for key, own in value.items()}
    if back:
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return value.numpy() if isinstance(value, torch.Tensor) else value


def ranks(work, *args) -> list[dict]:
    """What `work` found on two ranks."""
    found = [as_arrays(own, back=True) for own in run_ranks(of_kind, 2, kind_here(), work, *args)]
    torch.set_num_threads(1)
    return found


def mine(rank: int, size: int, steps: int = 20, **how) -> list[Clicks]:
    """This rank's part of every global batch."""
    return [part(batch, rank, size) for batch in batches(steps, **how)]


def wrapped(name: str = "adagrad", model=dlrm, **settings):
    """A collection, the DDP model around it and its dense optimizer."""
    ebc = cached(name, timeout_s=60, **settings)
    ddp = DistributedDataParallel(model(ebc))
    assert not [n for n, _ in ddp.named_parameters() if key_of_tables() in n]
    return ebc, ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def unwrapped(ddp) -> dict:
    """Weights without DDP's prefix; asked for through it."""
    found = weights_of(ddp)
    assert all(name.startswith("module.") for name in found)
    return {name.removeprefix("module."): value for name, value in found.items()}


def run_once(rank, size, name="adagrad", model=dlrm, tables=None, inline=False, **settings):
    """First weights, losses, last weights of a run, and how many rows it has written back."""
    data = mine(rank, size, settings.pop("steps", EXACT_STEPS), tables=tables)
    ebc, ddp, dense = wrapped(name, model, tables=tables, **settings)
    start = unwrapped(ddp)
    losses = train(ddp, ebc, data if inline else lookahead(data, ebc), dense)
    found = unwrapped(ddp)
    moved = written_back(ebc.tables)
    ebc.close()
    return start, losses, found, moved
