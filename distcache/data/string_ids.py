"""Strings as ids: a stable hash, or the value of a hexadecimal number.

`hash`: the 8-byte BLAKE2b digest (RFC 7693, no key, digest size 8) of the string's UTF-8 bytes,
read as a little-endian unsigned number, modulo the table's rows. In Python:
`int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % rows`.

`hex`: the hexadecimal value modulo the table's rows, an empty string row 0: the rule of Criteo's
tab-separated files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

STRING_IDS = ("hash", "hex")
"""Ways to make an id of a string."""
_HEX = re.compile(rb"[0-9a-fA-F]*")


def hashed(texts: Sequence[bytes], rows: int) -> np.ndarray:
    """Ids int64 `[n]` in [0, rows) of strings by their BLAKE2b-64 digest."""
    digests = b"".join([blake2b(text, digest_size=8).digest() for text in texts])
    return (np.frombuffer(digests, dtype="<u8") % np.uint64(rows)).astype(np.int64)


def hexadecimal(texts: Sequence[bytes], rows: int) -> np.ndarray:
    """Ids int64 `[n]` in [0, rows) of hexadecimal strings; -1 where a string is none."""
    matches = _HEX.fullmatch
    return np.array(
        [int(text or b"0", 16) % rows if matches(text) else -1 for text in texts], dtype=np.int64
    )
