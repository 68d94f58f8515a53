"""Whose failure is told: the first, and a cause before its consequences."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from distcache.comm.failure import (
    cause_of,
    describe,
    first_failure,
    first_traceback,
    is_secondary,
    record_failure,
)
from distcache.errors import ConfigError, DataError, PeerError


@pytest.fixture
def store():
    return dist.HashStore()


def test_nothing_failed_yet(store):
    assert first_failure(store) is None
    assert first_failure(None) is None


def test_the_first_record_wins(store):
    record_failure(store, 2, DataError("bad id"))
    record_failure(store, 0, DataError("later"))
    assert first_failure(store) == (2, "bad id")


def test_a_cause_goes_before_its_consequences(store):
    record_failure(store, 0, PeerError("rank 2 is missing"))
    record_failure(store, 1, RuntimeError("[gloo/tcp] Connection closed by peer"))
    record_failure(store, 2, ValueError("a bug"))
    assert first_failure(store) == (2, "ValueError: a bug")


def test_a_bug_is_told_with_its_place_and_a_mistake_without(store):
    assert first_traceback(store) == first_traceback(None) == ""
    record_failure(store, 0, PeerError("rank 2 is missing"))
    assert first_traceback(store) == ""
    try:
        [][1]
    except IndexError as error:
        error.add_note("in stage gather of step 7")
        record_failure(store, 2, error)
    where = first_traceback(store)
    assert where.startswith("Traceback (most recent call last)")
    assert "[][1]" in where and "in stage gather of step 7" in where
    assert "(in stage gather of step 7)" in first_failure(store)[1]


def test_only_consequences(store):
    record_failure(store, 1, PeerError("rank 2 is missing"))
    record_failure(store, 0, PeerError("rank 2 is missing, too"))
    assert first_failure(store) == (1, "rank 2 is missing")


def test_a_consequence_waits_for_its_cause(store):
    def fail_later() -> None:
        time.sleep(0.2)
        record_failure(store, 1, DataError("the cause"))

    thread = threading.Thread(target=fail_later)
    thread.start()
    assert cause_of(store, 0, PeerError("rank 1 sent an error"), grace_s=20) == (1, "the cause")
    thread.join()


def test_a_cause_tells_itself(store):
    assert cause_of(store, 3, DataError("mine"), grace_s=20) == (3, "mine")
    assert cause_of(store, 1, PeerError("theirs"), grace_s=20) == (3, "mine")
    assert cause_of(None, 0, ConfigError("alone")) == (0, "alone")


def test_a_store_that_died_leaves_the_own_error():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    assert cause_of(client, 1, DataError("mine")) == (1, "mine")


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (PeerError("x"), True),
        (dist.DistNetworkError("x"), True),
        (RuntimeError("[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("socket"), False),
        (DataError("x"), False),
    ],
)
def test_which_errors_are_consequences(error, secondary):
    assert is_secondary(error) is secondary


def test_messages():
    assert describe(DataError("line 3")) == "line 3"
    assert describe(KeyError("k")) == "KeyError: 'k'"
    assert describe(DataError()) == "DataError"
