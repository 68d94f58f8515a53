"""Collectives as NCCL has them: in the order of a stream of their own, which the host never waits
for, and which a thread of the device always takes further.

On the way from rank to rank is gloo, on the memory that tensors of the device lie in. Ranks that
issue in different orders are refused: on one communicator (operation, dtype and sizes), and on
those that its ranks share, where kernels of NCCL that wait for one another would hang.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from fake_device.fake_cuda import DEVICE, Event, Stream
from fake_device.fake_torch import FakeTensor, on_stream
from torch import Tensor
from torch.distributed import distributed_c10d

PACE_S = 1e-3
"""How late the device's own thread comes: work that was there at its last look is done."""

SAID = 2048
"""Bytes in which a rank says what it issues."""

ISSUED: deque[tuple[frozenset[int], str]] = deque(maxlen=200)
"""What this process has issued on any communicator: its ranks, and the words."""


class Collective:
    """One that is issued: taken further whenever the stream's order lets it.

    `start` begins the exchange on the host's memory, and `finish` takes in what came. What the
    ranks issue is compared at once: streams may wait for one another in circles later.
    """

    def __init__(self, of: Communicator, said: dict[str, Any], start: Callable, finish: Callable):
        self._of, self._said, self._start, self._finish = of, said, start, finish
        self._under_way: Any = None
        own = torch.frombuffer(bytearray(json.dumps(said).encode().ljust(SAID)), dtype=torch.uint8)
        self._headers = [torch.empty_like(own) for _ in range(of.size())]
        self._agreeing: Any = of.words.allgather([self._headers], [own])

    def ready(self) -> bool:
        """Whether it is done."""
        if not self.agreed():
            return False
        with torch.inference_mode(False), torch.no_grad():
            self._under_way = self._under_way or self._start()
            if not self._under_way.is_completed():
                return False
            self._under_way.wait()  # raises what went wrong
            self._finish()
        return True

    def agreed(self) -> bool:
        """Whether the ranks are known to issue the same; RuntimeError where they do not."""
        if self._agreeing is not None and self._agreeing.is_completed():
            self._agreeing.wait()
            self._agreeing = None
            for rank, header in enumerate(self._headers):
                self._compare(rank, json.loads(header.numpy().tobytes()))
        return self._agreeing is None

    def _compare(self, rank: int, said: dict[str, Any]) -> None:
        mine, own = self._of.rank(), self._said
        fits = said["sends"][mine : mine + 1] == own["comes"][rank : rank + 1]
        fits &= said["comes"][mine : mine + 1] == own["sends"][rank : rank + 1]
        if said["order"] != own["order"] or not fits:
            raise RuntimeError(
                f"ranks {mine} and {rank} of communicator {self._of.named} issue in different "
                f"orders: {list(own.values())} and {list(said.values())}"
            )


class Issued(dist.Work):
    """Work that is under way. `wait` lets the current stream come after it; until then the tensors
    are held."""

    def __init__(self, event: Event, held: list[Any], stream: Stream) -> None:
        super().__init__()
        self._event, self._held, self._stream = event, held, stream

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self, timeout: Any = None) -> bool:
        self._event.wait()
        self._held = []
        return True

    def get_future(self) -> torch.futures.Future:
        future = torch.futures.Future(devices=[torch.device("cuda", 0)])
        with on_stream(self._stream):
            future.set_result(self._held)
        return future


class Communicator(dist.ProcessGroup):
    """`ProcessGroupNCCL`."""

    class Options(SimpleNamespace):
        """What torch sets of it."""

    all_of_them: list[Communicator] = []  # noqa: RUF012

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self.stream, self.named = Stream(), options.group_name
        self._ranks = frozenset(options.global_ranks_in_group or range(size))
        self.words, self.wire = (
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options._timeout)
            for name in ("words", "wire")
        )
        self.seen, self.asking = 0, deque[Collective]()
        if _THREAD.ident is None:
            _THREAD.start()
        self.all_of_them.append(self)

    def getBackendName(self) -> str:  # noqa: N802
        return "nccl-like"

    supports_splitting = False

    def _get_backend(self, device: torch.device) -> Communicator:
        return self

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _issue(
        self,
        what: str,
        tensors: Sequence[FakeTensor],
        exchange: Callable[[list[Tensor]], Any],
        outs: Sequence[FakeTensor] = (),
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> Issued:
        """Queue an exchange of `tensors`, whose copies are then those of `outs`."""
        hosts, targets = [t.host for t in tensors], [t.host for t in outs or tensors]
        copies: list[Tensor] = []

        def start() -> Any:
            copies.extend(host.clone(memory_format=torch.contiguous_format) for host in hosts)
            return exchange(copies)

        def finish() -> None:
            with torch.inference_mode(False), torch.no_grad():
                for target, value in zip(targets, copies, strict=True):
                    target.copy_(value)

        shapes = ", ".join(f"{t.dtype} {list(t.shape[bool(splits[0]) :])}" for t in tensors)
        with DEVICE.lock:
            DEVICE.count("collective")
            ISSUED.append((self._ranks, f"{self.named}: {what} {shapes}"))
            order = [words for ranks, words in ISSUED if ranks >= self._ranks][-6:]
            said = {"order": order, "sends": list(splits[0]), "comes": list(splits[1])}
            self.stream.wait_event(DEVICE.current().record_event())
            self.asking.append(Collective(self, said, start, finish))
            DEVICE.queue(self.asking[-1], self.stream, launch=True)
            return Issued(self.stream.record_event(), [*tensors, *outs], self.stream)

    def allreduce(self, tensors: list[Any], opts: Any = None) -> Issued:
        opts = opts or dist.AllreduceOptions()
        return self._issue(
            f"all_reduce {_name(opts.reduceOp)}", tensors, lambda c: self.wire.allreduce(c, opts)
        )

    def broadcast(self, tensors: list[Any], opts: Any = None) -> Issued:
        opts = opts or dist.BroadcastOptions()
        what = f"broadcast from {opts.rootRank}"
        return self._issue(what, tensors, lambda c: self.wire.broadcast(c, opts))

    def allgather(self, outs: list[list[Any]], tensors: list[Any], opts: Any = None) -> Issued:
        def exchange(copies: list[Tensor]) -> Any:
            own = copies.pop()
            copies.extend(torch.empty_like(own) for _ in outs[0])
            return self.wire.allgather([copies], [own])

        return self._issue("all_gather", tensors, exchange, outs[0])

    def all_gather_single(self, out: Any, tensor: Any, opts: Any = None) -> Issued:
        shape = out.shape

        def exchange(copies: list[Tensor]) -> Any:
            own = copies.pop()
            copies.append(own.new_empty(shape))
            parts = list(copies[0].view(self.size(), *own.shape).unbind(0))
            return self.wire.allgather([parts], [own])

        return self._issue("all_gather_single", [tensor], exchange, [out])

    _allgather_base = all_gather_single  # as torch before 2.13 calls it

    def all_to_all_single(
        self, out: Any, tensor: Any, receive: list[int], send: list[int], opts: Any = None
    ) -> Issued:
        shape = out.shape

        def exchange(copies: list[Tensor]) -> Any:
            own = copies.pop()
            copies.append(own.new_empty(shape))
            return self.wire.alltoall_base(copies[0], own, receive, send)

        return self._issue("all_to_all", [tensor], exchange, [out], (send, receive))

    alltoall_base = all_to_all_single  # as torch 2.11 calls it

    def barrier(self, opts: Any = None) -> Issued:
        return self.allreduce([torch.ones(1, device="cuda")])


def _name(op: Any) -> str:
    return next(name for name in ("SUM", "AVG", "MAX", "MIN") if op == getattr(dist.ReduceOp, name))


def _go_on() -> None:
    """The device's thread, which alone takes collectives further while every host is busy."""
    while True:
        time.sleep(PACE_S)
        for one in list(Communicator.all_of_them):
            with DEVICE.lock:
                if one not in Communicator.all_of_them:  # of a job that has ended meanwhile
                    continue
                try:
                    while one.asking and DEVICE.failure is None and one.asking[0].agreed():
                        one.asking.popleft()
                except RuntimeError as error:
                    DEVICE.failure = error
                place, one.seen = one.seen, one.stream.queued
                if one.stream.done < place and DEVICE.failure is None:
                    DEVICE.reach(one.stream, place)


_THREAD = threading.Thread(target=_go_on, name="device", daemon=True)


class _Many(int):
    """As many devices as anybody asks for; each process calls its own cuda:0."""

    def __rmod__(self, other: int) -> int:
        return 0


@contextmanager
def nccl() -> Iterator[None]:
    """`nccl` is a backend here, until all has gone well."""
    with (
        patch.object(distributed_c10d, "is_nccl_available", lambda: True),
        patch.object(distributed_c10d, "ProcessGroupNCCL", Communicator, create=True),
        patch.object(torch.cuda.nccl, "version", lambda: (2, 0, 0)),
        patch.object(torch.cuda, "device_count", lambda: _Many(8)),
    ):
        yield
    with DEVICE.lock:
        Communicator.all_of_them.clear()
    ISSUED.clear()
