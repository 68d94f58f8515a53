"""What every batch source must hold, used by the tests of each."""

from __future__ import annotations

import numpy as np
import torch

from distcache.data.batch import Batch, BatchSource


def joined(parts: list[Batch]) -> dict[str, torch.Tensor]:
    """The slices of one step put together again: dense, labels, bag lengths, ids, weights."""
    features = len(parts[0].ids.features)
    bags: list[list[torch.Tensor]] = [[] for _ in range(features)]
    weights: list[list[torch.Tensor]] = [[] for _ in range(features)]
    lengths = []
    for part in parts:
        b, offsets = part.ids.batch_size, part.ids.offsets
        lengths.append(offsets.diff().reshape(features, b))
        for f in range(features):
            where = slice(int(offsets[f * b]), int(offsets[(f + 1) * b]))
            bags[f].append(part.ids.values[where])
            if part.ids.weights is not None:
                weights[f].append(part.ids.weights[where])
    return {
        "dense": torch.cat([part.dense for part in parts]),
        "labels": torch.cat([part.labels for part in parts]),
        "lengths": torch.cat(lengths, dim=1),
        "values": torch.cat([torch.cat(bag) for bag in bags]),
        "weights": torch.cat([torch.cat(w) for w in weights]) if weights[0] else torch.empty(0),
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two joined batches are the same bits."""
    return all(torch.equal(one[key], other[key]) for key in one)


def check_slices(source: BatchSource, index: int, kind: str, world_sizes=(1, 2, 3, 4, 9)) -> None:
    """Slices are well formed and concatenate to the same global batch at any world size."""
    take = source.train_batch if kind == "train" else source.eval_batch
    whole = take(index, 0, 1)
    for world_size in world_sizes:
        parts = [take(index, rank, world_size) for rank in range(world_size)]
        expected_first = 0
        for part in parts:
            b = part.ids.batch_size
            assert part.dense.shape == (b, source.dense_features)
            assert part.labels.shape == (b,)
            assert part.ids.features == source.features
            assert part.ids.values.dtype == part.ids.offsets.dtype == torch.int64
            assert int(part.ids.offsets[-1]) == len(part.ids.values)
            assert len(part.ids.offsets) == len(source.features) * b + 1
            assert part.first_sample == expected_first
            assert (part.global_size, part.index, part.epoch, part.kind) == (
                whole.global_size,
                index,
                whole.epoch,
                kind,
            )
            expected_first += b
        assert expected_first == whole.global_size
        assert equal(joined(parts), joined([whole]))
    rows = np.repeat(
        source.table_rows, whole.ids.offsets.diff().reshape(len(source.features), -1).sum(1).numpy()
    )
    values = whole.ids.values.numpy()
    assert np.all((values >= 0) & (values < rows))
