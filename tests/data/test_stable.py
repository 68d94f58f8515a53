"""Numbers that must never change: runs and preprocessed folders of other versions rest on them."""

from __future__ import annotations

import numpy as np

from distcache.data.hashing import bags, digest_of, hash_counters, key_of
from distcache.data.parquet import RowGroupOrder
from distcache.data.parquet_files import hashed, hexadecimal
from distcache.data.samplers import BlockOrder, SampleOrder


def test_hashes():
    assert (key_of(0), key_of(3, 1)) == (16294208416658607535, 11810286367831575873)
    counters = hash_counters(np.arange(2, dtype=np.uint64), 7)
    assert counters.tolist() == [1346066267577507604, 7191089600892374487]
    words = [b"", b"abc", "\u00e9".encode()]
    assert hashed(words, 1 << 40).tolist() == [499686352612, 222668569560, 1028841741003]
    assert hexadecimal([b"", b"ff", b"123456789abcdef01"], 1000).tolist() == [0, 255, 121]
    assert bags(np.array([0, 5]), 2, 1000, 4).tolist() == [[0, 797, 258, 761], [5, 673, 566, 66]]
    digest = digest_of(np.arange(3), np.zeros((2, 2), np.float32))
    assert digest == "e3c7f331537fe5fb4347ea5333f3290713afaf02165fb9df51fbb629baa9fa03"


def test_orders(monkeypatch):
    assert SampleOrder(1000, 5).positions(2, 0, 5).tolist() == [520, 706, 713, 96, 574]
    monkeypatch.setattr("distcache.data.samplers.POOL_BLOCKS", 4)
    order = BlockOrder(1001, 5, 16)
    assert order.positions(3, 60, 68).tolist() == [486, 649, 343, 345, 151, 800, 155, 32]
    groups, samples = RowGroupOrder([10, 20, 5, 30, 7], 5, 25).places(1, 0, 8)
    assert groups.tolist() == [4, 3, 3, 3, 3, 3, 3, 3]
    assert samples.tolist() == [1, 3, 14, 2, 15, 4, 27, 29]
