"""Your own data in ten lines: any iterable of (dense, ids, labels), one per rank.

python examples/own_data.py, or torchrun --standalone --nproc-per-node 2 examples/own_data.py
"""

import logging
import os

import torch
from torch.utils.data import DataLoader

import distcache

RANK = int(os.environ.get("RANK", 0))
TABLES = [
    distcache.TableSpec("user", rows=10_000, dim=8, features=("user",)),
    distcache.TableSpec("item", rows=2_000, dim=8, features=("item",)),
]


class Clicks(torch.utils.data.Dataset):
    """One sample: dense [4], a user, a bag of items, and whether it was a click."""

    def __len__(self) -> int:
        return 2_000

    def __getitem__(self, index: int):
        draw = torch.Generator().manual_seed(2_000 * RANK + index)
        items = torch.randint(2_000, (1 + index % 3,), generator=draw)
        label = (items.float().mean() < 1_000).float()
        return (
            torch.rand(4, generator=draw),
            torch.randint(10_000, (1,), generator=draw),
            items,
            label,
        )


def collate(samples):
    """Samples as (dense [b, 4], (values, offsets), labels [b]): all users, then all items."""
    dense, users, items, labels = zip(*samples, strict=True)
    bags = [*users, *items]
    offsets = torch.tensor([0, *map(len, bags)]).cumsum(0)
    return torch.stack(dense), (torch.cat(bags), offsets), torch.stack(labels)


class Net(torch.nn.Module):
    """model(dense [b, 4], pooled [b, 16]) -> logits [b]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([dense, pooled], dim=1)).squeeze(1)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")  # the library logs; this shows its steps and rates
    logging.getLogger("distcache").setLevel(logging.INFO)
    torch.manual_seed(0)
    result = distcache.fit(
        DataLoader(Clicks(), batch_size=100, num_workers=2, collate_fn=collate),
        tables=TABLES,
        model=Net(),
        parallel="data",
        optimizer="adagrad",
        settings={"cache.rows": 1_000, "run.dir": "runs/own_data", "run.overwrite": True},
    )
    if RANK == 0:
        print(f"{result.summary['steps']} steps, final loss {result.summary['final_loss']:.4f}")
