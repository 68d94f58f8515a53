"""Text in whole lines, orders drawn without an index, ids checked, batches loaded ahead."""

from __future__ import annotations

import gzip
import itertools
import os
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from distcache.data import samplers
from distcache.data.batch import (
    _MOST,
    Batch,
    JaggedIds,
    Prefetch,
    check_ids,
    is_one_each,
    one_each,
    unloaded,
)
from distcache.data.criteo_folder import bags
from distcache.data.files import (
    digest_of,
    find_files,
    inspect,
    read_chunks,
    read_text,
    whole_lines,
)
from distcache.data.parquet import hashed, hexadecimal
from distcache.data.samplers import (
    BatchSpans,
    BlockOrder,
    RowGroupOrder,
    SampleOrder,
    SampleSpan,
    Subset,
    both,
    hash_counters,
    key_of,
)
from distcache.errors import DataError


@given(
    st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=9),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 20),
)
@examples(150)
def test_ranges_cover_every_line_once(tmp_path_factory, lines, end, block, size):
    text = b"\n".join(lines) + (b"\n" if end else b"")
    if not text:
        return
    path = tmp_path_factory.mktemp("ranges") / "a.txt"
    path.write_bytes(text)
    file, cuts = inspect(path), [*range(0, len(text), size), len(text)]
    parts = [b"".join(read_chunks(file, block, a, b)) for a, b in pairwise(cuts)]
    blocks = list(whole_lines(read_chunks(file, block), 100))
    for pieces in (parts, blocks):
        assert b"".join(pieces) == text
        assert all(piece.endswith(b"\n") for piece in [p for p in pieces if p][:-1])


@pytest.mark.parametrize("block", [1 << 16, 8 << 20])
@pytest.mark.parametrize(("last", "after"), [(b"", []), (b"\n", [b""]), (b"\nb\n", [b"b", b""])])
def test_of_a_long_line_only_a_little_more_than_allowed_is_kept(tmp_path, block, last, after):
    path, longest = tmp_path / "long.txt", 1 << 20
    path.write_bytes(b"a\n" + b"x" * 10_000_000 + last)
    blocks = list(read_text(inspect(path), block, longest))
    assert max(map(len, blocks)) <= longest + 2 * block
    first, long_line, *rest = b"".join(blocks).split(b"\n")
    assert first == b"a" and rest == after and len(long_line) > longest


def test_what_is_no_file_with_something_in_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    (tmp_path / "empty").touch()
    for name, message in (
        ("nowhere", "there is no such file and nothing matches"),
        ("*.txt", "there is no such file and nothing matches"),
        ("", "is a folder, not a file; for all of its files give a glob"),
        ("pipe", "is not a file but a pipe or device"),
        ("empty", "empty is empty"),
    ):
        with pytest.raises(DataError, match=f"data.path.*{message}"):
            find_files("data.path", str(tmp_path / name), "text")
    with pytest.raises(DataError, match="names no file"):
        find_files("data.path", [], "text")
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"empty\.gz is empty: there is nothing in the gzip data"):
        list(read_text(inspect(tmp_path / "empty.gz"), 10, 10))


def test_the_matches_of_a_glob_are_in_natural_order(tmp_path):
    for name in ("day_10", "day_2", "day_1"):
        (tmp_path / name).write_text("x")
    found = find_files("data.path", [str(tmp_path / "day_*"), tmp_path / "day_2"], "days")
    assert [file.path.name for file in found] == ["day_1", "day_2", "day_10", "day_2"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_vanishes_shrinks_or_changes(tmp_path, packed):
    path = tmp_path / "a.txt"
    body = os.urandom(300_000).hex().encode()
    body = body[:5000] + b"\n" + body[5001:]  # so that there is a first block
    for change, message, begun in (
        (path.unlink, "cannot be read any more", False),
        (lambda: os.truncate(path, 100), "shrank while it was read", False),
        (lambda: os.truncate(path, 200_000), "shrank while it was read", True),
        (lambda: os.utime(path, ns=(1, 1)), "was written to while it was read", True),
    ):
        path.write_bytes(gzip.compress(body) if packed else body)
        blocks = read_text(inspect(path), 1000, 100)
        if begun:
            next(blocks)
        change()
        with pytest.raises(DataError, match=rf"a\.txt {message}"):
            list(blocks)


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    """Pools of four blocks."""
    monkeypatch.setattr(samplers, "POOL_BLOCKS", 4)


def test_numbers_that_must_never_change():
    """Runs and preprocessed folders of other versions rest on them."""
    assert (key_of(0), key_of(3, 1)) == (16294208416658607535, 11810286367831575873)
    counters = hash_counters(np.arange(2, dtype=np.uint64), 7)
    assert counters.tolist() == [1346066267577507604, 7191089600892374487]
    words = [b"", b"abc", "\u00e9".encode()]
    assert hashed(words, 1 << 40).tolist() == [499686352612, 222668569560, 1028841741003]
    assert hexadecimal([b"", b"ff", b"123456789abcdef01"], 1000).tolist() == [0, 255, 121]
    assert bags(np.array([0, 5]), 2, 1000, 4).tolist() == [[0, 797, 258, 761], [5, 673, 566, 66]]
    assert bags(np.array([5]), 1, 1000, 4).tolist() == [[5, 419, 540, 655]]
    digest = digest_of(np.arange(3), np.zeros((2, 2), np.float32))
    assert digest == "e3c7f331537fe5fb4347ea5333f3290713afaf02165fb9df51fbb629baa9fa03"
    assert SampleOrder(1000, 5).positions(2, 0, 5).tolist() == [520, 706, 713, 96, 574]
    order = BlockOrder(1001, 5, 16)
    assert order.positions(3, 60, 68).tolist() == [486, 649, 343, 345, 151, 800, 155, 32]
    groups, samples = places(RowGroupOrder([10, 20, 5, 30, 7], 5, 25), 1, 0, 8)
    assert groups.tolist() == [4, 3, 3, 3, 3, 3, 3, 3]
    assert samples.tolist() == [1, 3, 14, 2, 15, 4, 27, 29]


def places(order: RowGroupOrder, epoch: int, start: int, stop: int) -> tuple:
    """Blocks, and samples inside them, at positions of an epoch."""
    samples = order.positions(epoch, start, stop)
    blocks = np.searchsorted(order.edges, samples, side="right") - 1
    return blocks, samples - order.edges[blocks]


@given(st.integers(1, 3000), st.integers(0, 40), st.integers(0, 2**63), st.integers(0, 5))
@examples(150)
def test_every_sample_once_in_any_slices(samples, block, seed, epoch):
    samplers.POOL_BLOCKS = 4  # the fixture is not undone between examples, but hypothesis asks
    order = BlockOrder(samples, seed, block) if block else SampleOrder(samples, seed)
    whole = order.positions(epoch, 0, samples)
    assert whole.dtype == np.int64 and sorted(whole.tolist()) == list(range(samples))
    cuts = sorted({0, samples, samples // 3, samples // 2, min(7, samples)})
    parts = [order.positions(epoch, a, b).tolist() for a, b in pairwise(cuts)]
    assert [x for part in parts for x in part] == whole.tolist()
    assert order.positions(epoch, samples, samples).tolist() == []


@pytest.mark.parametrize("block", [0, 16])
def test_epochs_and_seeds_differ_and_look_random(block):
    samples, orders = 20_000, []
    for seed in (0, 1):
        order = BlockOrder(samples, seed, block) if block else SampleOrder(samples, seed)
        orders += [order.positions(epoch, 0, samples) for epoch in (0, 1)]
    small = {tuple(SampleOrder(5, seed).positions(0, 0, 5)) for seed in range(2000)}
    assert len(small) > 100  # of 120
    for i, one in enumerate(orders):
        # Few samples stay in place (1 is expected), and there is no correlation with the position.
        assert np.sum(one == np.arange(samples)) < 10
        assert abs(np.corrcoef(one, np.arange(samples))[0, 1]) < (0.1 if block else 0.03)
        assert block or abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.03
        assert all(np.sum(one == other) < 10 for other in orders[:i])


def test_a_pool_is_a_few_blocks_from_anywhere_in_no_order():
    pool = BlockOrder(5000, 1, 16).positions(0, 0, 64)
    shift = key_of(1, 2, 0) % 5000  # blocks are counted from another sample in each epoch
    assert len(np.unique((pool - shift) % 5000 // 16)) == 4
    assert not np.array_equal(np.sort(pool[:16]), np.arange(pool.min(), pool.min() + 16))
    tracemalloc.start()
    for large in (SampleOrder(2_000_000_000, 1), BlockOrder(2_000_000_000, 1, 4096)):
        large.positions(0, 0, 64)
    assert tracemalloc.get_traced_memory()[1] < 100_000  # no index of them
    tracemalloc.stop()
    alone = BlockOrder(64, 5, 16).positions(2, 0, 64)
    assert np.array_equal(alone, SampleOrder(64, 5).positions(2, 0, 64))


def test_spans_cover_epochs_with_a_ragged_last_batch():
    found = [BatchSpans(10, 4).locate(step) for step in range(4)]
    spans = [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 4)]
    assert [(s.epoch, s.start, s.stop) for s in found] == spans
    assert [s.size for s in found] == [4, 4, 2, 4] and BatchSpans(10, 4).per_epoch == 3
    far = BatchSpans(None, 4).locate(10**9)
    assert (far.epoch, far.start, far.stop) == (0, 4 * 10**9, 4 * 10**9 + 4)
    assert SampleOrder(10, 1, shuffle=False).positions(4, 3, 9).tolist() == list(range(3, 9))
    assert SampleOrder(None, 1).positions(0, 2**40, 2**40 + 2).tolist() == [2**40, 2**40 + 1]


def test_refusals():
    for samples, step in ((10, -1), (0, 0)):
        with pytest.raises(DataError, match=f"no batch {step}.* {samples} samples"):
            BatchSpans(samples, 2).locate(step)


def touched(spans: list[tuple[int, int]], samples: int) -> np.ndarray:
    """How often each sample was hinted."""
    counts = np.zeros(samples, dtype=np.int64)
    for start, stop in spans:
        assert 0 <= start < stop <= samples
        counts[start:stop] += 1
    return counts


@pytest.mark.parametrize("samples", [1, 15, 16, 64, 65, 1000, 1024, 1039])
@pytest.mark.parametrize("batch", [1, 7, 48, 300])
def test_all_that_a_batch_touches_was_hinted_once(samples, batch):
    order, spans = BlockOrder(samples, 5, 16), []
    order.hint = lambda *span: spans.append(span)
    for epoch in range(3):
        spans.clear()
        for start in range(0, samples, batch):
            stop, before = min(start + batch, samples), len(spans)
            read = order.slice(SampleSpan(epoch, start, stop), 0, stop - start)
            missed = touched(spans, samples)[read] == 0
            assert missed.sum() <= samples % 16  # less than a block of them is in no block
            new = sum(stop - start for start, stop in spans[before:])
            assert start == 0 or new <= stop - start + 16
        counts = touched(spans, samples)
        assert counts.max() == 1 and (counts == 0).sum() == (samples % 16 if samples > 64 else 0)


def test_hints_of_an_epoch_taken_up_in_its_middle():
    order, spans = BlockOrder(1000, 5, 16), []
    order.hint = lambda *span: spans.append(span)
    for epoch, start in ((2, 500), (2, 510), (0, 200), (0, 900), (0, 100)):
        read = order.slice(SampleSpan(epoch, start, start + 10), 0, 10)
        assert touched(spans, 1000)[read].all()
    assert sum(stop - start for start, stop in spans) < 5 * 3 * 64


def words(mask: np.ndarray) -> np.ndarray:
    """The mask as 64-bit words."""
    padded = np.append(mask, np.zeros(-len(mask) % 64, bool))
    return np.packbits(padded, bitorder="little").view(np.uint64)


@pytest.mark.parametrize("samples", [0, 1, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.97, 1.0])
def test_samples_by_their_place_among_the_chosen(samples, share):
    rng = np.random.default_rng(samples)
    mask = rng.random(samples) < share
    for subset, own in zip(both(words(mask), samples), (mask, ~mask), strict=True):
        index = np.flatnonzero(own)
        places = rng.permutation(len(index))
        found = subset.at(places)
        assert subset.count == len(index) and found.dtype == np.int64
        assert np.array_equal(found, index[places])
        if samples:
            edges = np.arange(samples + 1)
            assert np.array_equal(subset.before(edges), np.searchsorted(index, edges))
    assert Subset(words(np.ones(64_000, bool))).nbytes == 1000 * 12  # bits, and not an index


SIZES = [10, 3, 25, 1, 10, 10, 8]


@pytest.mark.parametrize("window", [0, 1, 25, 1000])
def test_row_groups_in_windows_have_every_sample_once(window):
    order = RowGroupOrder(SIZES, 7, window)
    for epoch in range(3):
        found = []
        for start in range(0, 67, 9):
            blocks, samples = places(order, epoch, start, min(start + 9, 67))
            found += list(zip(blocks.tolist(), samples.tolist(), strict=True))
        every = [(block, at) for block, size in enumerate(SIZES) for at in range(size)]
        assert sorted(found) == every and (found == every) == (window == 0)
    assert not 0 < window < 67 or order.widest <= window + 25


def test_windows_mix_their_row_groups_and_no_others():
    order, firsts = RowGroupOrder([10] * 30, 3, 40), set()
    for epoch in range(4):
        for window in range(7):
            blocks, _ = places(order, epoch, 40 * window, 40 * window + 40)
            assert len(set(blocks.tolist())) == 4
            firsts.add(tuple(sorted(set(blocks.tolist()))))
    assert len(firsts) > 20  # epochs differ
    samples = RowGroupOrder([10, 3, 25], 5, 38).positions(2, 4, 30)
    expected = SampleOrder(38, key_of(5, 0)).positions(2, 4, 30)  # one window is the whole order
    assert samples.tolist() == expected.tolist()


ROWS, NAMES = [10, 5], ["t_item", "t_user"]


def jagged(values=(1, 9, 0, 4, 2), offsets=(0, 2, 2, 3, 5), weights=None, dtype=torch.int64):
    """Two features, two samples: bags [1, 9], [], [0], [4, 2]."""
    return JaggedIds(
        ("item", "user"), torch.tensor(values, dtype=dtype), torch.tensor(offsets), weights
    )


def test_good_ids_pass_through_untouched():
    ids = jagged(weights=torch.ones(5))
    assert check_ids(ids, ROWS, NAMES) is ids
    assert check_ids(ids, ROWS, NAMES, on_bad_id="hash") is ids

    found = check_ids(jagged(dtype=torch.int32), ROWS, NAMES)
    assert found.values.dtype == torch.int64 and found.values.tolist() == [1, 9, 0, 4, 2]
    empty = JaggedIds(("item", "user"), torch.empty(0, dtype=torch.int64), torch.tensor([0]))
    assert check_ids(empty, ROWS, NAMES) is empty
    no_ids = jagged(values=(), offsets=(0, 0, 0, 0, 0))
    assert check_ids(no_ids, ROWS, NAMES) is no_ids


@pytest.mark.parametrize(
    ("values", "feature", "table", "bad", "rows", "sample"),
    [
        ((1, 10, 0, 4, 2), "item", "t_item", 10, 10, 100),
        ((-1, 9, 0, 4, 2), "item", "t_item", -1, 10, 100),
        ((1, 9, 0, 5, 2), "user", "t_user", 5, 5, 101),
        ((1, 9, 7, 4, -(2**63)), "user", "t_user", 7, 5, 100),
        ((1, 9, 0, 4, -(2**63)), "user", "t_user", -(2**63), 5, 101),
        ((1, 9, 0, 2**63 - 1, 0), "user", "t_user", 2**63 - 1, 5, 101),
    ],
)
def test_a_bad_id_is_named_with_the_way_out(values, feature, table, bad, rows, sample):
    said = f"'{feature}', sample {sample} .*id {bad} is .*'{table}', which has {rows} rows .*=hash"
    with pytest.raises(DataError, match=said):
        check_ids(jagged(values), ROWS, NAMES, first_sample=100)


def test_hash_takes_bad_ids_modulo_the_rows():
    given = jagged((-1, 23, 5, 4, -7))
    found = check_ids(given, ROWS, NAMES, on_bad_id="hash")
    assert found.values.tolist() == [9, 3, 0, 4, 3]
    assert given.values.tolist() == [-1, 23, 5, 4, -7]
    assert found.offsets is given.offsets and found.features == given.features


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (jagged(dtype=torch.float32), "float32"),
        (jagged(dtype=torch.bool), "bool"),
        (jagged(offsets=(0, 2, 1, 3, 5)), "fall from 2 to 1 at feature 'item', sample 1"),
        (jagged(offsets=(0, 2, 3, 6, 5)), "fall from 6 to 5 at feature 'user', sample 1"),
        (jagged(offsets=(0, 2, 2, 3, 4)), "number of ids, 5"),
        (jagged(offsets=(1, 2, 2, 3, 5)), "from 1 to 5"),
        (jagged(offsets=(0, 2, 3, 5)), "4 offsets do not fit 2 features"),
        (jagged(offsets=(0.0, 2.0, 2.0, 3.0, 5.0)), "offsets are torch.float32"),
        (jagged(weights=torch.ones(4)), r"shape \[4\] for 5 ids"),
        (jagged(weights=torch.ones(5, dtype=torch.int64)), "weights are torch.int64"),
    ],
)
@pytest.mark.parametrize("on_bad_id", ["error", "hash"])
def test_malformed_bags_are_named(ids, message, on_bad_id):
    with pytest.raises(DataError, match=message):
        check_ids(ids, ROWS, NAMES, on_bad_id=on_bad_id)


def deferred(index: int) -> Batch:
    ids = JaggedIds(("a",), torch.arange(3), torch.arange(4))
    rest = torch.full((3, 2), float(index)), torch.ones(3)
    return Batch(unloaded(3, 2), ids, unloaded(3), 3, index, 0, 0, load=lambda: rest)


def test_prefetch_keeps_the_order_and_runs_a_bounded_way_ahead():
    drawn: list[int] = []

    def source() -> Iterator[Batch]:
        for index in range(20):
            drawn.append(index)
            yield deferred(index)

    with Prefetch(source(), depth=2) as ahead:
        for count, batch in enumerate(ahead):
            assert batch.index == count and batch.dense[0, 0].item() == count
            assert len(drawn) <= count + 1 + 2 + 2  # taken, in the queue, in the thread's hand
            assert ahead.load_s >= 0
    assert count == 19


def test_prefetch_raises_in_order_what_went_wrong():
    def source() -> Iterator[Batch]:
        yield deferred(0)
        raise DataError("a.txt:3: broken")

    with Prefetch(source()) as ahead:
        batches = iter(ahead)
        assert next(batches).index == 0
        with pytest.raises(DataError, match=r"a\.txt:3"):
            next(batches)


def test_leaving_early_stops_the_thread():
    with Prefetch(map(deferred, itertools.count())) as ahead:
        assert next(iter(ahead)).index == 0
    assert not any(thread.name.startswith("distcache-load") for thread in threading.enumerate())


def test_offsets_of_one_id_each_are_known_by_who_they_are_or_looked_at():
    """Each of these is looked at but the first; batches of other shapes push it out."""
    known, equal = one_each(6), torch.arange(7)
    assert one_each(6) is known and is_one_each(known, 6, look=False)
    assert is_one_each(equal, 6) and not is_one_each(equal, 6, look=False)
    assert is_one_each(equal.int(), 6) and is_one_each(torch.arange(14)[::2] // 2, 6)
    others = torch.tensor([0, 2, 2, 3]), torch.arange(4).float(), torch.arange(4).reshape(2, 2)
    assert not any(is_one_each(offsets, 3) for offsets in (*others, torch.tensor(3), equal))
    lengths = torch.tensor([2, 0, 1])  # as many ids as bags
    jagged = JaggedIds.of_lengths(("f",), torch.arange(3), lengths, None)
    assert jagged.offsets.tolist() == [0, 2, 2, 3]
    ones = JaggedIds.of_lengths(("f",), torch.arange(3), torch.ones(3, dtype=torch.int64), None)
    assert ones.offsets is one_each(3)
    for count in range(100, 100 + _MOST):
        one_each(count)
    assert one_each(6) is not known and is_one_each(known, 6)
    assert one_each(0).tolist() == [0] and is_one_each(torch.zeros(1, dtype=torch.int64), 0)
