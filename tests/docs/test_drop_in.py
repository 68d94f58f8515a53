"""The code in docs/drop_in.md runs as it stands."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
from ebc_cases import DENSE, batches, configs, part, using
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

import distcache
from distcache.embedding.settings import CacheSettings


def snippet(checkout: Path, heading: str) -> str:
    """The first block of Python under a heading."""
    page = (checkout / "docs" / "drop_in.md").read_text()
    under = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", under, re.DOTALL)[0]


class Model(nn.Module):
    """Linear over the features of a sharded and a cached collection, by name."""

    def __init__(self, small: nn.Module, ebc: nn.Module) -> None:
        super().__init__()
        self.small, self.ebc = small, ebc
        self.over = nn.Linear(DENSE + 5 * 8, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        found = self.small(ids).to_dict() | self.ebc(ids).to_dict()
        return self.over(torch.cat([dense, *(found[name] for name in sorted(found))], dim=1))


def beside(rank: int, size: int, code: str) -> list[float]:
    dist.init_process_group("gloo")
    using("bags")
    losses: list[float] = []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        found = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        losses.append(found.item())
        return found

    names = {
        "torch": torch,
        "distcache": distcache,
        "EmbeddingBagCollection": EmbeddingBagCollection,
        "DistributedModelParallel": DistributedModelParallel,
        "apply_optimizer_in_backward": _apply_optimizer_in_backward,
        "Model": Model,
        "device": torch.device("cpu"),
        "small_tables": configs()[1:],
        "big_tables": configs()[:1],
        "batches": [part(batch, rank, size) for batch in batches(60, 48)],
        "loss": loss,
    }
    exec(code.replace("ratio=0.05", "ratio=0.5"), names)
    names["ebc"].close()
    del names
    dist.barrier()
    dist.destroy_process_group()
    return losses


def test_beside_torchrec(checkout) -> None:
    for losses in run_ranks(beside, 2, snippet(checkout, "Beside TorchRec's sharded tables")):
        assert len(losses) == 60 and sum(losses[40:]) < sum(losses[:20])


def test_sequences(checkout) -> None:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    data = []
    for _ in range(40):
        ids = torch.randint(0, 40, (4 * 3 + 4,), generator=draw)
        lengths = torch.tensor([3, 2, 4, 3, 1, 1, 1, 1])
        data.append(KeyedJaggedTensor(["history", "next"], ids, lengths=lengths))
    losses: list[float] = []

    def loss(history: Tensor, following: Tensor) -> Tensor:
        found = (history.mean(1) - following).square().sum()
        losses.append(found.item())
        return found

    names = {
        "distcache": distcache,
        "EmbeddingConfig": EmbeddingConfig,
        "device": torch.device("cpu"),
        "batches": [type("Batch", (), {"ids": ids, "sparse_features": ids})() for ids in data],
        "loss": loss,
    }
    code = snippet(checkout, "Sequences").replace("10_000_000", "400")
    exec(code.replace("rows=100_000", "rows=100").replace("lr=0.01", "lr=0.003"), names)
    names["ec"].close()
    assert len(losses) == 40 and sum(losses[30:]) < sum(losses[:10])


def test_the_table_of_settings_is_complete(checkout):
    page = (checkout / "docs" / "drop_in.md").read_text()
    told = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", page, re.MULTILINE)
    usual = CacheSettings()
    shown = {f.name: getattr(usual, f.name) for f in fields(CacheSettings)}
    del shown["objective"]  # of the command line alone
    assert {name: eval(value, {"torch": torch}) for name, value in told} == shown
