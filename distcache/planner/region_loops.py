"""The loops of sharded and mixed placements, as plain Python that Numba compiles; see `loops`.

Their NumPy twins are in `arrays`. All that a loop needs stands in this file.
"""

from __future__ import annotations

import numpy as np


def find_sorted(
    rows: np.ndarray, known: np.ndarray, starts: np.ndarray, shift: int, found: np.ndarray
) -> int:
    """Where each of `rows` (int64 `[n]`) is in `known` (int64, ascending), to `found` (int32
    `[n]`), -1 where it is not; returns how many are there.

    `starts` int32 `[B + 1]`: how many of `known` are below b << `shift`, for b = 0 to B.
    """
    count = 0
    for i in range(len(rows)):
        row, place = rows[i], -1
        bucket = row >> shift
        if bucket >= 0 and bucket < len(starts) - 1:
            low, high = np.int64(starts[bucket]), np.int64(starts[bucket + 1])
            if low < high:
                guess = low + row - known[low]  # the right one in a run of neighbours
                if guess >= low and guess < high and known[guess] == row:
                    place = guess
                else:
                    while low < high:
                        middle = (low + high) >> 1
                        if known[middle] < row:
                            low = middle + 1
                        else:
                            high = middle
                    if low < starts[bucket + 1] and known[low] == row:
                        place = low
        found[i] = place
        if place >= 0:
            count += 1
    return count


def divide(
    values: np.ndarray,
    bound: int,
    index: np.ndarray,
    items: np.ndarray,
    ends: np.ndarray,
    above: np.ndarray,
    others: np.ndarray,
    counts: np.ndarray,
) -> int:
    """Those of n items whose value is above `bound`, and the others, in order.

    Item i is `items[index[i]]` with `values[index[i]]` (int32), or, with no `items`, i itself with
    `values[i]`, and `index` is not read. They come in pieces, of which p ends before `ends[p]`
    (int64). Writes `above` and `others` (int64 `[n]`), and to `counts` (int64) how many of each
    piece are above; returns how many of all are.
    """
    given = len(items) > 0
    high = low = i = 0
    for piece in range(len(ends)):
        before = high
        while i < ends[piece]:
            place = np.int64(index[i]) if given else i
            item = np.int64(items[place]) if given else i
            if values[place] > bound:
                above[high] = item
                high += 1
            else:
                others[low] = item
                low += 1
            i += 1
        counts[piece] = high - before
    return high
