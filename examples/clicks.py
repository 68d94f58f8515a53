"""A small click model over cached rows and its data, for the examples with training libraries."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import distcache

USERS, ITEMS, DIM = 20_000, 5_000, 16


class Clicks(Dataset):
    """Samples of one rank: a user, three items, and whether it was a click."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.user = (torch.rand(samples, generator=generator) ** 3 * USERS).long()
        self.items = (torch.rand(samples, 3, generator=generator) ** 3 * ITEMS).long()
        hidden = (self.user % 5 - 2) + (self.items % 3 - 1).sum(1)
        self.label = (hidden + torch.randn(samples, generator=generator) > 0).float()

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in vars(self).items()}


class Net(nn.Module):
    """batch -> logits [b]. Two tables in host memory, of which a part of the rows is cached."""

    def __init__(self) -> None:
        super().__init__()
        rows = {"ratio": 0.3, "optimizer": distcache.optim.Adagrad(lr=0.1)}
        self.users = distcache.CachedEmbedding(USERS, DIM, name="users", **rows)
        self.items = distcache.CachedEmbeddingBag(ITEMS, DIM, name="items", **rows)
        self.layers = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        parts = self.users(batch["user"]), self.items(batch["items"])
        return self.layers(torch.cat(parts, dim=1)).squeeze(1)

    def close(self) -> None:
        """An orderly end of the planners, before that of the process group."""
        self.users.close()
        self.items.close()


def loss_of(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])


def loaders(rank: int, samples: int = 6_400, size: int = 64) -> tuple[DataLoader, DataLoader]:
    """Batches to train with, and held-out ones, of one rank."""
    made = (Clicks(samples, seed=rank), Clicks(samples // 8, seed=1_000 + rank))
    return DataLoader(made[0], batch_size=size), DataLoader(made[1], batch_size=size)


def ahead(loader: DataLoader, net: Net, accumulate: int = 1):
    """The batches of a loader, epoch after epoch, planned ahead for both tables."""
    ids = {net.users: lambda batch: batch["user"], net.items: lambda batch: batch["items"]}
    return distcache.lookahead(loader, net, accumulate, ids)
