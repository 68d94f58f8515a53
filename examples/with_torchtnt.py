"""torchtnt over cached rows.

    python examples/with_torchtnt.py
    torchrun --nproc-per-node 2 examples/with_torchtnt.py

Needs requirements/loops.txt.
"""

from __future__ import annotations

import os

import torch
from clicks import Net, ahead, loaders, loss_of
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.train import train

import distcache


class Clicker(AutoUnit):
    """Trains `Net`."""

    def compute_loss(self, state, data):
        logits = self.module(data)
        return loss_of(logits, data), logits

    def configure_optimizers_and_lr_scheduler(self, module):
        dense = torch.optim.Adam(module.parameters(), lr=0.01)
        return distcache.RowsAndDense(dense, module), None

    def on_train_step_end(self, state, data, step, results) -> None:
        self.loss = results.loss.item()


def fit(net: Net, rank: int = 0, ranks: int = 1, accumulate: int = 1, epochs: int = 2) -> float:
    """Train `net`; the last loss."""
    batches, _ = loaders(rank)
    unit = Clicker(
        module=net,
        device=torch.device("cpu"),
        strategy="ddp" if ranks > 1 else None,
        gradient_accumulation_steps=accumulate,
    )
    train(unit, ahead(batches, net, accumulate), max_epochs=epochs)
    return unit.loss


def main() -> None:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    loss = fit(net, rank, ranks, accumulate=2)
    if rank == 0:
        print(f"loss {loss:.4f}")
    net.close()
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
