"""The traces of the policies' bench: drawn, drifting, of real purchases, Criteo-shaped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distcache.data.batch import BatchSource
from distcache.data.interactions import InteractionsSource, InteractionsSpec
from distcache.data.raw.settings import KAGGLE_ROWS
from distcache.data.synthetic import SyntheticSource, SyntheticSpec, ZipfTables
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.trace import Trace, record_ids, record_source

ZIPF = {"zipf_0.8": 0.8, "zipf_1.05": 1.05, "zipf_1.2": 1.2}
"""Exponents of the drawn traces."""

DRIFTING = 1.05
"""Exponent of the drifting trace."""

_DEALS = 20
"""How often, over a drifting trace, popularity is dealt anew."""

_DEALT = 0.1
"""Share of the ranks that are dealt anew each time."""


@dataclass(frozen=True)
class TraceSettings:
    """Sizes of the traces. `rows` and `lookups` of a step: drawn traces; `criteo_batch`,
    `book_batch`: samples of a step; `book`: path of the Amazon-Book interactions, or empty."""

    steps: int
    rows: int
    lookups: int
    criteo_batch: int
    criteo_shrink: int
    book_batch: int
    book: str
    seed: int


def make_trace(name: str, settings: TraceSettings) -> Trace:
    """The trace called `name`. Raises ConfigError for one that is unknown, or has no data."""
    reason = missing(name, settings) if name in NAMES else f"choose of {','.join(NAMES)}"
    if reason is not None:
        raise ConfigError(f"traces={name}: {reason}")
    return _MAKERS.get(name, _drawn)(name, settings)


def _drawn(name: str, settings: TraceSettings) -> Trace:
    return record_ids(_draws(settings, ZIPF[name]), settings.rows)


def _drift(name: str, settings: TraceSettings) -> Trace:
    return record_ids(drifting(settings), settings.rows)


def _draws(settings: TraceSettings, exponent: float) -> Iterator[np.ndarray]:
    tables = ZipfTables([settings.rows], exponent, settings.seed)
    rng = np.random.default_rng(settings.seed)
    count = np.array([settings.lookups])
    for _ in range(settings.steps):
        yield tables.draw_ids(rng.random(settings.lookups), count)


def drifting(settings: TraceSettings) -> Iterator[np.ndarray]:
    """Steps of Zipf-distributed ids whose popularity changes: 20 times over the trace, a tenth of
    the ranks, hot ones as likely as others, is dealt anew among their rows."""
    rng = np.random.default_rng([settings.seed, 1])
    row_of = np.arange(settings.rows)
    every = max(1, settings.steps // _DEALS)
    for step, ids in enumerate(_draws(settings, DRIFTING)):
        if step and step % every == 0:
            chosen = rng.permutation(settings.rows)[: max(2, int(settings.rows * _DEALT))]
            row_of[chosen] = row_of[rng.permutation(chosen)]
        yield row_of[ids]


def _criteo(name: str, settings: TraceSettings) -> Trace:
    rows = [max(1, count // settings.criteo_shrink) for count in KAGGLE_ROWS]
    spec = SyntheticSpec(
        rows, zipf=1.05, global_batch_size=settings.criteo_batch, seed=settings.seed
    )
    return _of_source(SyntheticSource(spec), settings.steps)


def missing(name: str, settings: TraceSettings) -> str | None:
    """Why the trace cannot be had here; None if it can."""
    if name != "book" or Path(settings.book).is_file():
        return None
    given = "book= names no file" if settings.book else "no file was given"
    return (
        f"{given}: book=<file> of lines `user item item ...` (Amazon-Book, as LightGCN has it) "
        "replays it"
    )


def _book(name: str, settings: TraceSettings) -> Trace:
    spec = InteractionsSpec(
        settings.book,
        on_bad_line="skip",  # users without items
        global_batch_size=settings.book_batch,
        seed=settings.seed,
    )
    source = InteractionsSource(spec)
    return _of_source(source, min(settings.steps, source.steps_per_epoch or settings.steps))


def _of_source(source: BatchSource, steps: int) -> Trace:
    """The steps of a source whose tables all have one width."""
    pairs = zip(source.features, source.table_rows, strict=True)
    tables = [TableSpec(feature, rows, 1, (feature,)) for feature, rows in pairs]
    order = (("train", step) for step in range(steps))
    return record_source(source, tables, order=order)[0]


_MAKERS: dict[str, Callable[[str, TraceSettings], Trace]] = {
    "drift": _drift,
    "book": _book,
    "criteo": _criteo,
}

NAMES = (*ZIPF, *_MAKERS)
"""All traces."""
