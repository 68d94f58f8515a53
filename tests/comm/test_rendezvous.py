"""Places, and what rank 0 hands to the other ranks before any process group exists."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist
from ranks import free_port

from distcache.comm import rendezvous
from distcache.comm.rendezvous import (
    LEAST_TIMEOUT_S,
    TIMEOUT_S,
    Place,
    find_place,
    open_store,
    publish,
    receive,
    start_timeout,
)
from distcache.errors import ConfigError, PeerError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def launched(monkeypatch):
    """Set torchrun's variables to these and no others."""

    def launch(**values: object) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return launch


def test_alone_without_torchrun(launched):
    launched()
    assert find_place() == Place(0, 1, 0, 1)
    assert open_store(find_place()) is None
    publish(None, 1, {"text": None})


def test_torchruns_variables(launched):
    launched(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, MASTER_ADDR="h")
    assert find_place() == Place(5, 8, 1, 4)


TWO = {"WORLD_SIZE": 2, "MASTER_ADDR": "h"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"RANK": 1}, "WORLD_SIZE and MASTER_ADDR are not"),
        ({"WORLD_SIZE": 2}, r"WORLD_SIZE=2 .* but RANK is not: start ranks with"),
        *(
            (TWO | {"RANK": rank}, rf"RANK={rank} .* not among the 2 of WORLD_SIZE=2")
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


def test_what_rank_0_publishes_all_receive():
    store, received = dist.HashStore(), []

    def other() -> None:
        received.append(receive(store, timeout_s=20))

    threads = [threading.Thread(target=other) for _ in range(3)]
    for thread in threads:
        thread.start()
    publish(store, 4, {"text": "a: 1", "exit_code": 0})
    for thread in threads:
        thread.join()
    assert received == [{"text": "a: 1", "exit_code": 0}] * 3


def test_a_silent_rank_0_is_named():
    with pytest.raises(PeerError, match="rank 0 published no configuration"):
        receive(dist.HashStore(), timeout_s=0.1)


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


def test_a_rank_waits_for_rank_0_and_says_so(launched, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.2)
    port = free_port()
    launched(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with pytest.raises(PeerError, match=rf"nobody serves the ranks' store at 127.0.0.1:{port} aft"):
        open_store(find_place(), timeout_s=0.6)
    assert f"waits for rank 0 at 127.0.0.1:{port} (1 s at most)" in caplog.text
    served: list = []
    launched(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    place = find_place()
    late = threading.Timer(0.5, lambda: served.append(open_store(place)))
    late.start()
    launched(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    store = open_store(find_place(), timeout_s=20)
    late.join()
    served[0].set("word", "heard")
    assert store.get("word") == b"heard"


def test_ctrl_c_ends_the_wait_for_rank_0(launched) -> None:
    launched(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    began = time.monotonic()
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        open_store(find_place(), timeout_s=60)
    assert time.monotonic() - began < 20
