"""What is hinted before a batch: all that it touches, once, evenly, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from distcache.data.samplers import BlockOrder, ReadAhead


def touched(spans: list[tuple[int, int]], samples: int) -> np.ndarray:
    """How often each sample was hinted."""
    counts = np.zeros(samples, dtype=np.int64)
    for start, stop in spans:
        assert 0 <= start < stop <= samples
        counts[start:stop] += 1
    return counts


@pytest.mark.parametrize("samples", [1, 15, 16, 64, 65, 1000, 1024, 1039])
@pytest.mark.parametrize("batch", [1, 7, 48, 300])
def test_all_that_a_batch_touches_was_hinted_once(monkeypatch, samples, batch):
    monkeypatch.setattr("distcache.data.samplers.POOL_BLOCKS", 4)
    order, spans = BlockOrder(samples, 5, 16), []
    ahead = ReadAhead(order, lambda *span: spans.append(span))
    for epoch in range(3):
        spans.clear()
        for start in range(0, samples, batch):
            stop, before = min(start + batch, samples), len(spans)
            ahead.reach(epoch, start, stop)
            missed = touched(spans, samples)[order.positions(epoch, start, stop)] == 0
            assert missed.sum() <= samples % 16  # less than a block of them is in no block
            new = sum(stop - start for start, stop in spans[before:])
            assert start == 0 or new <= stop - start + 16
        counts = touched(spans, samples)
        assert counts.max() == 1 and (counts == 0).sum() == (samples % 16 if samples > 64 else 0)


def test_an_epoch_taken_up_in_its_middle(monkeypatch):
    monkeypatch.setattr("distcache.data.samplers.POOL_BLOCKS", 4)
    order, spans = BlockOrder(1000, 5, 16), []
    ahead = ReadAhead(order, lambda *span: spans.append(span))
    for epoch, start in ((2, 500), (2, 510), (0, 200), (0, 900), (0, 100)):
        ahead.reach(epoch, start, start + 10)
        assert touched(spans, 1000)[order.positions(epoch, start, start + 10)].all()
    assert sum(stop - start for start, stop in spans) < 5 * 3 * 64
