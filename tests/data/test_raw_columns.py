"""The fast parser says what the exact one says, or nothing."""

from __future__ import annotations

import numpy as np
import pytest
from criteo_lines import ROWS, make_lines
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from distcache.data.criteo_text import FIELDS, dense_of, parse_block
from distcache.data.raw.parts import parse_columns

TABLE_ROWS = np.array(ROWS)
LARGE_ROWS = np.where(np.arange(26) == 3, 2**33, TABLE_ROWS)


def same_where_understood(block: bytes) -> bool:
    """Compare both parsers in every form of ids; whether the fast one understood the block."""
    understood = set()
    for rows in (TABLE_ROWS, LARGE_ROWS, None):
        fast = parse_columns(block, rows)
        understood.add(fast is not None)
        if fast is None:
            continue
        bad: list[int] = []
        exact, _ = parse_block(block, rows, lambda line, error, bad=bad: bad.append(line))
        assert not bad, "the fast parser took a malformed line"
        assert np.array_equal(fast.labels, exact.labels)
        assert np.array_equal(fast.integers, dense_of(exact.integers))
        assert np.array_equal(fast.ids, exact.ids)
        assert (rows is None) == (fast.missing is not None)
        assert fast.missing is None or np.array_equal(fast.missing, exact.missing)
    assert len(understood) == 1
    return understood.pop()


@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_ordinary_lines_are_understood(missing, end):
    block = end.join(make_lines(300, missing=missing))
    assert same_where_understood(block) and same_where_understood(block + end)


def test_the_real_sample(shared_data):
    assert same_where_understood((shared_data / "criteo_kaggle_sample.txt").read_bytes())


def changed(index: int, value: bytes) -> bytes:
    """Three lines, a field of the second one replaced."""
    lines = make_lines(3, missing=0.1)
    fields = lines[1].split(b"\t")
    fields[index] = value
    return b"\n".join([lines[0], b"\t".join(fields), lines[2]]) + b"\n"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (5, value)
            for value in (b"-0", b"-12", b"0012", b"999999999999999999", b"-" + b"9" * 18)
        ),
        *((5, b"0" * zeros + b"1") for zeros in (17, 18, 30)),
        *((20, value) for value in (b"a", b"ABCDEF01", b"0000000001", b"123456789abcdef0", b"0")),
    ],
)
def test_odd_but_good_fields(field, value):
    assert same_where_understood(changed(field, value))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((0, value) for value in (b"", b"2", b"01", b"00", b"-1", b"a", b"1\r")),
        *((5, value) for value in (b"1" * 19, b"+1", b" 1", b"0x1", b"1e3", b"--1", b"-", b"1.0")),
        *((5, value) for value in (b"a", b"1\r", b'"1"', b"\x00", b"\xff", b"9" * 30, b"1-")),
        *((20, value) for value in (b"-1", b"x", b"0x1f", b" a", b"a\rb", b"\r", b"\x00", b"\xc3")),
        *((39, value) for value in (b"a\tb", b"\t", b"a\r\r", b"-")),
    ],
)
def test_malformed_fields_are_not_understood(field, value):
    assert not same_where_understood(changed(field, value))


def test_long_ids_take_the_exact_way():
    for digits in (17, 40):
        block = changed(20, b"1" * digits)
        assert parse_columns(block, TABLE_ROWS) is None
        exact, _ = parse_block(block, TABLE_ROWS, lambda line, error: pytest.fail(str(error)))
        assert exact.ids[1, 6] == int("1" * digits, 16) % ROWS[6]
        bad: list[str] = []
        parse_block(block, None, lambda line, error, bad=bad: bad.append(f"{line}: {error}"))
        assert len(bad) == 1 and bad[0].startswith("1: field 21") and "16 digits" in bad[0]


ODD = b"0123456789abcdefABCDEFxg+-_ \t\n\r\x00\xff\"'"


@given(
    st.lists(
        st.tuples(
            st.integers(0, FIELDS - 1),
            st.lists(st.sampled_from(ODD), max_size=20).map(bytes),
        ),
        max_size=4,
    )
)
@examples(200)
def test_fast_equals_exact_on_changed_fields(changes):
    lines = [line.split(b"\t") for line in make_lines(4)]
    for number, (field, value) in enumerate(changes):
        lines[number][field] = value
    same_where_understood(b"\n".join(b"\t".join(fields) for fields in lines) + b"\n")
