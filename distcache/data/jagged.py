"""The fields of a `KeyedJaggedTensor`: read once, and refused where they contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distcache.errors import DataError

_SHOWN = 8
"""Most values of a field that an error shows."""


def read_lengths(features: Any) -> tuple[Tensor, list[int]]:
    """Return the lengths of all bags of a `KeyedJaggedTensor` and the samples of each key.

    Lengths are int64 `[sum of samples]` on the CPU, key by key. Raises DataError that names the
    field where `offsets`, `stride`, `stride_per_key_per_rank`, `stride_per_key`, `length_per_key`
    or `offset_per_key` contradict the lengths or each other: TorchRec's modules read one or the
    other of them.
    """
    given, offsets = features.lengths_or_none(), features.offsets_or_none()
    ends = torch.zeros(0, dtype=torch.int64) if offsets is None else _on_cpu(offsets)
    lengths = ends.diff() if given is None else _on_cpu(given)
    if given is not None and len(ends):
        expected = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        if not torch.equal(ends, expected):
            raise _contradiction("offsets", ends, f"lengths={_shown(lengths)}", expected)
    samples = _samples(features, len(lengths))
    sums: list[int] = []
    for name, known in (
        ("length_per_key", features.length_per_key_or_none()),
        ("offset_per_key", features.offset_per_key_or_none()),
    ):
        if known is None:
            continue
        sums = sums or [int(part.sum()) for part in lengths.split(samples)]
        expected = torch.tensor(sums, dtype=torch.int64)
        if name == "offset_per_key":
            expected = torch.nn.functional.pad(expected.cumsum(0), (1, 0))
        if list(known) != expected.tolist():
            raise _contradiction(name, known, f"lengths={_shown(lengths)}", expected)
    return lengths, samples


def _samples(features: Any, bags: int) -> list[int]:
    """Return the samples of each key, whose sum is `bags`; DataError names the wrong field."""
    count = len(features.keys())
    if features.variable_stride_per_key():
        field = "stride_per_key_per_rank"
        by_rank = features.stride_per_key_per_rank()
        rows = [row if isinstance(row, list) else [None] for row in by_rank]
        is_whole = all(isinstance(number, int) and number >= 0 for row in rows for number in row)
        if len(rows) != count or not is_whole:
            raise DataError(
                f"{field}={_shown(by_rank)} of a KeyedJaggedTensor with {count} keys: give a list "
                f"for each key, of its samples from each rank (whole numbers of at least 0), such "
                f"as {[[bags // max(count, 1)]] * min(count, 2)}"
            )
        samples = [sum(row) for row in rows]
    else:
        field = "stride"
        by_rank = features.stride()
        samples = [bags // count] * count if count else []
    if sum(samples) != bags:
        remedy = "give each key the same number of samples"
        if field != "stride":
            remedy = f"{field}={_shown(by_rank)} has {sum(samples)} samples: give {bags}"
        raise DataError(
            f"a KeyedJaggedTensor with {count} keys and {bags} lengths: {remedy}, or say by "
            "stride_per_key_per_rank how many each has"
        )
    if field == "stride" and count and by_rank != samples[0]:
        raise _contradiction("stride", by_rank, f"{count} keys and {bags} lengths", samples[0])
    if count and list(features.stride_per_key()) != samples:
        stride_per_key = features.stride_per_key()
        raise _contradiction(
            "stride_per_key", stride_per_key, f"{count} keys and {bags} lengths", samples
        )
    return samples


def _on_cpu(values: Tensor) -> Tensor:
    """Return `values` as int64 `[n]` on the CPU."""
    return values.detach().cpu().to(torch.int64).reshape(-1)


def _shown(values: Any) -> str:
    """Return the first values of a field for a message."""
    if isinstance(values, Tensor):
        values = values[: _SHOWN + 1].tolist()
    if isinstance(values, Sequence) and not isinstance(values, str) and len(values) > _SHOWN:
        return f"[{', '.join(map(str, values[:_SHOWN]))}, ...]"
    return repr(values)


def _contradiction(field: str, value: Any, others: str, expected: Any) -> DataError:
    """Return the error for a field with a `value` that does not fit the `others`."""
    return DataError(
        f"{field}={_shown(value)} of a KeyedJaggedTensor contradicts its {others}, of which "
        f"{field} is {_shown(expected)}: give that, or leave out {field}"
    )
