"""Whose failure is told: the first, and a cause before its consequences."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from distcache.comm.rendezvous import (
    Failure,
    cause_of,
    describe,
    is_secondary,
    record_failure,
    recorded_failures,
)
from distcache.errors import ConfigError, DataError, PeerError

GLOO = RuntimeError("[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
MISSING = PeerError("rank 2 is missing")


@pytest.fixture
def store():
    return dist.HashStore()


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
    def fail_later() -> None:
        time.sleep(0.2)
        record_failure(store, 1, DataError("the cause"))

    thread = threading.Thread(target=fail_later)
    thread.start()
    found = cause_of(store, 0, PeerError("rank 1 sent an error"), grace_s=20)
    thread.join()
    assert (found.rank, found.text) == (1, "the cause")
    again = dist.HashStore()
    assert cause_of(again, 3, DataError("mine"), grace_s=20).rank == 3
    assert cause_of(again, 1, PeerError("theirs"), grace_s=20).text == "mine"
    assert cause_of(None, 0, ConfigError("alone")) == Failure(0, "alone", False)


def test_a_store_that_died_leaves_the_own_error():
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
