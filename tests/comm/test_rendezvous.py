"""Before any process group exists: places, what rank 0 hands on, who is waited for, whose failure
is told, and whose package versions differ: an error where it matters, else a warning."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks

import distcache
from distcache import versions
from distcache.comm import link, rendezvous
from distcache.comm.rendezvous import (
    LEAST_TIMEOUT_S,
    TIMEOUT_S,
    Failure,
    Place,
    cause_of,
    describe,
    exchange,
    find_place,
    is_secondary,
    open_store,
    publish,
    receive,
    record_failure,
    recorded_failures,
    start_timeout,
)
from distcache.comm.world import close_world, open_world
from distcache.errors import ConfigError, DataError, PeerError
from distcache.layout import TableSpec

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TWO = {"WORLD_SIZE": 2, "MASTER_ADDR": "h"}
GLOO = RuntimeError("[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
MISSING = PeerError("rank 2 is missing")


@pytest.fixture
def launched(monkeypatch):
    """Set torchrun's variables to these and no others."""

    def launch(**values: object) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return launch


@pytest.fixture
def store():
    return dist.HashStore()


def test_places_are_torchruns_or_alone(launched):
    launched(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, MASTER_ADDR="h")
    assert find_place() == Place(5, 8, 1, 4)
    launched()
    assert find_place() == Place(0, 1, 0, 1)
    assert open_store(find_place()) is None
    publish(None, 1, {"text": None})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"RANK": 1}, "RANK=1 of WORLD_SIZE=1, without WORLD_SIZE and MASTER_ADDR: start ranks"),
        ({"WORLD_SIZE": 2}, "RANK=None of WORLD_SIZE=2, without RANK and MASTER_ADDR: start"),
        *(
            (TWO | {"RANK": rank}, f"RANK={rank} of WORLD_SIZE=2, which count from 0: start ranks")
            for rank in (-1, 2, 7)
        ),
        *(
            ({"RANK": 0} | TWO | {name: "two"}, f"{name}='two' in the environment is no whole num")
            for name in NAMES[:4]
        ),
    ],
)
def test_a_wrong_environment_is_refused(launched, values, says) -> None:
    launched(**values)
    with pytest.raises(ConfigError, match=says):
        find_place()


def test_ranks_wait_for_a_start_as_long_as_the_command_line_says() -> None:
    assert start_timeout(["trainer.steps=3"]) == start_timeout(["trainer.timeout_s=x"]) == TIMEOUT_S
    assert start_timeout(["trainer.timeout_s=60", "a=b", "trainer.timeout_s=90.5"]) == 90.5
    assert start_timeout(["trainer.timeout_s=2"]) == LEAST_TIMEOUT_S


def test_what_rank_0_publishes_all_receive(store):
    with pytest.raises(PeerError, match="rank 0 published no configuration"):
        receive(store, timeout_s=0.1)
    received: list = []
    others = [
        threading.Thread(target=lambda: received.append(receive(store, timeout_s=20)))
        for _ in range(3)
    ]
    for thread in others:
        thread.start()
    publish(store, 4, {"text": "a: 1", "exit_code": 0})
    for thread in others:
        thread.join()
    assert received == [{"text": "a: 1", "exit_code": 0}] * 3


def test_keys_carry_the_run_and_its_restart(launched, monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched(MASTER_ADDR="127.0.0.1", MASTER_PORT=server.port)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    stores = []
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        stores.append(open_store(Place(0, 2, 0, 2), timeout_s=10))
    stores[0].set("handover", "{}")
    assert server.check(["distcache/job7/0/handover"])
    assert not stores[1].check(["handover"])
    # A store of rank 0 is new each time, and an agent that joins later counts its own restarts.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    for restart in ("2", "0"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        assert open_store(Place(1, 2, 1, 2), timeout_s=10).check(["handover"])


def test_a_rank_waits_for_rank_0_and_says_so(launched, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.2)
    port, served = free_port(), []
    launched(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with pytest.raises(PeerError, match=rf"nobody serves the ranks' store at 127.0.0.1:{port} aft"):
        open_store(find_place(), timeout_s=0.6)
    assert f"waits for rank 0 at 127.0.0.1:{port} (1 s at most)" in caplog.text
    late = threading.Timer(0.5, lambda: served.append(open_store(Place(0, 2, 0, 2))))
    late.start()
    store = open_store(find_place(), timeout_s=20)
    late.join()
    served[0].set("word", "heard")
    assert store.get("word") == b"heard"


def barrier(store: dist.Store, rank: int, size: int = 2, limit_s: float = 20) -> list:
    return exchange(store, "a test", (rank, size), {"of": rank}, limit_s)


def test_ctrl_c_ends_every_wait(launched, store) -> None:
    launched(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    for wait in (lambda: open_store(find_place(), 60), lambda: barrier(store, 0, limit_s=60)):
        began = time.monotonic()
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert time.monotonic() - began < 20


def test_missing_ranks_are_named(store) -> None:
    says = r"rank 1 of 3 waited .* ranks 0, 2 did not come within trainer.timeout_s \(0.2 s\)"
    with pytest.raises(PeerError, match=says):
        barrier(store, 1, 3, 0.2)


@pytest.mark.parametrize("late_s", [0.0, 0.6])
def test_ranks_that_come_late_are_waited_for_and_told(late_s, store, monkeypatch, caplog) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.2 if late_s else 10)
    caplog.set_level(logging.INFO)
    late = threading.Timer(late_s, lambda: barrier(store, 1))
    late.start()
    found = barrier(store, 0)
    late.join()
    assert found == [{"of": 0}, {"of": 1}]
    told = [line for line in caplog.messages if "waits for" in line]
    assert len(told) == (late_s > 0.5)
    assert not told or "waits for rank 1 to start (20 s at most)" in told[0]


@pytest.mark.parametrize(
    ("errors", "first"),
    [
        ([(2, DataError("bad id")), (0, DataError("later"))], (2, "bad id")),
        ([(0, MISSING), (1, GLOO), (2, ValueError("a bug"))], (2, "ValueError: a bug")),
        ([(1, MISSING), (0, PeerError("rank 2 is missing, too"))], (1, "rank 2 is missing")),
    ],
)
def test_a_cause_goes_before_its_consequences(store, errors, first):
    assert recorded_failures(store) == recorded_failures(None) == []
    for rank, error in errors:
        record_failure(store, rank, error)
    found = recorded_failures(store)
    assert len(found) == len(errors) and (found[0].rank, found[0].text) == first


def test_a_bug_is_told_with_its_place_and_a_mistake_without(store):
    assert Failure.of(0, MISSING).traceback == ""
    try:
        [][1]
    except IndexError as error:
        error.add_note("in stage gather of step 7")
        record_failure(store, 2, error)
    (found,) = recorded_failures(store)
    assert found.traceback.startswith("Traceback (most recent call last)")
    assert "[][1]" in found.traceback and "in stage gather of step 7" in found.traceback
    assert "(in stage gather of step 7)" in found.text


def test_a_consequence_waits_for_its_cause_and_a_cause_tells_itself(store):
    late = threading.Timer(0.2, lambda: record_failure(store, 1, DataError("the cause")))
    late.start()
    found = cause_of(store, 0, PeerError("rank 1 sent an error"), grace_s=20)
    late.join()
    assert (found.rank, found.text) == (1, "the cause")
    again = dist.HashStore()
    assert cause_of(again, 3, DataError("mine"), grace_s=20).rank == 3
    assert cause_of(again, 1, PeerError("theirs"), grace_s=20).text == "mine"
    assert cause_of(None, 0, ConfigError("alone")) == Failure(0, "alone", False)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    assert cause_of(client, 1, DataError("mine")) == Failure(1, "mine", False)


@pytest.mark.parametrize(
    ("error", "secondary", "words"),
    [
        (PeerError("x"), True, "x"),
        (dist.DistNetworkError("x"), True, "DistNetworkError: x"),
        (GLOO, True, f"RuntimeError: {GLOO}"),
        (RuntimeError("shapes do not match"), False, "RuntimeError: shapes do not match"),
        (ValueError("socket"), False, "ValueError: socket"),
        (DataError("line 3"), False, "line 3"),
        (DataError(), False, "DataError"),
        (KeyError("k"), False, "KeyError: 'k'"),
    ],
)
def test_which_errors_are_consequences_and_what_they_say(error, secondary, words):
    assert is_secondary(error) is secondary and describe(error) == words


HERE = versions.versions_here()
INSTALLED = versions.installed


def test_versions_are_words() -> None:
    assert HERE["torch"] == torch.__version__ and HERE["python"].startswith("3.")
    assert all(isinstance(value, str) and value for value in HERE.values())
    assert json.loads(json.dumps(HERE)) == HERE
    assert re.fullmatch("[0-9a-f]{8}", HERE[versions.SOURCE])


def test_versions_that_matter_are_refused_and_others_told_by_rank_0(caplog, monkeypatch) -> None:
    def compared(other: dict[str, str], hybrid=False, device="cpu", is_first=True) -> None:
        monkeypatch.setattr(link, "run_on_all_ranks", lambda world, work: [work(), work() | other])
        world: Any = SimpleNamespace(device=torch.device(device), is_first=is_first)
        link.agree_on_versions(world, hybrid)

    for name in ("distcache", "torch", "numpy", versions.SOURCE):
        says = rf"{name} is .* on rank 0 and '9.9' on rank 1; install the same packages on all node"
        with pytest.raises(ConfigError, match=says):
            compared({name: "9.9"})
    for name, where in (("torchrec", (True, "cpu")), ("triton", (False, "cuda"))):
        other = {name: "0.1", "numba": "not installed"}
        compared(other, is_first=False)
        assert not caplog.text
        compared(other)
        assert f"{name} is " in caplog.text and "and 'not installed' on rank 1" in caplog.text
        caplog.clear()
        with pytest.raises(ConfigError, match=f"{name} is .* and '0.1' on rank 1"):
            compared(other, *where)


def refusals(rank: int, size: int) -> dict[str, str]:
    """A command, `distcache.fit` and both collections where rank 1 has another numpy, or other
    settings."""
    from torchrec import EmbeddingBagConfig, EmbeddingConfig

    found = {}

    def note(name: str, work, **given) -> None:
        with pytest.raises(ConfigError) as caught:
            work(**given)
        found[name] = str(caught.value)

    def fit(more=0, **settings) -> None:
        tables = [TableSpec("t", 10 + more, 4, ("f",))]
        settings = {"trainer.device": "cpu", **settings}
        distcache.fit([], tables, torch.nn.Linear(4, 1), settings=settings)

    def bags(lr=0.1, **settings) -> None:
        table = EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t")
        update = distcache.optim.SGD(lr=lr)
        distcache.CachedEmbeddingBagCollection([table], False, "cpu", optimizer=update, **settings)

    def rows(wide=0) -> None:
        table = EmbeddingConfig(num_embeddings=10, embedding_dim=4 + wide, name="t")
        sgd = distcache.optim.SGD(lr=0.1)
        distcache.CachedEmbeddingCollection([table], "cpu", optimizer=sgd)

    def command() -> None:
        world = open_world("cpu", "gloo", 60, open_store(find_place()))
        try:
            link.agree_on_versions(world)
        finally:
            close_world(world, orderly=False)

    dist.init_process_group("gloo")
    note("fit settings", fit, **{"trainer.seed": rank, "optim.dense_lr": 0.5 + rank})
    note("fit tables", fit, more=rank)
    note("bags settings", bags, lookahead=3 + rank, prefetch=1 + rank)
    note("bags optimizer", bags, lr=0.1 + rank)
    note("rows table", rows, wide=rank * 4)
    note("kinds", rows if rank else bags)
    other = {"numpy": "9.9.9"} if rank else {}
    versions.installed = lambda name: other[name] if name in other else INSTALLED(name)
    for work in (fit, bags, rows):
        note(work.__name__, work)
    dist.barrier()
    dist.destroy_process_group()
    note("command", command)
    return found


def test_the_library_and_commands_compare_versions_and_settings(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = run_ranks(refusals, 2)
    assert first == second
    bags, rows = "'CachedEmbeddingBagCollection'", "'CachedEmbeddingCollection'"
    for name, *words in (
        *((name, "numpy is", "'9.9.9' on rank 1") for name in ("fit", "bags", "rows", "command")),
        ("fit settings", "trainer.seed is 0 on rank 0 and 1 on rank 1"),
        ("fit settings", "optim.dense_lr is 0.5 on rank 0 and 1.5 on rank 1"),
        ("fit tables", "rows=10,", "rows=11,"),
        ("bags settings", "lookahead is 3 on rank 0 and 4 on rank 1"),
        ("bags settings", "prefetch is 1 on rank 0 and 2 on rank 1"),
        ("bags optimizer", "optimizer is SGD(lr=0.1, ", " on rank 0 and SGD(lr=1.1, "),
        ("rows table", "dim=4,", "dim=8,"),
        ("kinds", f"the collection is {bags} on rank 0 and {rows} on rank 1"),
    ):
        assert all(word in first[name] for word in words), (name, first[name])
    assert not list(tmp_path.iterdir()), "no run folder is made before the ranks agree"
