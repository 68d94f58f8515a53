"""Small trainings on the device that is not there, through the package's public doors.

Run by `process.py`; arguments and results travel as JSON. No loop here reads a loss at once: one
that does orders all streams by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fake_device import fake_cuda
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import distcache
from distcache import train

KEYS = (
    "trainer.device=cuda",
    "trainer.backend=gloo",
    "trainer.steps=16",
    "trainer.log_level=ERROR",
    "data.table_rows=[900,200,40]",
    "data.global_batch_size=24",
    "data.dense_features=3",
    "data.bag_size=2.0",
    "data.zipf=0.6",
    "data.weighted=true",
    "model.embedding_dim=8",
    "model.dense_arch=[8,8]",
    "model.over_arch=[8,1]",
    "optim=adagrad",
    "cache.lookahead=3",
    "run.save=false",
)


def command(call: dict[str, Any]) -> dict[str, Any]:
    """The summary of `python -m distcache.train`: its loop reads losses two steps late on a GPU.

    `keys`: beside KEYS; `folder`: the run's.
    """
    sys.argv = ["train", *KEYS, *call["keys"], f"run.dir={call['folder']}"]
    code = train.main()
    if code:
        raise RuntimeError(f"exit code {code}")
    return json.loads(Path(call["folder"], "summary.json").read_text())


def broken(call: dict[str, Any]) -> str:
    """The state digest of `command` on a device whose streams lack the method `without`, which
    then does nothing; or the error that this led to."""
    method = getattr(fake_cuda.Stream, call["without"])
    setattr(fake_cuda.Stream, call["without"], lambda self, *args: None)
    try:
        return command(call)["state_digest"]
    except RuntimeError as error:
        return repr(error)
    finally:
        setattr(fake_cuda.Stream, call["without"], method)


class Net(nn.Module):
    """Two layers over dense features `[b, 3]` and the bags of `ebc`."""

    def __init__(self, ebc: nn.Module, width: int) -> None:
        super().__init__()
        self.ebc = ebc
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(3 + width, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        return self.layers(torch.cat([dense, self.ebc(ids).values()], dim=1)).squeeze(1)


TABLES = {"a": (900, 8), "b": (60, 8), "c": (200, 4)}
"""Rows and width of each table, which one feature of its name reads."""


def batches(steps: int, size: int = 12) -> Iterator[tuple[Tensor, KeyedJaggedTensor, Tensor]]:
    """(dense, ids, labels): bags of 0 to 3 ids, skewed so that rows come again."""
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        lengths = torch.randint(0, 4, (len(TABLES), size), generator=draw)
        ids = [
            (torch.rand(count, generator=draw) ** 2 * rows).long()
            for count, (rows, _) in zip(lengths.sum(1).tolist(), TABLES.values(), strict=True)
        ]
        features = KeyedJaggedTensor(list(TABLES), torch.cat(ids), lengths=lengths.view(-1))
        dense, labels = torch.randn(size, 3, generator=draw), torch.rand(size, generator=draw)
        yield dense, features, (labels < 0.4).float()


def drop_in(call: dict[str, Any]) -> dict[str, Any]:
    """Losses of a loop over the drop-in collection, and the digest of these and all weights.

    `settings`: of the collection; `device`; `ahead`: through a look-ahead; `own_stream`: inside a
    stream that is made after the collection.
    """
    device, losses = call["device"], []
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for name, (rows, dim) in TABLES.items()
    ]
    ebc = distcache.CachedEmbeddingBagCollection(
        tables, device=device, optimizer=distcache.optim.Adagrad(lr=0.1), **call["settings"]
    )
    model = Net(ebc, sum(dim for _, dim in TABLES.values())).to(device)
    dense_optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    with own_stream() if call["own_stream"] else contextlib.nullcontext():
        given = batches(15)
        for dense, ids, labels in distcache.lookahead(given, ebc) if call["ahead"] else given:
            logits = model(dense.to(device, non_blocking=True), ids)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(device))
            dense_optimizer.zero_grad()
            loss.backward()
            ebc.step()
            dense_optimizer.step()
            losses.append(loss.detach())
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        state["losses"] = torch.stack(losses).cpu()
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(state[name].numpy().tobytes())
    ebc.close()
    return {"losses": state["losses"].tolist(), "digest": digest.hexdigest()}


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """Inside a stream that is ordered after what was done before it, and before what follows."""
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)
