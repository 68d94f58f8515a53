"""Train TorchRec's DLRM with tables in host memory and a cache of rows on every device.

    python examples/train_dlrm.py
    torchrun --nproc-per-node 2 examples/train_dlrm.py

Plain PyTorch: the model, DDP, the loss and the dense optimizer are what they would be with
`torchrec.EmbeddingBagCollection`. What is distcache's is marked with (1) to (4).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

import distcache

ROWS = (200_000, 50_000, 3_000, 100)
DIM, DENSE = 16, 13


@dataclass
class Batch:
    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor


def clicks(steps: int, size: int, seed: int) -> Iterator[Batch]:
    """A synthetic click log: skewed ids, and labels that depend on dense features and ids."""
    generator = torch.Generator().manual_seed(seed)
    keys = [f"cat_{i}" for i in range(len(ROWS))]
    for _ in range(steps):
        dense = torch.randn(size, DENSE, generator=generator)
        ids = [(torch.rand(size, generator=generator) ** 4 * rows).long() for rows in ROWS]
        hidden = dense[:, 0] + sum((column % 5 - 2) / 2 for column in ids)
        labels = (hidden + torch.randn(size, generator=generator) > 0).float()
        lengths = torch.ones(len(keys) * size, dtype=torch.int64)
        yield Batch(dense, KeyedJaggedTensor(keys, torch.cat(ids), lengths=lengths), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=512, help="samples per rank and step")
    steps, size = (vars(parser.parse_args())[name] for name in ("steps", "batch_size"))
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    parallel = "RANK" in os.environ
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", local_rank) if enough else torch.device("cpu")
    if parallel:
        dist.init_process_group("cpu:gloo,cuda:nccl" if enough else "gloo")

    tables = [
        EmbeddingBagConfig(
            name=f"t_{i}", num_embeddings=rows, embedding_dim=DIM, feature_names=[f"cat_{i}"]
        )
        for i, rows in enumerate(ROWS)
    ]
    ebc = distcache.CachedEmbeddingBagCollection(  # (1) instead of EmbeddingBagCollection
        tables,
        device=device,
        ratio=0.05,
        optimizer=distcache.optim.Adagrad(lr=0.05),
    )
    torch.manual_seed(0)
    model: nn.Module = DLRM(ebc, DENSE, [64, DIM], [64, 1], dense_device=device)
    if parallel:
        model = DistributedDataParallel(model)
    dense_optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    loss_function = nn.BCEWithLogitsLoss()

    recent: list[float] = []
    batches = clicks(steps, size, seed=rank)
    for step, batch in enumerate(distcache.lookahead(batches, ebc), start=1):  # (2) reads ahead
        logits = model(batch.dense_features.to(device), batch.sparse_features).squeeze(1)
        loss = loss_function(logits, batch.labels.to(device))
        dense_optimizer.zero_grad()
        loss.backward()
        ebc.step()  # (3) updates the cached rows
        dense_optimizer.step()
        recent.append(loss.item())
        if rank == 0 and step % 50 == 0:
            print(f"step {step:4d}  loss {sum(recent[-50:]) / len(recent[-50:]):.4f}")

    state = model.state_dict()  # whole tables, TorchRec's keys; asked for on every rank
    if rank == 0:
        shapes = {name: tuple(value.shape) for name, value in state.items() if "bags" in name}
        print(f"state_dict: {shapes}")

    ebc.close()  # (4) an orderly end: planner, DDP, then the process group
    del model, state, dense_optimizer
    if parallel:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
