"""A look-ahead that is left, or fails, while rows still move on its other thread."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch
from ebc_cases import assert_same, batches, cached, dlrm, draw, loss_of, train, weights_of

from distcache import lookahead
from distcache.embedding import stream as ahead
from distcache.errors import PeerError, PlanError


def broken(monkeypatch, epoch):
    """The threads of an epoch of which that which moves rows has failed.

    Two ranks settle before they stop; here one does, and finds a movement that has failed.
    """
    stream = epoch._source.stream
    monkeypatch.setattr(stream, "_world", type("", (), {"size": 2})())
    with stream._lock:
        stream._is_moving, stream._failure = False, ValueError("no memory to pin")
        stream._notify_all()
    return stream


ROOMY = {"ratio": 1.0, "rows": None, "prefetch": 5, "timeout_s": 20}


@pytest.mark.parametrize("how", ["halt", "leave"])
def test_threads_end_when_moving_has_failed_and_nothing_follows(monkeypatch, how: str) -> None:
    ebc = cached("sgd", **ROOMY)
    stream = iter(lookahead(batches(50), ebc))
    train(dlrm(ebc), ebc, [next(stream)])
    pipeline = broken(monkeypatch, stream)
    if how == "halt":
        with pytest.raises(ValueError, match="no memory to pin"):
            stream.halt()
        assert not pipeline.stop(10), "what other ranks have moved is not known"
        stream.close()
    else:
        del stream
        gc.collect()
    monkeypatch.undo()
    for thread in (pipeline._planner_thread, pipeline._movement_thread):
        thread.join(10)
        assert not thread.is_alive()
    if how == "leave":
        with pytest.raises(PeerError, match="did not halt"):
            next(lookahead(batches(), ebc))
    ebc.close()


def test_a_halt_that_came_too_late_is_made_again(monkeypatch) -> None:
    """Nobody reads the batches twice, and none is lost."""
    go = threading.Event()
    data = batches(8)

    def slowly():
        for at, batch in enumerate(data):
            if at == 4:  # the first step is planned with L + 1 more
                go.wait(30)
            yield batch

    ebc = cached("sgd", **{**ROOMY, "lookahead": 2, "prefetch": 1})
    model, stream = dlrm(ebc), iter(lookahead(slowly(), ebc))
    train(model, ebc, [next(stream)])
    stream._source.timeout_s = 0.2
    with torch.no_grad(), pytest.raises(Exception, match="did not halt within"):
        loss_of(model, draw(900))
    go.set()
    stream._source.timeout_s = 20.0
    train(model, ebc, stream)
    assert ebc.tables.steps == len(data)
    found = weights_of(ebc)
    ebc.close()
    other = cached("sgd", **ROOMY)
    train(dlrm(other), other, data)
    assert_same(found, weights_of(other))
    other.close()


def test_a_look_ahead_that_was_left_ends_before_the_next_use(monkeypatch) -> None:
    """An error in the loop shows although the planner waits; nothing else uses the planner yet."""
    monkeypatch.setattr(ahead, "LEAVING_S", 0.1)
    go, data = threading.Event(), batches(8)

    def stuck():
        yield from data[:4]
        go.wait(30)

    ebc = cached("sgd", **{**ROOMY, "lookahead": 2, "prefetch": 1, "timeout_s": 0.4})
    model = dlrm(ebc)
    with pytest.raises(ValueError, match="on purpose"):
        for batch in lookahead(stuck(), ebc):
            loss_of(model, batch).backward()
            ebc.step()
            raise ValueError("on purpose")
    for _ in range(2):
        with pytest.raises(PeerError, match=r"did not halt within 0\.4 s"):
            next(lookahead(data, ebc))
    go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("distcache-"):
            thread.join(30)
    train(model, ebc, lookahead(data[1:], ebc))
    assert ebc.tables.steps == len(data) and not ebc.tables.leaving
    ebc.close()


@pytest.mark.parametrize("error", [None, ValueError("on purpose")])
def test_no_thread_computes_while_the_interpreter_goes_away(monkeypatch, error) -> None:
    ebc = cached("sgd", **ROOMY)
    stream = iter(lookahead(batches(50), ebc))
    loss_of(dlrm(ebc), next(stream)).backward()
    pipeline = stream._source.stream
    monkeypatch.setattr(ahead, "_running", {pipeline: ebc.tables.world})
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert pipeline._planner_thread.is_alive() and pipeline._movement_thread.is_alive()
    ahead._at_exit()
    assert not pipeline._planner_thread.is_alive() and not pipeline._movement_thread.is_alive()
    stream.close()
    ebc.close()


def test_a_step_of_a_stopped_queue_is_not_waited_for() -> None:
    ebc = cached("sgd", **ROOMY)
    stream = iter(lookahead(batches(), ebc))
    next(stream)
    queue = stream._source.stream
    context = stream._plans[0]
    context.moved = False
    queue.request_stop()
    with pytest.raises(PlanError, match="stopped before step 0"):
        queue.wait_for_rows(context)
    stream.close()
    ebc.close()


@pytest.mark.parametrize("name", ["distcache-planner", "distcache-movement"])
def test_a_start_that_is_interrupted_leaves_no_thread(monkeypatch, name: str) -> None:
    """Ctrl-C in `Thread.start`, which waits: a thread that nobody knows would plan on."""
    ebc = cached("sgd", **ROOMY)
    model, start = dlrm(ebc), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == name:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(lookahead(batches(), ebc))
    monkeypatch.undo()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("distcache-")]
    train(model, ebc, lookahead(batches(3), ebc))
    assert ebc.tables.steps == 3
    ebc.close()
