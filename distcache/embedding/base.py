"""What the drop-in collections have in common: all but what comes out of a lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distcache.comm.agree import together
from distcache.comm.existing import current_world
from distcache.embedding.core import CachedTables, CacheSettings
from distcache.embedding.ids import IdReader
from distcache.embedding.open_step import OpenStep
from distcache.embedding.optimizer import RowOptimizer
from distcache.embedding.settings import check_names
from distcache.embedding.tables import (
    checked_configs,
    initialise_as_told,
    is_default,
    lookups_of,
    table_specs,
)
from distcache.embedding.whole import WholeTables
from distcache.errors import ConfigError, DataError, DistcacheError, PlanError
from distcache.optim.rows import RowUpdate


class CachedCollection(nn.Module):
    """Tables in host memory, a cache of rows on the device, behind one of TorchRec's interfaces.

    A collection says under which name its tables are in a `state_dict`, and forms the output of
    `forward` from the step and the micro-batch that `_open` finds.
    """

    _tables_key: ClassVar[str]
    """The name of the tables in a `state_dict`, before that of a table."""

    _config: ClassVar[type[BaseEmbeddingConfig]]
    """What a table is described by."""

    _is_weighted: bool = False
    """Whether the weights of ids are read."""

    def _make(
        self,
        tables: Sequence[Any],
        device: torch.device | str | None,
        optimizer: RowUpdate,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        settings: dict[str, Any],
    ) -> None:
        """What `__init__` does after nn.Module's; raises what the collections say of theirs."""
        name = type(self).__name__
        if not isinstance(optimizer, RowUpdate):
            raise ConfigError(
                f"optimizer={optimizer!r}: give one of distcache.optim.SGD, Adagrad, "
                "RowWiseAdagrad, Adam with its settings, such as distcache.optim.Adagrad(lr=0.01)"
            )
        check_names(settings, name)
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s!r}: give seconds above 0")
        chosen = CacheSettings(**settings)
        self._configs = checked_configs(tables, self._config)
        self._device = _concrete(device)
        lookups, specs = lookups_of(self._configs), table_specs(self._configs)
        names = tuple(specs[table].name for table in lookups.tables)
        self.reader = IdReader(lookups, names, self._is_weighted)
        world = current_world(self._device, process_group, timeout_s)
        self.tables = CachedTables(world, specs, lookups, optimizer, chosen, name)
        self._initialise(chosen.seed)
        self.tables.warm_up()
        self.optimizer = RowOptimizer(self.tables, optimizer)

    def _initialise(self, seed: int) -> None:
        """Initial rows where a table asks for others than the default."""
        whole, world = WholeTables(self.tables), self.tables.world

        def fill() -> None:
            if world.local_rank:
                return
            for index, config in enumerate(self._configs):
                if not is_default(config):
                    told = partial(initialise_as_told, config, index, seed=seed)
                    whole.change_initial(index, seed, told)

        together(world, fill)

    @property
    def device(self) -> torch.device:
        """Where the cache lies and the embeddings come out."""
        return self._device

    def _open(self, features: KeyedJaggedTensor) -> tuple[OpenStep, int]:
        """The step, with its rows on the device, and the micro-batch that `features` is."""
        try:
            return self._locate(features)
        except DistcacheError as error:
            self.tables.failed(error)
            raise

    def _locate(self, features: KeyedJaggedTensor) -> tuple[OpenStep, int]:
        tables = self.tables
        tables.require_open()
        if not isinstance(features, KeyedJaggedTensor):
            raise DataError(f"{type(features).__name__} is no KeyedJaggedTensor")
        trains = self.training and torch.is_grad_enabled()
        for stream in tables.streams:
            if stream.claims(features, by_content=trains):
                micro = stream.open_next()
                return tables.opened(), micro
        known = tables.current.reads if tables.current is not None else []
        for micro, read in enumerate(known):
            if read.is_of(features) and read.is_unchanged(features, self.reader.read):
                return tables.opened(), micro
        for stream in tables.streams:
            if trains and stream.awaits:
                raise stream.altered()
        tables.end_current()
        read = self.reader.read(features)
        planned = tables.plan_inline(read, "train" if torch.is_grad_enabled() else "eval")
        return tables.open(planned, [read]), 0

    # --- training ---------------------------------------------------------------------------

    def step(self) -> None:
        """Apply the step's row gradients: `optimizer.step()`."""
        self.optimizer.step()

    def reduce(self) -> None:
        """Sum the step's row gradients over the ranks, if backward has not done so.

        The end of the last backward pass does it; a rank whose loss did not depend on the
        embeddings, so that backward did not come here, calls this instead. Raises PlanError
        before the last micro-batch.
        """
        self.tables.require_open()
        if self.tables.current is not None:
            self.tables.current.ready(without_backward=True)

    def flush(self) -> None:
        """Bring every changed row to host memory; called by all ranks."""
        WholeTables(self.tables).flush()

    def close(self) -> None:
        """Stop planning and let go of the tables; safe to call twice."""
        self.tables.close()

    # --- nn.Module --------------------------------------------------------------------------

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Whole tables in original ids, as views of the store, after a flush; by all ranks.

        On several nodes copies, one on each node (`WholeTables.views`).
        """
        for table, (weight, _) in WholeTables(self.tables).views():
            destination[f"{prefix}{self._tables_key}.{table.name}.weight"] = weight

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take whole tables; by all ranks. Keys and errors as nn.Module reports them."""
        found: dict[int, Tensor] = {}
        expected = set()
        for index, table in enumerate(self.tables.tables):
            key = f"{prefix}{self._tables_key}.{table.name}.weight"
            expected.add(key)
            value, want = state_dict.get(key), (table.rows, table.dim)
            if key not in state_dict:
                missing_keys.append(key)
            elif not isinstance(value, Tensor) or tuple(value.shape) != want:
                got = getattr(value, "shape", type(value).__name__)
                error_msgs.append(f"size mismatch for {key}: {got} in the checkpoint, not {want}")
            else:
                found[index] = value
        unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in expected]
        WholeTables(self.tables).load_weights(found)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """`.to()` and the like: the cache stays where it is, so they may only ask for that."""
        dtype = self.tables.settings.dtype
        probe = fn(torch.empty(0, dtype=dtype, device=self._device))
        if probe.device != self._device or probe.dtype != dtype:
            raise ConfigError(
                f"the cache lies on {self._device} in {dtype} and cannot become {probe.device}, "
                f"{probe.dtype}: make {type(self).__name__} with device= and dtype="
            )
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise PlanError: the tables are shared memory that other ranks hold too."""
        raise PlanError(
            f"a {type(self).__name__} can be neither copied nor pickled: save its state_dict(), "
            "and load that into a new one"
        )

    def extra_repr(self) -> str:
        """One line for each table."""
        return "\n".join(
            f"({table.name}): {table.rows} x {table.dim}, {table.pooling}"
            for table in self.tables.tables
        )


def _concrete(device: torch.device | str | None) -> torch.device:
    """The device with its index; None is torch's default device."""
    chosen = torch.get_default_device() if device is None else torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={chosen}: a cache lies on 'cpu' or 'cuda'")
    return chosen
