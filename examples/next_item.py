"""Train a small next-item model on sequences of items, with the items' table in host memory.

    python examples/next_item.py
    torchrun --nproc-per-node 2 examples/next_item.py

A session is a sequence of item ids; a GRU reads the rows of all but the last item, and the score of
an item is its row times the GRU's last output. What is distcache's is marked with (1) to (4).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingConfig, KeyedJaggedTensor

import distcache

ITEMS, DIM, LONGEST, WRONG = 100_000, 16, 12, 15


def sessions(steps: int, size: int, seed: int) -> Iterator[KeyedJaggedTensor]:
    """Synthetic sessions of 2 to LONGEST items near each other, and WRONG items for each session.

    `history`: what was seen before; `next`: the item that came, then items that did not.
    """
    generator = torch.Generator().manual_seed(seed)

    def popular(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) ** 8 * (ITEMS // 8)).long()

    for _ in range(steps):
        kind = torch.randint(0, 8, (size, 1), generator=generator)  # a session has one kind of item
        seen = popular(size, LONGEST) * 8 + kind
        lengths = torch.randint(1, LONGEST, (size,), generator=generator)
        history = seen[:, : LONGEST - 1][torch.arange(LONGEST - 1) < lengths[:, None]]
        wrong = popular(size, WRONG) * 8 + torch.randint(0, 8, (size, WRONG), generator=generator)
        choices = torch.cat((seen[:, -1:], wrong), dim=1)
        yield KeyedJaggedTensor(
            ["history", "next"],
            torch.cat((history, choices.reshape(-1))),
            lengths=torch.cat((lengths, torch.full((size,), 1 + WRONG))),
        )


class NextItem(nn.Module):
    """Scores `[b, 1 + WRONG]` of the items `next` after `history`."""

    def __init__(self, ec: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.ec = ec
        self.gru = nn.GRU(DIM, DIM, batch_first=True, device=device)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        rows = self.ec(ids)
        history, choices = rows["history"], rows["next"].values()
        lengths, b = history.lengths(), ids.stride()
        padded = choices.new_zeros(b, LONGEST - 1, DIM)
        padded[torch.arange(LONGEST - 1, device=lengths.device) < lengths[:, None]] = (
            history.values()
        )
        states, _ = self.gru(padded)
        last = states[torch.arange(b, device=lengths.device), lengths - 1]
        return torch.einsum("bd,bnd->bn", last, choices.view(b, -1, DIM))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=256, help="sessions per rank and step")
    steps, size = (vars(parser.parse_args())[name] for name in ("steps", "batch_size"))
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    parallel = "RANK" in os.environ
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", local_rank) if enough else torch.device("cpu")
    if parallel:
        dist.init_process_group("cpu:gloo,cuda:nccl" if enough else "gloo")

    items = EmbeddingConfig(
        name="items",
        num_embeddings=ITEMS,
        embedding_dim=DIM,
        feature_names=["history", "next"],
        weight_init_min=-0.5,
        weight_init_max=0.5,
    )
    ec = distcache.CachedEmbeddingCollection(  # (1) instead of EmbeddingCollection
        [items], device=device, ratio=0.2, optimizer=distcache.optim.Adagrad(lr=0.3)
    )
    torch.manual_seed(0)
    model: nn.Module = NextItem(ec, device)
    if parallel:
        model = DistributedDataParallel(model)
    dense_optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_function = nn.CrossEntropyLoss()

    recent: list[float] = []
    batches = sessions(steps, size, seed=rank)
    for step, ids in enumerate(distcache.lookahead(batches, ec), start=1):  # (2) reads ahead
        scores = model(ids)
        loss = loss_function(scores, scores.new_zeros(size, dtype=torch.int64))
        dense_optimizer.zero_grad()
        loss.backward()
        ec.step()  # (3) updates the cached rows
        dense_optimizer.step()
        recent.append(loss.item())
        if rank == 0 and step % 50 == 0:
            print(f"step {step:4d}  loss {sum(recent[-50:]) / len(recent[-50:]):.4f}")

    state = model.state_dict()  # whole tables, TorchRec's keys; asked for on every rank
    if rank == 0:
        shapes = {name: tuple(value.shape) for name, value in state.items() if "items" in name}
        print(f"state_dict: {shapes}")

    ec.close()  # (4) an orderly end: planner, DDP, then the process group
    del model, state, dense_optimizer
    if parallel:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
