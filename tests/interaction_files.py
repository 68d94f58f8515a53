"""Files of users and items for tests, and the samples that a source makes of them."""

from __future__ import annotations

from pathlib import Path

from distcache.data.interactions import InteractionsSource, InteractionsSpec

LINES = ["0 1 2 3", "1 2", "2 0 1\t4 5", "4 5 5 1", "0 7"]
CSV = ["3,1,4.0,50", "3,2,2.5,10", "0,1,5.0,40", "0,3,3.0,40", "1,4,1.0,20", "3,0,4.5,30"]
HEADER = "userId,movieId,rating,timestamp"


def write(path: Path, lines: list[str], end: str = "\n") -> Path:
    """A file of these lines."""
    path.write_bytes((end.join(lines) + end).encode())
    return path


def source(path, batch=8, **changes) -> InteractionsSource:
    """The source of a file."""
    return InteractionsSource(InteractionsSpec(path, global_batch_size=batch, **changes))


def samples(stream, kind="train", epoch=0) -> list[tuple[int, int, int]]:
    """(user, item, label) of a whole epoch."""
    found, steps = [], stream.steps_per_epoch
    for at in range(steps if kind == "train" else stream.eval_batches):
        take = stream.train_batch if kind == "train" else stream.eval_batch
        batch = take(at + (epoch * steps if kind == "train" else 0), 0, 1)
        users, items = batch.ids.values.reshape(2, -1).tolist()
        found += list(zip(users, items, batch.labels.int().tolist(), strict=True))
    return found
