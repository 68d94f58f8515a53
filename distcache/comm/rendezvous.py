"""What the ranks of one launch agree on before any process group exists, and who is missing."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from distcache import launched
from distcache.errors import ConfigError, DistcacheError, PeerError, on_all_ranks


@dataclass(frozen=True)
class Failure:
    """A recorded failure; `secondary`: it only says that another rank failed or is missing;
    `traceback`: where it happened, for an error that nobody raised on purpose.

    `position`: steps of the collection before the call that failed, None outside of such a call.
    `is_superseded`: the rank caught the error and has entered another call since.
    """

    rank: int
    text: str
    secondary: bool
    traceback: str = ""
    position: int | None = None
    is_superseded: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """What is recorded of `error`, which ended `rank`."""
        where = [] if isinstance(error, DistcacheError) else traceback.format_exception(error)
        return cls(rank, describe(error), is_secondary(error), "".join(where))

    @property
    def message(self) -> str:
        """What the other ranks say about it."""
        told = "" if self.secondary else f"stopped because rank {self.rank} failed: "
        return told + self.text


def record_failure(store: dist.Store | None, rank: int, error: BaseException) -> None:
    """Record that `rank` failed with `error`; records keep the order in which they were made."""
    _write_failure(store, Failure.of(rank, error))


def _write_failure(store: dist.Store | None, failure: Failure, key: str | None = None) -> str:
    """Write a failure over the record `key`, or as a new one; return the key, "" if that fails."""
    if store is None:
        return ""
    with suppress(RuntimeError, dist.DistError):  # it died with its server: nobody is left to tell
        key = key or f"failure/{store.add('failure/count', 1)}"
        store.set(key, json.dumps(asdict(failure)))
        return key
    return ""


class ErrorReports:
    """Context manager that reports the errors of this rank to the ranks that wait for it.

    Every call that all ranks make together runs inside `with reports:`. An exception of any type
    that leaves it on this rank is recorded in the job's store, where the other ranks look while
    they wait, so that they raise PeerError within seconds. An error that all ranks raise at the
    same point (`errors.on_all_ranks`) is not recorded. distcache's own errors get a title.

    A caller may catch the error and go on. A rank that enters another call supersedes its records,
    so that a later wait does not end with an error of the past. In the middle of a training step
    the others still wait for the call that failed, so the records stay until a step is complete.
    """

    _alive: ClassVar[weakref.WeakSet[ErrorReports]] = weakref.WeakSet()
    """All reports of this process. Each collection and run has its own store."""
    _entries: ClassVar[int] = 0
    """Calls entered after an error: an exception that passes nested calls is recorded once."""
    _is_pending: ClassVar[bool] = False
    """True if there are records that the next call supersedes."""

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        title: str = "",
        is_mid_step: Callable[[], bool] | None = None,
    ) -> None:
        """`store`: of the ranks that wait; None for one rank alone. `title`: the module whose
        calls these are, with which its errors begin. `is_mid_step`: a method that returns True if
        a training step is open."""
        self._store = store
        self._title = title
        self._rank = rank
        # Weak, because the object of the method holds this one.
        self._is_mid_step = None if is_mid_step is None else weakref.WeakMethod(is_mid_step)
        self._records: dict[str, Failure] = {}
        self.position = 0
        """Steps that all ranks have opened together."""
        ErrorReports._alive.add(self)

    def __enter__(self) -> ErrorReports:
        self.enter_call()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, DistcacheError) and self._title:
            error.name_module(self._title)
        if isinstance(error, _REPORTED) and not getattr(error, "is_on_all_ranks", False):
            self.add(error)

    @classmethod
    def add(cls, error: BaseException) -> None:
        """Report `error` to all ranks that may wait for this process, in whichever collection."""
        if getattr(error, "reported_at", None) == cls._entries:
            return
        with suppress(AttributeError):  # a class with __slots__; a record too many is harmless
            error.reported_at = cls._entries  # type: ignore[attr-defined]
        alive = list(cls._alive)
        for reports in alive:
            failure = replace(Failure.of(reports._rank, error), position=reports.position)
            if key := _write_failure(reports._store, failure):
                reports._records[key] = failure
        cls._is_pending = not any(reports._has_open_step() for reports in alive)

    def _has_open_step(self) -> bool:
        is_mid_step = self._is_mid_step and self._is_mid_step()
        return is_mid_step is not None and is_mid_step()

    @classmethod
    def enter_call(cls) -> None:
        """Supersede this rank's records: it has caught the error, and is in another call now."""
        if not cls._is_pending:
            return
        cls._is_pending = False
        cls._entries += 1
        for reports in list(cls._alive):
            for key, failure in reports._records.items():
                failure = replace(failure, is_superseded=True)
                _write_failure(reports._store, failure, key)

    @classmethod
    def withdraw(cls) -> None:
        """Remove this rank's records, once it has finished a step together with all others."""
        for reports in list(cls._alive):
            if not reports._records:
                continue
            cls._entries += 1
            cls._is_pending = False
            for key in reports._records:
                with suppress(RuntimeError, dist.DistError):
                    # Deleted between another rank's `check` and `get`, it would block that rank.
                    reports._store.set(key, "")
            reports._records.clear()


_REPORTED = (Exception, KeyboardInterrupt, SystemExit)
"""Exceptions after which the other ranks wait in vain."""


def recorded_failures(store: dist.Store | None) -> list[Failure] | None:
    """Causes first, each kind in the order in which it was recorded; None where the store died."""
    if store is None:
        return []
    try:
        count = store.add("failure/count", 0)
        keys = [f"failure/{number}" for number in range(1, count + 1)]
        records = [store.get(key) for key in keys if store.check([key])]
        found = [Failure(**json.loads(record)) for record in records if record]
    except (RuntimeError, dist.DistError):
        return None
    return sorted(found, key=lambda failure: failure.secondary)


def failure_of_others(store: dist.Store | None, rank: int) -> Failure | None:
    """Return the first failure of another rank than `rank`, a cause before its consequences.

    Superseded failures are skipped. So are those of a call that `rank` was refused as well: each
    rank reports it, nobody waits, and their callers may go on.
    """
    failures = recorded_failures(store) or []
    refused = {failure.position for failure in failures if failure.rank == rank} - {None}
    for failure in failures:
        is_shared = not failure.secondary and failure.position in refused
        if failure.rank != rank and not failure.is_superseded and not is_shared:
            return failure
    return None


def cause_of(
    store: dist.Store | None, rank: int, error: BaseException, grace_s: float = 2.0
) -> Failure:
    """Record this rank's failure; return the one that caused it, maybe itself.

    A failure that another rank must have caused waits up to `grace_s` seconds for that one.
    """
    own = Failure.of(rank, error)
    deadline = time.monotonic() + (grace_s if own.secondary else 0.0)
    while (known := recorded_failures(store)) == [] and time.monotonic() < deadline:
        time.sleep(0.05)
    if known is None:
        return own  # The store has gone, and every look at it would be logged.
    record_failure(store, rank, error)
    return next(iter(recorded_failures(store) or ()), own)


def is_secondary(error: BaseException) -> bool:
    """Whether an error says that another rank failed or went away."""
    if isinstance(error, PeerError | dist.DistError):
        return True
    if isinstance(error, DistcacheError) and error.from_rank is not None:
        return True
    text = str(error).lower()
    words = ("connection closed by peer", "connection reset", "socket", "gloo", "nccl")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def describe(error: BaseException) -> str:
    """The error's message; its type where it has none or is not one of this package's, and then
    what was noted of where it happened."""
    text = str(error).strip()
    if isinstance(error, DistcacheError) and text:
        return text
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__) + notes


def first_line(error: BaseException) -> str:
    """What an error says, in one line, without the source position and advice that gloo adds."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    line = text.splitlines()[0].partition(". This is typically caused")[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", line)


# -----------------------------------------------------------------------------
# Whether another rank's process still runs, as far as this machine can tell.


def announce_process(store: dist.Store, rank: int) -> None:
    """Tell the others which process `rank` is; each rank does so when it joins."""
    store.set(f"distcache/process/{rank}", json.dumps(this_process()))


def has_ended(store: dist.Store, rank: int) -> bool:
    """Whether the process of `rank` is known to have ended, as of `process_has_ended`."""
    key = f"distcache/process/{rank}"
    return store.check([key]) and process_has_ended(json.loads(store.get(key)))


def this_process() -> list[Any]:
    """The machine or container that numbers this process, its number, and its start time."""
    return [_process_space(), os.getpid(), _started(os.getpid())]


def process_has_ended(process: Sequence[Any]) -> bool:
    """Return True if the process of a `this_process` is known to have ended.

    False where it runs, and where it cannot be seen from here (another machine or container).
    """
    space, number, started = process
    return space == _process_space() and _started(number) != started


def _process_space() -> str:
    """Equal for processes that see one another under the same numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(process: int) -> str | None:
    """When a process started (clock ticks after boot); None for one that has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    state, *others = text.rpartition(")")[2].split()  # the name before it may hold blanks
    return None if state in "ZX" else others[18]


# -----------------------------------------------------------------------------
# torchrun's agent: the process that starts a node's ranks, hands signals on to them, and gives them
# so many seconds to end.


def end_with_agent() -> None:
    """Under torchrun, end this process within seconds when its agent has ended, whatever it does.

    An agent that is killed leaves its ranks behind. No signal is asked for (PR_SET_PDEATHSIG): it
    comes when the *thread* that started a process ends, and not where its end came before.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent = launched[1] if launched[0] == os.getpid() else os.getppid()  # forked since

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(1.0)
        with suppress(OSError):  # not by the log, whose lock and whose reader may never come back
            if select.select([], [2], [], 0)[1]:
                os.write(2, b"error: torchrun's agent has ended, and this rank with it\n")
        os._exit(1)

    threading.Thread(target=watch, name="agent", daemon=True).start()


def shutdown_timeout() -> float | None:
    """Seconds that torchrun's agent gives ranks to end after a signal; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    with suppress(OSError):
        line = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        if given := re.search(rb"--shutdown[-_]timeout[=\0](\d+)", line):
            return float(given[1])
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))


# -----------------------------------------------------------------------------
# torchrun gives every rank the address of a key-value store. Rank 0 alone composes the
# configuration and publishes what came of it there; the others wait for that.

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0
"""How long the ranks wait for rank 0's configuration, seconds."""

LEAST_TIMEOUT_S = 30.0
"""What a process may take to start and to read its configuration, seconds."""

NOTICE_S = 10.0
"""After which a rank says for whom it waits, seconds."""


def start_timeout(arguments: Sequence[str]) -> float:
    """How long ranks wait for one another before they have a configuration, seconds:
    `trainer.timeout_s` of the command line, but no less than `LEAST_TIMEOUT_S`."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    try:
        return max(LEAST_TIMEOUT_S, float(given["trainer.timeout_s"]))
    except (KeyError, ValueError):
        return TIMEOUT_S


@dataclass(frozen=True)
class Place:
    """Where this process stands in the launch: global and local rank and world sizes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1


def find_place() -> Place:
    """This process's place by torchrun's environment variables; alone without them.

    Raises ConfigError where some of them are not there, or make no place.
    """
    rank, size = whole_number("RANK", 0), whole_number("WORLD_SIZE", 1)
    if "RANK" not in os.environ and size <= 1:
        return Place()
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing or not 0 <= rank < size:
        wrong = f"without {' and '.join(missing)}" if missing else "which count from 0"
        raise ConfigError(
            f"the environment has RANK={os.environ.get('RANK')} of WORLD_SIZE={size}, {wrong}: "
            "start ranks with torchrun, or unset both to train alone"
        )
    local_rank = whole_number("LOCAL_RANK", rank)
    return Place(rank, size, local_rank, whole_number("LOCAL_WORLD_SIZE", size))


def whole_number(name: str, default: int) -> int:
    """An environment variable of torchrun's; ConfigError where it is no whole number."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"{name}={text!r} in the environment is no whole number: start ranks with torchrun, "
            f"which sets it, or give {name} a number"
        ) from error


def open_store(place: Place, timeout_s: float = TIMEOUT_S) -> dist.Store | None:
    """The launch's key-value store, under keys of this run and restart; None for a lone rank.

    torchrun's agent serves it; without an agent (TORCHELASTIC_USE_AGENT_STORE is not True) rank 0
    does, on the port that `init_process_group` will share.
    """
    if place.world_size == 1:
        return None
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not agent
    host, port = os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", "29500"))
    if not (serves or agent):
        _wait_for_server(host, port, timeout_s)
    store = dist.TCPStore(
        host,
        port,
        is_master=serves,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return dist.PrefixStore(f"distcache/{run}/{generation()}", store)


def generation() -> str:
    """Which start of the ranks by torchrun this is, as far as a store can have keys of another one.

    An agent's store outlives ranks, and torch puts no attempt into its keys. One of rank 0 is new
    with the ranks, and agents that join later count their own restarts.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent else "0"


def stale_keys_remedy() -> str:
    """A sentence for an error of torch's own groups, whose keys have no `generation`; "" where no
    ranks came before these."""
    if generation() == "0":
        return ""
    return (
        ": torchrun has started the ranks again, and they find addresses of those before them in "
        "the store of its agent. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment"
    )


def _wait_for_server(host: str, port: int, timeout_s: float) -> None:
    """Wait until somebody serves the store; PeerError after `timeout_s`."""
    refused: list[OSError] = []

    def is_served() -> bool:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
        except OSError as error:
            refused[:] = [error]
            return False
        return True

    try:
        wait_until(is_served, timeout_s, lambda: f"rank 0 at {host}:{port}")
    except TimeoutError:
        raise PeerError(
            f"nobody serves the ranks' store at {host}:{port} after {timeout_s:.0f} s "
            f"({refused[0]}): is rank 0, or the agent of its node, running, and are MASTER_ADDR "
            "and MASTER_PORT its own?"
        ) from refused[0]


def wait_until(
    look: Callable[[], bool], timeout_s: float, whom: Callable[[], str] | None = None
) -> None:
    """Look again and again until `look` says so; TimeoutError after `timeout_s` seconds.

    torch's stores, where they wait themselves, keep Ctrl-C from the process until they are done.
    After `NOTICE_S` seconds it is said once for `whom` this rank waits; None: nothing is said.
    """
    began = time.monotonic()
    while not look():
        waited = time.monotonic() - began
        if waited > timeout_s:
            raise TimeoutError
        if waited > NOTICE_S and whom is not None:
            log.warning("waits for %s (%.0f s at most)", whom(), timeout_s)
            whom = None
        time.sleep(0.02)


def barrier(
    store: dist.Store, rank: int, size: int, limit_s: float, asked: str, way_out: str
) -> None:
    """Let rank 0 of `size` see whether it is alone with what it `asked` for; `way_out`: what to do.

    Raises PeerError on rank 0, and changes nothing, where no other comes within `limit_s` seconds.
    """
    if size == 1:
        return
    if rank > 0:
        store.add("meet/others", 1)
        return
    others, met = named_ranks(range(1, size)), store.add("meet/rank 0", 0) * (size - 1)

    def has_company() -> bool:
        if (failure := failure_of_others(store, 0)) is not None:
            raise PeerError(failure.message)
        return store.add("meet/others", 0) > met

    try:
        wait_until(has_company, limit_s, lambda: f"{others} to ask for {asked} too")
    except TimeoutError:
        raise PeerError(
            f"rank 0 asked for {asked}, and {others} did not within {limit_s:g} s: {way_out}"
        ) from None
    store.add("meet/rank 0", 1)


def publish(store: dist.Store | None, world_size: int, value: Any, name: str = "handover") -> None:
    """Rank 0: hand a JSON value to all other ranks, and wait a few seconds for them to read it.

    The wait matters where rank 0 itself serves the store and is about to exit.
    """
    if store is None:
        return
    store.set(name, json.dumps(value))
    with suppress(TimeoutError):
        wait_until(lambda: store.add(f"{name}/read", 0) >= world_size - 1, 5.0)


def receive(
    store: dist.Store,
    timeout_s: float = TIMEOUT_S,
    name: str = "handover",
    whom: Callable[[], str] | None = None,
) -> Any:
    """Other ranks: wait for what rank 0 publishes, after a while with a word for `whom`; PeerError
    after `timeout_s` seconds."""
    try:
        wait_until(lambda: store.check([name]), timeout_s, whom)
    except TimeoutError:
        raise PeerError(f"rank 0 published no configuration within {timeout_s:.0f} s") from None
    value = json.loads(store.get(name))
    store.add(f"{name}/read", 1)
    return value


def exchange(
    store: dist.Store, name: str, place: tuple[int, int], value: Any, timeout_s: float
) -> list[Any]:
    """Every rank's JSON `value`, by rank; `place`: this rank and how many there are.

    Rank 0 gathers them and hands on what it has: the same to all, also where ranks were told of
    other numbers. Raises PeerError naming the ranks that do not come within `timeout_s` seconds.
    """
    rank, size = place
    keys, everyone = [f"{name}/{other}" for other in range(size)], f"{name}/all"

    def missing() -> str:
        try:
            late = [other for other, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:
            return "rank 0, or the agent that serves the store,"
        return named_ranks(late or [0])

    def whom() -> str:
        return f"{missing()} to start"

    try:
        store.set(keys[rank], json.dumps(value))
        if rank > 0:
            return receive(store, timeout_s, everyone, whom)
        wait_until(lambda: store.check(keys), timeout_s, whom)
        found = [json.loads(store.get(key)) for key in keys]
        publish(store, size, found, everyone)
    except (RuntimeError, TimeoutError, PeerError) as error:  # those of the store are the first
        raise PeerError(
            f"rank {rank} of {size} waited for the others to start; {missing()} did not come "
            f"within trainer.timeout_s ({timeout_s:g} s): are all agents of the job running, with "
            "the same --nnodes, --nproc-per-node and rendezvous?"
        ) from error
    return found


# -----------------------------------------------------------------------------
# What has to be the same on all ranks.
#
# Where ranks would compute with other bits, or read each other's messages wrongly, it is an error;
# any other difference is a warning.

_SHOWN = 3
"""Differences that an error names."""


def differences(by_rank: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each key on which ranks differ: `<key> is <value> on rank 0 and ... on ...`."""
    lines = []
    for key in dict.fromkeys(key for values in by_rank for key in values):
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(by_rank):
            shown = repr(values[key]) if key in values else "not there"
            ranks.setdefault(shown, []).append(rank)
        if len(ranks) > 1:
            *first, last = [f"{value} on {named_ranks(own)}" for value, own in ranks.items()]
            lines.append(f"{key} is {', '.join(first)} and {last}")
    return lines


def raise_if_different(
    by_rank: Sequence[Mapping[str, Any]], way_out: str, what: str = "the ranks"
) -> None:
    """Raise ConfigError where the values of the ranks differ: the first few keys, each with every
    value and the ranks that have it. Those with the same `repr` are equal."""
    lines = differences(by_rank)
    if lines:
        more = f" (and {len(lines) - _SHOWN} more)" if len(lines) > _SHOWN else ""
        differ = f"{what} differ: {'; '.join(lines[:_SHOWN])}{more}; {way_out}"
        raise on_all_ranks(ConfigError(differ))


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = []
    for run in runs:
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"
