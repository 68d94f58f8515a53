"""ignite over cached rows.

    python examples/with_ignite.py
    torchrun --nproc-per-node 2 examples/with_ignite.py

Needs requirements/loops.txt.
"""

from __future__ import annotations

import os

import torch
from clicks import Net, ahead, loaders, loss_of
from ignite.engine import create_supervised_trainer
from torch.nn.parallel import DistributedDataParallel

import distcache


def fit(net: Net, rank: int = 0, ranks: int = 1, accumulate: int = 1, epochs: int = 2) -> float:
    """Train `net`; the last loss."""
    batches, _ = loaders(rank)
    model = DistributedDataParallel(net) if ranks > 1 else net
    both = distcache.RowsAndDense(torch.optim.Adam(net.parameters(), lr=0.01), net)
    trainer = create_supervised_trainer(
        model,
        both,
        loss_of,
        prepare_batch=lambda batch, device, non_blocking: (batch, batch),
        gradient_accumulation_steps=accumulate,
    )
    return trainer.run(ahead(batches, net, accumulate), max_epochs=epochs).output


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
