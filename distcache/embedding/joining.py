"""When the tables of a collection are made: as soon as its ranks are known.

A collection that is made before `init_process_group` (in a module's `__init__`, say) does not know
yet who trains with it. It waits; the first use of any collection that waits makes the tables of all
of them, in the order in which they were made: that order is the same on every rank, the order in
which a model uses them need not be.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from distcache.comm.world import World, current_world, require_group
from distcache.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from distcache.embedding.step import CollectionTables

_waiting: list[weakref.ref[Membership]] = []
"""Those that have no tables yet, in the order in which they were made."""


class Membership:
    """Who trains the tables of a collection, and the tables once that is known.

    Where torch.distributed is initialised the tables are made at once, by all ranks of the group;
    otherwise at the first use, by all ranks that there are then, or by this process alone.
    """

    def __init__(
        self,
        make: Callable[[World], CollectionTables],
        device: torch.device,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        name: str,
    ) -> None:
        """`make`: the tables of a world, called by all its ranks; it may not hold the collection,
        so that one that nobody uses is gone at the same time on all ranks. `name`: of the
        collection, for messages."""
        self._make, self._device, self._timeout_s = make, device, timeout_s
        self._made: CollectionTables | None = None
        self._alone, self._closed, self._error = False, False, ""
        self.name = name
        self.show_leaves: Callable[[], Callable[[list[Tensor]], None] | None] = lambda: None
        """A weak reference to what is called with the leaves of each step."""
        if process_group is not None or has_group():
            self._join(process_group)
        else:
            _waiting.append(weakref.ref(self))

    @property
    def made(self) -> CollectionTables | None:
        """The tables, if they have been made."""
        return self._made

    @property
    def tables(self) -> CollectionTables:
        """The tables; makes them, and those of all collections that wait, if need be.

        Called by all ranks. Raises ConfigError where this is one of several ranks that have no
        process group, or where a group of several ranks came after the tables were made for this
        process alone; PlanError once closed.
        """
        if self._made is None:
            self._require_open()
            _join_waiting()
        elif self._alone and has_group() and dist.get_world_size() > 1:
            raise ConfigError(
                f"this {self.name} was used before init_process_group and trains alone, but now "
                f"there are {dist.get_world_size()} ranks, whose tables would drift apart: call "
                "torch.distributed.init_process_group before its first use (a forward, a "
                "look-ahead, state_dict, load_state_dict)"
            )
        if self._made is None:
            raise PlanError(f"the tables of this {self.name} could not be made: {self._error}")
        return self._made

    def close(self) -> None:
        """Let go of the tables, or of the wish to have any."""
        self._closed = True
        if self._made is not None:
            self._made.close()

    def _require_open(self) -> None:
        if self._closed:
            raise PlanError(f"the {self.name} is closed: make a new one")

    @property
    def waits(self) -> bool:
        """Whether tables are still to be made."""
        return self._made is None and not self._closed

    def _join(self, process_group: dist.ProcessGroup | None) -> None:
        """Make the tables; by all ranks of the group."""
        self._alone = not has_group()
        try:
            self._made = self._make(current_world(self._device, process_group, self._timeout_s))
        except Exception as error:
            self._error = str(error)
            raise
        show = self.show_leaves()
        if show is not None:
            self._made.show_leaves = show


def has_group() -> bool:
    """Whether torch.distributed is initialised."""
    return dist.is_available() and dist.is_initialized()


def _join_waiting() -> None:
    """Make the tables of all collections that wait; ConfigError where their ranks cannot meet."""
    require_group(
        "the first use of a cached collection (a forward, a look-ahead, state_dict, "
        "load_state_dict)"
    )
    while _waiting:
        member = _waiting.pop(0)()
        if member is not None and member.waits:
            member._join(None)
