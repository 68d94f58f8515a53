"""What a collection is told by keyword, its errors in these words, and where its rows lie then."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from os import PathLike
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distcache.comm.world import World
from distcache.config import choice, least
from distcache.config.checks import check_cache, read_units
from distcache.config.keys import removed_key
from distcache.config.tree import CacheConfig
from distcache.embedding.ids import Lookups
from distcache.engine.groups import REPLICATED, Placement
from distcache.errors import ConfigError, DistcacheError
from distcache.layout import group_tables
from distcache.optim import RowUpdate
from distcache.planner.victims import WINDOWS, Policy
from distcache.popularity.slots import statistics_of
from distcache.popularity.statistics import Popularity, Statistics, TableCounts, read_statistics
from distcache.sizing.placement import decide_placement
from distcache.sizing.slots import CacheRequest
from distcache.store.rows import ACCESS

log = logging.getLogger(__name__)


@dataclass
class CacheSettings(CacheConfig):
    """How the rows of a collection are cached and summed; see `CachedEmbeddingBagCollection`.

    The keys of group `cache`, and others. `statistics` may lie in another folder on each rank: what
    they say is compared, not where.
    """

    prefetch: Any = least(0, 1)
    statistics: Any = None
    batch_size: int | None = least(1, None)
    state: str = choice("replicated", "home", "auto")
    schedule: str = choice("overlapped", "serial")
    store_access: str = choice(*ACCESS)
    gradient_reduction: str = choice("mean", "sum")
    dtype: torch.dtype = torch.float32
    init: str = choice("auto", "torch", "seed")
    seed: int | None = least(0, None)
    on_bad_id: str = choice("error", "hash")
    on_nonfinite: str = choice("off", "skip", "stop")

    def __post_init__(self) -> None:
        with library_words():
            read_units("cache", self)
        for own in fields(self):
            value, bound = getattr(self, own.name), own.metadata.get("least")
            whole = type(value) is int and value >= (bound or 0)
            is_open = value is None and own.default is None
            if bound is not None and not (whole or is_open):
                raise ConfigError(
                    f"{own.name}={value!r} must be a whole number of at least {bound}"
                )
        if self.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"dtype={self.dtype} is not torch.float32 or torch.float64, in which rows are "
                "updated: half precision is a table's, by data_type= of its config, or dtype="
                "torch.float16 or torch.bfloat16 of CachedEmbedding and CachedEmbeddingBag"
            )
        given = self.statistics
        if not (given is None or isinstance(given, str | PathLike | Statistics)):
            raise ConfigError(
                f"statistics={given!r} is neither a folder nor a distcache Statistics"
            )
        if self.init == "torch" and self.seed is not None:
            raise ConfigError(
                f"seed={self.seed} with init='torch', where initial rows are torch's generator's: "
                "call torch.manual_seed before the collection is made, or give init='seed'"
            )
        if sum(size is not None for size in (self.rows, self.ratio, self.bytes)) > 1:
            raise ConfigError("give at most one of rows, ratio, bytes")
        with library_words():
            check_cache(self)
        self._check_known()

    def _check_known(self) -> None:
        """What only a source of batches could tell must be given."""
        kind, open_rows = self.placement, (self.replicated_rows, self.replicated_share)
        is_counted = kind == "auto" or (kind == "mixed" and self.replicated_rows is None)
        if is_counted and self.statistics is None:
            raise ConfigError(
                f"placement={kind!r} needs to know how often rows are looked up: give "
                "statistics=<folder of python -m distcache.analyze or preprocess, or a Statistics>"
                + (", or replicated_rows={table: rows}" if kind == "mixed" else "")
            )
        chosen = kind == "auto" or (kind == "mixed" and open_rows == (None, None))
        for needs, what in (
            (chosen, f"placement={kind!r}"),
            (Policy.of(self).ranking == "static", "policy='static'"),
            (self.split == "by_curve", "split='by_curve'"),
        ):
            if needs and self.batch_size is None:
                raise ConfigError(
                    f"{what} needs to know how many rows a step looks up: give batch_size=<samples "
                    "of an optimizer step over all ranks>"
                )

    @property
    def window(self) -> int:
        """L, the least of them while `auto` is open."""
        return WINDOWS[0] if isinstance(self.lookahead, str) else self.lookahead


def check_names(settings: Mapping[str, Any], collection: str) -> None:
    """ConfigError for a setting by keyword that a collection does not have."""
    known = [f.name for f in fields(CacheSettings) if f.name != "objective"]
    for name, value in settings.items():
        if (error := removed_key(name)) is not None:
            raise error
        if name not in known:
            near = difflib.get_close_matches(name.removeprefix("cache_"), known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"{collection}: {name}={value!r}: no such setting: {hint}")


_NAMES = {f"cache.{f.name}": f.name for f in fields(CacheSettings)} | {
    "data.global_batch_size": "the batch size",
    "data.on_bad_id": "on_bad_id",
    "data.table_rows": "num_embeddings",
    "model.embedding_dim": "embedding_dim",
    "store.access": "store_access",
    "trainer.dtype": "dtype",
    "trainer.timeout_s": "timeout_s",
    "of the global batch": "of this rank's batch",
}
"""The keys of the command line, and what a user of the library gives instead; and of what a sample
is, for where a rank's lie among those of all is not known."""


class library_words:  # noqa: N801 - reads as `with library_words():`
    """Errors of the parts below name the arguments of the library, and the module of `config`."""

    def __init__(self, config: CollectionConfig | None = None) -> None:
        self._config = config

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, DistcacheError):
            error.reword(_NAMES)
            if self._config is not None:
                error.name_module(self._config.title)


def concrete_device(device: torch.device | str | None) -> torch.device:
    """The device with its index; None is torch's default device."""
    chosen = torch.get_default_device() if device is None else torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={chosen}: there is no CUDA device here: give 'cpu'")
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if chosen.type not in ("cpu", "cuda", "meta"):
        raise ConfigError(f"device={chosen}: a cache lies on 'cpu' or 'cuda' ('meta': not yet)")
    return chosen


@dataclass(frozen=True)
class NoUpdate(RowUpdate):
    """What stands in for an optimizer that nobody has given."""

    lr: float = 0.0
    name: ClassVar[str] = "none"
    formula: ClassVar[str] = "sgd"

    def numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Raise ConfigError: there are none."""
        raise self.missing()

    def missing(self) -> ConfigError:
        """The error for a collection that trains."""
        return ConfigError(
            "no optimizer was given, so the tables cannot be trained: make the collection with "
            "optimizer=distcache.optim.Adagrad(lr=0.01), say, or with a class of torch's as "
            "TorchRec's fused collections (optimizer_type=, optimizer_kwargs=), or call "
            "apply_optimizer_in_backward on the weights of all its tables; evaluate after eval() "
            "or in torch.no_grad(), or freeze the tables"
        )


class StepParameters:
    """What the optimizer of a collection has: `groups` of parameters, which are those of the step
    that is open, `[U, D]` for each width of table; and `named`, all by name, as TorchRec's
    optimizers want them, the tables as empty parameters that stand for their state.

    One group, or one for each table where they have rates or weight decay of their own: the
    parameters, which are of all tables, are those of the first.
    """

    def __init__(self, tables: Sequence[str], updates: Sequence[RowUpdate]) -> None:
        self.leaves: list[Tensor] = []
        self.groups: list[dict[str, Any]] = [{"params": []} for _ in updates]
        self.groups[0]["params"] = self.leaves
        self.take(updates)
        self.tables = {name: torch.zeros(0, device="cpu").requires_grad_() for name in tables}
        self.named: dict[str, Tensor] = dict(self.tables)

    def take(self, updates: Sequence[RowUpdate]) -> None:
        """Let the groups have the settings of these."""
        for group, own in zip(self.groups, updates, strict=True):
            group |= {"lr": own.lr, "weight_decay": own.weight_decay}

    def updates(self, update: RowUpdate) -> list[RowUpdate]:
        """Return `update` for each table, with the rate and the decay that its group has now.

        Raises ConfigError for an entry that schedulers of momentum add, because rows ignore it.
        """
        found = list[RowUpdate]()
        for group in self.groups:
            for name in ("momentum", "betas"):
                if name in group:
                    raise ConfigError(
                        f"a parameter group of the rows has {name}={group[name]!r}, which a "
                        "scheduler sets and rows do not read: rows have lr and weight_decay. Give "
                        "the scheduler cycle_momentum=False, or the dense optimizer alone"
                    )
            lr, decay, own = float(group["lr"]), float(group["weight_decay"]), update
            if (lr, decay) != (own.lr, own.weight_decay):
                own = replace(own, lr=lr, weight_decay=decay)
            found.append(own)
        return found if len(found) > 1 else found * len(self.tables)

    def show(self, leaves: Sequence[Tensor]) -> None:
        """Let these be the parameters."""
        for at in range(len(leaves), len(self.leaves)):
            del self.named[f"rows.{at}"]
        self.leaves[:] = leaves
        for at, leaf in enumerate(leaves):
            self.named[f"rows.{at}"] = leaf


@dataclass(frozen=True)
class CollectionConfig:
    """All that a collection knows of its tables before its ranks: configs as TorchRec has them,
    lookups, the optimizer (of each table, where they differ), and settings; `name`: of the
    collection, for messages; `pooled`: whether bags come out, rather than the row of every id;
    `in_backward`: whether rows are updated at the end of a step's backward pass, and not by
    `optimizer.step`."""

    configs: list[Any]
    lookups: Lookups
    updates: list[RowUpdate]
    in_backward: bool
    settings: CacheSettings
    device: torch.device
    name: str
    pooled: bool
    parameters: StepParameters

    @cached_property
    def title(self) -> str:
        """The module as errors name it: its class and its tables, the first three by name."""
        specs = self.lookups.specs
        if len(specs) == 1:  # those of torch.nn's modules may have one name
            return f"{self.name} of table {specs[0].name!r} ({specs[0].rows} x {specs[0].dim})"
        names = ", ".join(repr(spec.name) for spec in specs[:3])
        rest = f" and {len(specs) - 3} more" if len(specs) > 3 else ""
        return f"{self.name} of tables {names}{rest}" if specs else self.name

    @cached_property
    def _no_leaves(self) -> list[Tensor]:
        specs, dtype = self.lookups.specs, self.settings.dtype
        return [
            torch.zeros(0, specs[at].dim, dtype=dtype, device=self.device).requires_grad_()
            for at, *_ in group_tables(specs)
        ]

    def show(self, leaves: Sequence[Tensor] = ()) -> None:
        """Let these be the parameters of the optimizer; where no step has any, empty ones, one for
        each group."""
        self.parameters.show(leaves or self._no_leaves)

    @property
    def update(self) -> RowUpdate:
        """The optimizer, as far as tables have the same."""
        return self.updates[0]

    @property
    def request(self) -> CacheRequest:
        """What is asked of the cache; where no cluster is described, bytes decide."""
        own = self.settings
        objective = "bytes" if own.cluster is None else "time"
        ahead = (own.window, own.prefetch)
        of = (self.lookups.named, own, self.update, own.batch_size or 1, own.dtype.itemsize)
        return CacheRequest(*of, *ahead, objective)

    def statistics(self) -> Statistics | None:
        """The statistics of the tables, in order; ConfigError for those of other tables."""
        given, where = self.settings.statistics, "the given statistics"
        if given is None:
            return None
        if not isinstance(given, Statistics):
            given, where = read_statistics(given, "statistics"), f"statistics={given}"
        return statistics_of(given, self.lookups.named, where)

    def _use_of_rows(self, popularity: Popularity | None) -> Statistics:
        """Return the statistics, or ones without any lookup, so that the rows that are replicated
        are the first ones of each table."""
        if popularity is not None:
            return popularity.statistics
        log.info("no statistics: the first rows of each table are replicated")
        none = np.empty(0, np.int64)
        tables = [
            TableCounts(spec.features[0], spec.rows, 0, 0, none, none)
            for spec in self.lookups.specs
        ]
        return Statistics(tuple(tables), "", 0)

    def check_sizes(self) -> None:
        """Raise ConfigError for sizes that no rank could have, and for statistics that are not
        there or of other tables; other errors need the ranks."""
        if not self.lookups.specs:
            return
        with library_words():
            if self.settings.split != "by_curve":
                self.request.plan(1, None)
            if not dist.is_initialized():  # else rank 0 reads them, for all
                self.statistics()

    def decide_rows(self, world: World) -> tuple[tuple[int, ...], Placement, Popularity | None]:
        """Slots C of each group, placement of rows, and popularity where there are statistics;
        called by all ranks, decided by rank 0. Raises ConfigError on all ranks."""
        request = self.request
        slots, popularity = request.decide_slots(world, self.statistics)
        placement = decide_placement(request, world, slots, lambda: self._use_of_rows(popularity))
        if placement.kind != REPLICATED:
            popularity = request.of_all_homes(world, slots, popularity)
        return slots, placement, popularity
