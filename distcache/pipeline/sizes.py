"""Global batches whose slices the ranks bring themselves: sizes are agreed step by step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch

from distcache.comm.counters import PLANNING, CollectiveCounters
from distcache.comm.failure import describe
from distcache.comm.link import Link
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.errors import PeerError

log = logging.getLogger(__name__)

_OK, _END, _ERROR = range(3)


def agreed_batches(batches: Iterable[Batch], world: World) -> Iterator[Batch]:
    """The batches with their places among the slices of all ranks, until the first rank's end.

    For streams that nobody plans, from the main thread: one small exchange per batch. An error of
    one rank ends all.
    """
    link = Link(world, world.host_group, CollectiveCounters(), "the host group")
    iterator, number = iter(batches), 0
    while True:
        status, batch, error = _OK, None, None
        try:
            batch = next(iterator)
        except StopIteration:
            status = _END
        except Exception as caught:
            status, error = _ERROR, caught
        own = torch.tensor([status, 0 if batch is None else batch.ids.batch_size])
        headers = link.all_gather(own, PLANNING, f"sizes of batch {number}")
        worst = int(headers[:, 0].max())
        ranks = (headers[:, 0] == worst).nonzero().flatten().tolist()
        causes: list[str] = []
        if worst == _ERROR:  # told here, not left in the store: another run may follow this one
            what = "" if error is None else describe(error)
            causes = link.gather_objects(what, "why a rank stops")
        if error is not None:
            raise error
        if worst == _ERROR:
            raise PeerError(f"stopped because rank {ranks[0]} failed: {causes[ranks[0]]}")
        if worst == _END or batch is None:
            if batch is not None:
                log.warning(
                    "the data of rank %s ended at batch %d; this rank had more, which is left "
                    "unread",
                    ranks,
                    number,
                )
            return
        yield batch.among(headers[:, 1].tolist(), world.rank)
        number += 1
