"""When the tables of a collection are made: as soon as its ranks, and its device, are known.

A collection that is made before `init_process_group` (in a module's `__init__`, say) does not know
yet who trains with it; one made on `meta`, or without a device, may hear later where it lies. It
waits; the first use of any collection that waits makes the tables of all of them, in the order in
which they were made: that order is the same on every rank, the order in which a model uses them
need not be.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcache.comm.rendezvous import ErrorReports, barrier
from distcache.comm.world import current_world, require_group
from distcache.embedding import step
from distcache.embedding.ids import PlainTable
from distcache.embedding.optimizer import convert_optimizer, read_in_backward_optimizer
from distcache.embedding.settings import CollectionConfig, NoUpdate
from distcache.embedding.step import CollectionTables
from distcache.embedding.weights import draw_weights
from distcache.errors import ConfigError, PlanError

_waiting: list[weakref.ref[LazyTables]] = []
"""Those that have no tables yet, in the order in which they were made."""

_making = threading.RLock()
"""Held while the tables of collections are made, because several threads may use one first."""

_FIRST_USE = "a forward, a look-ahead, state_dict, load_state_dict, a table's weight"


class LazyTables:
    """Who trains the tables of a collection, and `made`, the tables once that is known.

    Where torch.distributed is initialised and a device was given they are made at once, by all
    ranks of the group; otherwise at the first use, by all ranks that there are then, or by this
    process alone. It does not hold the collection, so that one that nobody uses is gone at the
    same time on all ranks. `config`: what is known of them, by now.
    """

    def __init__(
        self,
        config: CollectionConfig,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        waits: bool,
    ) -> None:
        """`waits`: for the first use, whatever ranks there are."""
        self.config, self._process_group, self._timeout_s = config, process_group, timeout_s
        self.made: CollectionTables | None = None
        self.weights: dict[str, Tensor] = {}
        """The tables as parameters, once they were asked for; see `expose`."""
        self._adopted: tuple[type, dict[str, Any]] | None = None
        self.was_copied = False
        """Whether a copy of the collection was made, and said what it is."""
        self._alone, self._closed, self._error = False, False, ""
        self.trainable: nn.Parameter | None = None
        """The empty parameter of the collection, to which `apply_optimizer_in_backward` on all of
        its parameters attaches an optimizer."""
        self._forward_lock = threading.RLock()
        self._training_thread = 0
        self._initial = draw_weights(config)
        if not waits and (process_group is not None or dist.is_initialized()):
            self._join()
        else:
            _waiting.append(weakref.ref(self))

    @property
    def tables(self) -> CollectionTables:
        """The tables; makes them, and those of all collections that wait, if need be.

        Called by all ranks. Raises ConfigError where this is one of several ranks that have no
        process group, or where a group of several ranks came after the tables were made for this
        process alone, and where there are no tables, or no device; PlanError once closed.
        """
        # The usual case first: this is called in every forward pass.
        is_given = self.weights or (self.trainable is not None and vars(self.trainable))
        if self.made is not None and not (self._closed or is_given or self._alone):
            return self.made
        with _making:
            return self._make_tables()

    def _make_tables(self) -> CollectionTables:
        """Return the tables as `tables` does, while `_making` is held."""
        name = self.config.title
        if self._closed:
            raise PlanError(f"{name} is closed: make a new one")
        if self.weights or self._has_attached():
            self._adopt()
        if self.made is None and not self._error:
            self._require_tables()
            first_use = f"the first use of a cached collection ({_FIRST_USE})"
            require_group(first_use)
            self.barrier(first_use, "all ranks use it for the first time together", self._timeout_s)
            if dist.is_initialized():
                gc.collect()  # those that nobody holds any more are gone on all ranks alike
            for own in list(_waiting):
                lazy_tables = own()
                if lazy_tables is not None and lazy_tables._is_without_rows:
                    continue  # it may have some later
                _waiting.remove(own)
                if lazy_tables is not None and not (lazy_tables._closed or lazy_tables.made):
                    lazy_tables._join()
        elif self.made and self._alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"{name} was used before init_process_group and trains alone, but now there "
                f"are {dist.get_world_size()} ranks, whose tables would drift apart: call "
                f"torch.distributed.init_process_group before its first use ({_FIRST_USE})"
            )
        if self.made is None:
            raise PlanError(f"the tables of {name} could not be made: {self._error}")
        return self.made

    def barrier(self, asked: str, way_out: str, limit_s: float | None = None) -> None:
        """See `CollectionTables.barrier`; also while there are no tables."""
        if self.made is not None:
            self.made.barrier(asked, way_out, limit_s)
        elif dist.is_initialized():
            ranks = dist.get_process_group_ranks(self._process_group)
            shared = dist.distributed_c10d._get_default_store()
            store = dist.PrefixStore(f"distcache/first use/{ranks[0]}", shared)
            place = ranks.index(dist.get_rank()), len(ranks)
            limit_s = min(step.ALONE_S if limit_s is None else limit_s, self._timeout_s)
            barrier(store, *place, limit_s, asked, way_out)

    def _require_tables(self) -> None:
        if not self.config.lookups.specs:
            raise ConfigError(f"{self.config.title} has no tables (tables=[])")
        if self._is_without_rows:
            raise ConfigError(
                f"{self.config.title} lies on 'meta', without rows: give it a device first, by "
                ".to(device) or to_empty(device=...)"
            )

    @property
    def _is_without_rows(self) -> bool:
        """Whether there are no tables to make: none at all, or none yet, on 'meta'."""
        return self.config.device.type == "meta" or not self.config.lookups.specs

    def _join(self) -> None:
        """Make the tables; by all ranks of the group."""
        self._alone = not dist.is_initialized()
        try:
            world = current_world(self.config.device, self._process_group, self._timeout_s)
            with torch.inference_mode(False):  # the first use may be an evaluation
                self.made = CollectionTables(world, self.config, self._initial)
            for table in self.config.configs:
                if isinstance(table, PlainTable):
                    table.given = None  # the rows have them
        except Exception as error:
            self._error = str(error) or type(error).__name__
            raise
        finally:
            self._initial = None

    @contextmanager
    def forward(self, trains: bool) -> Iterator[None]:
        """Context manager around a forward pass: one thread at a time, errors are reported.

        Evaluation in one process waits for another thread's. Raises PlanError if the forward
        `trains` while another thread is inside or has a step open, and on several ranks if two
        threads are inside, because ranks must plan the same batches in the same order. Such a
        refusal leaves the other thread's forward as it is, so it is not reported.
        """
        lock = self._forward_lock
        if not lock.acquire(blocking=False):
            if trains or (self.made is not None and self.made.world.size > 1):
                raise self._several_threads("is in a forward pass of it")
            lock.acquire()
        try:
            # A recomputation inside backward may run in a thread of autograd's.
            if trains and torch._C._current_graph_task_id() == -1:
                thread = threading.get_ident()
                if thread != self._training_thread:
                    self._claim_training(thread)
            with self.report_errors():
                yield
        finally:
            lock.release()

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Context manager: an exception inside is reported to the other ranks, once the tables
        are made; see `ErrorReports`."""
        ErrorReports.enter_call()
        try:
            yield
        except BaseException as error:
            if self.made is not None:
                self.made.reports.__exit__(type(error), error, None)
            raise

    def _claim_training(self, thread: int) -> None:
        """Note that `thread` trains; PlanError if another one has a recorded step open."""
        steps = [] if self.made is None else self.made.earlier.with_open()
        if self._training_thread in sys._current_frames() and any(s.recorded for s in steps):
            raise self._several_threads("has a step of it open")
        self._training_thread = thread

    def _several_threads(self, state: str) -> PlanError:
        return PlanError(
            f"forward of {self.config.title} in thread {threading.current_thread().name} while "
            f"another thread {state}: train from one thread. Evaluation in several threads needs "
            "eval() and torch.no_grad(), and a process without other ranks"
        )

    def move(self, device: torch.device) -> None:
        """Let the tables, which are not made, lie there."""
        self.config = replace(self.config, device=device)
        self.config.show()

    def draw(self) -> None:
        """Draw the initial weights of tables that are not made from torch's generator once more,
        as `reset_parameters` does."""
        self._initial = draw_weights(self.config, self._initial, again=True)

    def close(self) -> None:
        """Let go of the tables, or of the wish to have any."""
        self._closed = True
        if self.made is not None:
            self.made.close()

    # --- the tables as parameters --------------------------------------------------------------

    def expose(self) -> Mapping[str, Tensor]:
        """The tables as parameters, always the same, on `meta` those without rows; by all ranks."""
        specs, known = self.config.lookups.specs, self.weights
        on_meta = self.config.device.type == "meta"
        if known and all(weight.is_meta == on_meta for weight in known.values()):
            return known
        if on_meta:
            other = self.config.settings.dtype
            sizes = ((spec.rows, spec.dim, spec.dtype or other) for spec in specs)
            made = [torch.empty(*size, dtype=own, device="meta") for *size, own in sizes]
            made = [nn.Parameter(empty) for empty in made]
        else:
            made = self.tables.weights() if specs else []
        self.weights = {spec.name: own for spec, own in zip(specs, made, strict=True)}
        for name, before in known.items():  # what was said of them on meta
            vars(self.weights[name]).update(vars(before))
            self.weights[name].requires_grad_(before.requires_grad)
        return self.weights

    def frozen(self) -> set[str]:
        """The tables whose parameters want no gradient."""
        return {name for name, weight in self.weights.items() if not weight.requires_grad}

    def _has_attached(self) -> bool:
        """Return True if an optimizer was attached to the collection's empty parameter."""
        return self.trainable is not None and "_optimizer_classes" in vars(self.trainable)

    def _adopt(self) -> None:
        """Take the optimizer that `apply_optimizer_in_backward` gave all tables, if it did.

        It was called on their weights, or on the parameters of the collection or of a model around
        it. Called by all ranks between two steps. Raises ConfigError if there is one already.
        """
        holders = dict(self.weights)
        if self._has_attached():
            holders = {n: w for n, w in holders.items() if "_optimizer_classes" in vars(w)}
            holders["all tables"] = self.trainable
        has_none = isinstance(self.config.update, NoUpdate)
        found = read_in_backward_optimizer(holders, allow_some=not has_none)
        if found is None or found == self._adopted:
            return
        if not has_none:
            raise ConfigError(
                f"the tables of {self.config.title} were given {found[0].__name__} in "
                f"backward, but have {self.config.update}: leave out one of them"
            )
        update, parameters = convert_optimizer(*found), self.config.parameters
        self._adopted = found
        self.config = replace(self.config, updates=[update], in_backward=True)
        parameters.take([update])
        for holder in holders.values():
            for optimizer in vars(holder).get("_in_backward_optimizers", ()):
                optimizer.param_groups = parameters.groups  # its rate is the rows'
                vars(optimizer).pop("state", None)  # as large as the table, and of no use
        if self.made is not None:
            self.made.take_update(self.config)
