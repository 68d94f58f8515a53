"""FBGEMM's own cache on a GPU: whole tables in unified memory, cached rows beside them.

TorchRec calls it `fused_uvm_caching`: 32-way set-associative, misses are read from host memory by
kernels, a row that leaves is always written back, and optimizer state is never cached.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distcache.bench.fbgemm_tables import fbgemm_tables
from distcache.bench.step_batches import Feed
from distcache.bench.yardsticks import Yardstick, YardstickSpec, initialise_tables
from distcache.data.batch import Batch


class UvmTables(Yardstick):
    """FBGEMM's tables in `MANAGED_CACHING`, with slots for `spec.ratio` of the rows; least recently
    used rows leave first.

    `prefetch`: the rows of the next batch come in on a stream of their own, issued after the lookup
    of this one, as TorchRec's `PrefetchTrainPipelineSparseDist` does. On a CPU, for tests, the
    tables lie in host memory, and there is no cache.
    """

    def __init__(
        self, spec: YardstickSpec, dense: nn.Module, feed: Feed, prefetch: bool = False
    ) -> None:
        super().__init__(spec, dense, feed)
        self.name = "uvm_prefetch" if prefetch else "uvm"
        self._cuda = spec.device.type == "cuda"
        self._stream = torch.cuda.Stream(spec.device) if prefetch and self._cuda else None
        self._next: tuple[Tensor, Tensor] | None = None
        optimizer = spec.optimizer
        self.tables = fbgemm_tables(
            [(table.rows, table.dim) for table in spec.tables],
            optimizer.name,
            spec.device,
            "MANAGED_CACHING",
            cache_load_factor=spec.ratio,
            learning_rate=spec.embedding_lr,
            eps=optimizer.eps,
            beta1=optimizer.betas[0],
            beta2=optimizer.betas[1],
            prefetch_pipeline=self._stream is not None,
        )
        initialise_tables(spec, self.tables.split_embedding_weights())

    def form(self, batch: Batch) -> Any:
        """Ids int64 `[n]` and offsets int64 `[F b + 1]`, feature-major, in pinned memory."""
        ids = batch.ids.values, batch.ids.offsets
        return tuple(tensor.pin_memory() for tensor in ids) if self._cuda else ids

    def pooled(self, ids: Any) -> Tensor:
        """See `Yardstick.pooled`."""
        found, self._next = self._next, None
        if self._stream is not None:
            here = torch.cuda.current_stream(self.spec.device)
            here.wait_stream(self._stream)
            for tensor in found or ():
                tensor.record_stream(here)
        pooled = self.tables(*(found or self._arrive(ids)))
        if self._stream is not None and self._ready:
            self._bring(self._ready[0][1], self._stream)
        return pooled

    def update(self) -> None:
        """Nothing: backward has."""

    def _bring(self, ids: Any, stream: torch.cuda.Stream) -> None:
        """Bring the rows of the next batch into the cache."""
        here = torch.cuda.current_stream(self.spec.device)
        with torch.cuda.stream(stream):
            self._next = self._arrive(ids)
            self.tables.prefetch(*self._next, forward_stream=here)

    def _arrive(self, ids: Any) -> tuple[Tensor, Tensor]:
        values, offsets = (tensor.to(self.spec.device, non_blocking=True) for tensor in ids)
        return values, offsets
