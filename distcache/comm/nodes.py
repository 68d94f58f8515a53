"""The nodes of a job: which ranks share a machine's memory, as all ranks agree before they start.

A node is what one torchrun agent starts: two agents on one machine are two nodes.
"""

from __future__ import annotations

import json
import os
import socket
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate

import torch.distributed as dist

from distcache.comm.rendezvous import linger, wait_until
from distcache.errors import ConfigError, PeerError

_KEY = "distcache/place"


@dataclass(frozen=True)
class Nodes:
    """`sizes[n]`: ranks of node n; the ranks of a node are consecutive, nodes in rank order."""

    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.sizes)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """First rank of each node."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    def of(self, rank: int) -> int:
        """The node of `rank`."""
        return bisect_right(self.firsts, rank) - 1

    def ranks(self, node: int) -> range:
        """The ranks of `node`."""
        return range(self.firsts[node], self.firsts[node] + self.sizes[node])

    def peer(self, rank: int, node: int) -> int:
        """The rank of `node` that takes from `rank` what all of that node's ranks get."""
        return self.firsts[node] + (rank - self.firsts[self.of(rank)]) % self.sizes[node]

    def bytes_between(self, rank: int, send_counts: Sequence[int], nbytes: int) -> int:
        """Of `nbytes` that `rank` sends in parts of `send_counts`, those to ranks of other
        nodes."""
        total, own = sum(send_counts), self.ranks(self.of(rank))
        inside = sum(send_counts[own.start : own.stop])
        return nbytes * (total - inside) // total if total else 0

    def ring_bytes_between(self, rank: int, nbytes: int) -> int:
        """Of `nbytes` that `rank` sends to the next rank of a ring in rank order, those that
        leave its node."""
        return nbytes if self.count > 1 and rank == self.ranks(self.of(rank))[-1] else 0


@dataclass(frozen=True)
class Claim:
    """What a rank says of itself. `group`: torchrun's number of its agent, or None; `device`,
    `backend`: what it picked; `error`: why it cannot take part."""

    local_rank: int
    local_size: int
    host: str
    group: str | None
    device: str
    backend: str
    error: str | None = None


def claim_of(
    local_rank: int, local_size: int, device: str, backend: str, error: str | None = None
) -> Claim:
    """This process's claim."""
    host, group = socket.gethostname(), os.environ.get("GROUP_RANK")
    return Claim(local_rank, local_size, host, group, device, backend, error)


def exchange_claims(store: dist.Store, rank: int, size: int, own: Claim) -> list[Claim]:
    """Every rank's claim, by rank, through the store, before there is any process group.

    Raises PeerError naming the ranks that do not come within the store's timeout.
    """
    keys = [f"{_KEY}/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(asdict(own)))
    try:
        most = store.timeout.total_seconds()
        wait_until(lambda: store.check(keys), most, lambda: f"{_missing(store, keys)} to start")
        claims = [Claim(**json.loads(text)) for text in store.multi_get(keys)]
        store.add(f"{_KEY}/read", 1)
        if rank == 0:  # which may serve the store, and be about to refuse
            linger(store, f"{_KEY}/read", size)
    except (RuntimeError, TimeoutError) as error:  # those of the store are the former
        raise PeerError(
            f"rank {rank} of {size} waited for the others to start; {_missing(store, keys)} did "
            "not come within trainer.timeout_s: are all agents of the job running, with the same "
            "--nnodes, --nproc-per-node and rendezvous?"
        ) from error
    return claims


def _missing(store: dist.Store, keys: Sequence[str]) -> str:
    """The ranks whose key is not in the store."""
    try:
        return describe_ranks([rank for rank, key in enumerate(keys) if not store.check([key])])
    except RuntimeError:
        return "rank 0, or the agent that serves the store,"


def agree_on_nodes(claims: Sequence[Claim]) -> Nodes:
    """The nodes that the ranks' claims amount to; the same value or ConfigError on every rank."""
    for rank, claim in enumerate(claims):
        if claim.error is not None:
            raise ConfigError(f"rank {rank} ({claim.host}): {claim.error}")
    for what in ("device", "backend"):
        values = [getattr(claim, what) for claim in claims]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise ConfigError(
                f"the nodes differ: the {what} is {values[0]} on rank 0 ({claims[0].host}) and "
                f"{values[other]} on rank {other} ({claims[other].host}); set trainer.{what} to "
                "one that all nodes have"
            )
    sizes: list[int] = []
    while sum(sizes) < len(claims):
        first = sum(sizes)
        sizes.append(_check_node(claims, first))
    return Nodes(tuple(sizes))


def _check_node(claims: Sequence[Claim], first: int) -> int:
    """How many ranks the node has that begins at rank `first`; ConfigError where they are not
    one after the other, or lie on several machines."""
    size, head = claims[first].local_size, claims[first]
    if size < 1:
        raise ConfigError(
            f"rank {first} ({head.host}) has LOCAL_WORLD_SIZE={size}: give the number of ranks on "
            "its node, at least 1, as torchrun does"
        )
    members = claims[first : first + size]
    numbers = [claim.local_rank for claim in members]
    if numbers != list(range(size)) or any(claim.local_size != size for claim in members):
        raise ConfigError(
            f"ranks {first} to {first + len(members) - 1} have LOCAL_RANK {numbers} and "
            f"LOCAL_WORLD_SIZE {[claim.local_size for claim in members]}: the ranks of a node must "
            "be numbered one after the other, as torchrun does"
        )
    if len({claim.host for claim in members}) > 1:
        hosts = sorted({claim.host for claim in members})
        raise ConfigError(
            f"ranks {first} to {first + size - 1} are one node by LOCAL_WORLD_SIZE={size}, but run "
            f"on {', '.join(hosts)}: set LOCAL_RANK and LOCAL_WORLD_SIZE on each node, as torchrun "
            "does"
        )
    if len({claim.group for claim in members}) > 1:
        raise ConfigError(
            f"ranks {first} to {first + size - 1} are one node by LOCAL_WORLD_SIZE={size}, but "
            f"torchrun's agents (GROUP_RANK) are {[claim.group for claim in members]}; the first "
            f"runs on {head.host}"
        )
    return size


def nodes_of_names(names: Sequence[str]) -> Nodes:
    """The nodes of ranks that know only the name of their machine; ConfigError where those of one
    name are not consecutive."""
    sizes: dict[str, int] = {}
    for rank, name in enumerate(names):
        if name in sizes and names[rank - 1] != name:
            local = [at for at, other in enumerate(names) if other == name]
            raise ConfigError(
                f"the ranks on {name} are {local}: number the ranks of a node in a row, as "
                "torchrun does, or pass a process_group whose ranks are"
            )
        sizes[name] = sizes.get(name, 0) + 1
    return Nodes(tuple(sizes.values()))


def describe_ranks(ranks: Sequence[int]) -> str:
    """`rank 3, rank 4`, and how many more."""
    shown = ", ".join(f"rank {rank}" for rank in ranks[:8])
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
