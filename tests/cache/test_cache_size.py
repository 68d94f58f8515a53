"""Slots per rank and group from cache.rows, cache.ratio or cache.bytes."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcache.errors import ConfigError
from distcache.popularity.slots import cache_bytes, cache_slots

ONE = [(1000, 16, 0)]
TWO = [(3000, 16, 16), (1000, 4, 1)]  # 128 and 20 bytes a row in float32


MIB = 1 << 20


@pytest.mark.parametrize(
    ("groups", "itemsize", "world_size", "expected", "slots"),
    [
        (ONE, 4, 1, (), [1000]),  # a toy table is cached whole
        (TWO, 4, 3, (), [3000, 1002]),
        ([(10 * MIB, 16, 16)], 4, 1, (), [262_144]),  # 32 MiB at 128 bytes, not 157,287
        ([(10 * MIB, 16, 16)], 8, 1, (), [157_287]),  # 1.5 %, not 32 MiB at 256 bytes
        ([(100 * MIB, 16, 16)], 4, 1, (), [1_572_864]),
        ([(100 * MIB, 16, 16)], 4, 1, (1e6,), [1_572_864]),
        ([(100 * MIB, 16, 16)], 4, 1, (2e6,), [2_400_000]),  # 1.2 times what steps name
        ([(100 * MIB, 16, 16), (1000, 4, 0)], 4, 2, (2e6, 5000.0), [2_400_000, 1000]),
    ],
)
def test_default(groups, itemsize, world_size, expected, slots) -> None:
    """1.5 % of the rows, at least 32 MiB of them, and room for the steps that are known."""
    assert cache_slots(None, None, None, groups, itemsize, world_size, expected) == slots
    given = cache_slots(None, 0.015, None, groups, itemsize, world_size)
    assert given == cache_slots(None, 0.015, None, groups, itemsize, world_size, expected)


def hundred(world_size: int = 1) -> tuple[list, int, int]:
    """Groups, bytes of an element, ranks: 100 rows."""
    return [(100, 4, 0)], 4, world_size


@pytest.mark.parametrize(
    ("key", "value", "of", "expected"),
    [
        *(("ratio", 0.015, (ONE, 4, w), [n]) for w, n in ((1, 15), (2, 16), (4, 16), (7, 21))),
        ("ratio", 0.015, (TWO, 4, 1), [45, 15]),  # of each group
        *(("ratio", 0.015, ([(10, 16, 0)], 4, w), [w]) for w in (1, 4)),
        ("ratio", 0.015, ([(3, 16, 0)], 4, 4), [4]),
        *(("ratio", r, hundred(), [n]) for r, n in ((1.0, 100), (1, 100), (0.07, 7), (0.29, 29))),
        ("ratio", 1.0, hundred(3), [102]),
        *(("ratio", r, hundred(), [n]) for r, n in ((0.071, 8), (1e-9, 1))),  # as it was typed
        *(("rows", r, (ONE, 4, w), [n]) for r, w, n in ((100, 1, 100), (100, 3, 102), (1, 4, 4))),
        ("rows", 400, (TWO, 4, 1), [300, 100]),
        ("rows", 400, (TWO, 4, 7), [301, 105]),
        ("rows", 401, (TWO, 4, 1), [301, 101]),
        ("rows", 4000, (TWO, 4, 1), [3000, 1000]),
        *(("bytes", b, (ONE, 4, w), [n]) for b, w, n in ((6400, 1, 100), (6400, 3, 99), (1, 3, 3))),
        ("bytes", 6463, (ONE, 4, 1), [100]),
        ("bytes", 6400, (ONE, 8, 1), [50]),
        # 3/4 of 40,960 bytes at 128, 1/4 at 20: 240 and 512 slots
        ("bytes", 40_960, (TWO, 4, 1), [240, 512]),
        ("bytes", 40_960, (TWO, 4, 100), [200, 500]),
        # a quarter of 200,000 is 50,000, but the narrow group's 1,000 rows need 20,000; the wide
        # one gets the 180,000 that are left: 1406 slots
        ("bytes", 200_000, (TWO, 4, 1), [1406, 1000]),
        ("bytes", 3000 * 128 + 1000 * 20, (TWO, 4, 1), [3000, 1000]),
    ],
)
def test_slots_of_what_is_given(key, value, of, expected, caplog) -> None:
    given_ = {"rows": None, "ratio": None, "bytes": None} | {key: value}
    assert cache_slots(*given_.values(), *of) == expected
    assert "capped" not in caplog.text


@pytest.mark.parametrize(
    ("rows", "budget"), [(4001, None), (1 << 50, None), (None, 404_001), (None, 1 << 60)]
)
def test_larger_than_the_tables_is_capped_and_said(rows, budget, caplog) -> None:
    with caplog.at_level(logging.WARNING, "distcache"):
        assert cache_slots(rows, None, budget, TWO, 4, 1) == [3000, 1000]
    assert "cache larger than the tables: capped" in caplog.text
    assert str(rows or budget) in caplog.text


def test_cap_is_whole_blocks_of_ranks() -> None:
    assert cache_slots(9999, None, None, [(10, 4, 0), (1, 8, 0)], 4, 4) == [12, 4]


@pytest.mark.parametrize(
    ("given_values", "words"),
    [
        ((5, 0.1, None), ["cache.rows=5 and cache.ratio=0.1", "at most one"]),
        ((5, None, 7), ["cache.rows=5 and cache.bytes=7"]),
        ((5, 0.1, 7), ["cache.rows=5 and cache.ratio=0.1 and cache.bytes=7"]),
        ((None, 1.5, None), ["cache.ratio=1.5", "(0, 1]", "0.015"]),
        ((None, 0.0, None), ["cache.ratio=0.0"]),
        ((None, float("nan"), None), ["cache.ratio=nan"]),
        ((0, None, None), ["cache.rows=0", "at least 1"]),
        ((None, None, -4), ["cache.bytes=-4"]),
    ],
)
def test_wrong_values(given_values, words) -> None:
    with pytest.raises(ConfigError) as caught:
        cache_slots(*given_values, TWO, 4, 2)
    for word in words:
        assert word in str(caught.value)


GROUPS = st.lists(
    st.tuples(st.integers(1, 5000), st.sampled_from([4, 16, 128]), st.sampled_from([0, 1, 16])),
    min_size=1,
    max_size=4,
)


@given(GROUPS, st.integers(1, 9), st.sampled_from(["rows", "ratio", "bytes"]), st.data())
def test_properties(groups, world_size, key, data) -> None:
    """Multiples of W, between W and all rows; enough for what was asked; bytes are a bound."""
    strategies = {
        "rows": st.integers(1, 20_000),
        "ratio": st.floats(1e-6, 1.0),
        "bytes": st.integers(1, 1 << 23),
    }
    value = data.draw(strategies[key])
    args = {"rows": None, "ratio": None, "bytes": None} | {key: value}
    slots = cache_slots(**args, groups=groups, itemsize=4, world_size=world_size)
    full = [-(-v // world_size) * world_size for v, _, _ in groups]
    assert len(slots) == len(groups)
    for count, most in zip(slots, full, strict=True):
        assert count % world_size == 0 and world_size <= count <= most
    total = sum(v for v, _, _ in groups)
    if key == "rows":
        assert sum(slots) >= min(value, total)
        assert sum(slots) < value + len(groups) * (world_size + 1)
    if key == "ratio":
        pairs = zip(slots, groups, strict=True)
        assert all(count >= value * v * (1 - 1e-12) for count, (v, _, _) in pairs)
    if key == "bytes":
        used = cache_bytes(slots, groups, 4)
        # one more round of W slots of a group, or a byte lost per division, is all that is left
        slack = [(dim + state) * 4 * world_size for _, dim, state in groups]
        assert used <= max(value, 0) + sum(
            s for s, c in zip(slack, slots, strict=True) if c == world_size
        )
        if slots != full:
            assert used > value - sum(s + 1 for s in slack)
