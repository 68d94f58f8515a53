"""Lightning over cached rows: what is distcache's is marked with (1) to (4).

    python examples/with_lightning.py
    torchrun --nproc-per-node 2 examples/with_lightning.py

Needs requirements/loops.txt.
"""

from __future__ import annotations

import os

import lightning
import torch
from clicks import Net, ahead, loaders, loss_of

import distcache


class Clicker(lightning.LightningModule):
    """Trains `Net`."""

    def __init__(self, net: Net) -> None:  # (1) its tables are cached ones
        super().__init__()
        self.net = net

    def training_step(self, batch, index):
        loss = loss_of(self.net(batch), batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", loss_of(self.net(batch), batch), sync_dist=True)

    def configure_optimizers(self):
        dense = torch.optim.Adam(self.net.parameters(), lr=0.01)
        both = distcache.RowsAndDense(dense, self.net)  # (2) rows and dense part in one optimizer
        return [both], [torch.optim.lr_scheduler.ExponentialLR(both, 0.8)]


def fit(net: Net, rank: int = 0, ranks: int = 1, accumulate: int = 1, path=None, **how) -> Clicker:
    """Train `net`; `path`: of a checkpoint to go on from; `how`: settings of the trainer."""
    batches, held_out = loaders(rank)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        accumulate_grad_batches=accumulate,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **how,
    )
    module = Clicker(net)
    trainer.fit(module, ahead(batches, net, accumulate), held_out, ckpt_path=path)  # (3)
    return module


def main() -> None:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    lightning.seed_everything(0)
    net = Net()
    how = {"max_epochs": 2, "gradient_clip_val": 1.0, "val_check_interval": 0.5}
    module = fit(net, rank, ranks, accumulate=2, enable_checkpointing=False, **how)
    if rank == 0:
        print({name: round(float(v), 4) for name, v in module.trainer.callback_metrics.items()})
    net.close()  # (4)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
