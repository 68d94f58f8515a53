"""Accelerate over cached rows.

    python examples/with_accelerate.py
    torchrun --nproc-per-node 2 examples/with_accelerate.py

Needs requirements/loops.txt. The loader is not given to `prepare`: what that makes of it reads a
batch ahead and exchanges random states, which is for a loop, not for a look-ahead.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from clicks import Net, ahead, loaders, loss_of

import distcache


def fit(net: Net, accelerator: Accelerator, epochs: int = 2, clip: float = 1.0) -> float:
    """Train `net`; the last loss."""
    batches, _ = loaders(accelerator.process_index)
    both = distcache.RowsAndDense(torch.optim.Adam(net.parameters(), lr=0.01), net)
    # Placing an optimizer's state on the device would bring that of whole tables there.
    model, optimizer = accelerator.prepare(net, both, device_placement=[True, False])
    stream = ahead(batches, net, accelerator.gradient_accumulation_steps)
    for _ in range(epochs):
        for batch in stream:
            with accelerator.accumulate(model):
                loss = loss_of(model(batch), batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    given = [p for group in both.param_groups for p in group["params"]]
                    accelerator.clip_grad_norm_(given, clip)
                optimizer.step()
                optimizer.zero_grad()
    return loss.item()


def main() -> None:
    torch.manual_seed(0)
    net, accelerator = Net(), Accelerator(cpu=True, gradient_accumulation_steps=2)
    loss = fit(net, accelerator)
    accelerator.print(f"loss {loss:.4f}")
    net.close()
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
