"""The tables of the step's report, made of its records alone."""

from __future__ import annotations

from collections.abc import Sequence

from distcache.bench.report import Record, Table
from distcache.bench.spread import shown


def tables(records: Sequence[Record]) -> list[Table]:
    """Steps, ratios, stages and device memory."""
    modes = [record for record in records if record["kind"] == "mode"]
    pairs = [record for record in records if record["kind"] == "ratio"]
    return [_steps(modes), _ratios(pairs), _stages(modes), _memory(modes), _parts(modes)]


def _steps(modes: Sequence[Record]) -> Table:
    rows = [
        (
            record["mode"],
            shown(record["step_ms"]),
            f"{record['step_ms']['min']:.2f}",
            *(_rows(record, name) for name in ("distinct", "misses", "evictions")),
            repr(record["loss"]),
        )
        for record in modes
    ]
    return Table(
        "Milliseconds per step",
        "Median [quartiles] over all timed steps, from the end of one step to the end of the next. "
        "Rows are means per step. The last loss is the same number wherever the training is the "
        "same to the bit.",
        ("mode", "step ms", "least", "distinct rows", "fetched", "evicted", "last loss"),
        rows,
    )


def _ratios(pairs: Sequence[Record]) -> Table:
    rows = [
        (
            f"{record['numerator']} / {record['denominator']}",
            shown(record["ratio"], 3),
            f"{record['ratio']['min']:.3f} to {record['ratio']['max']:.3f}",
        )
        for record in pairs
    ]
    return Table(
        "Ratios",
        "Of the median steps of two turns over the same batches: median [quartiles] over the "
        "repetitions, and the range.",
        ("pair", "ratio", "range"),
        rows,
    )


def _stages(modes: Sequence[Record]) -> Table:
    staged = [record for record in modes if record["stage_ms"]]
    names = list(dict.fromkeys(name for record in staged for name in record["stage_ms"]))
    return Table(
        "Milliseconds per stage",
        "Median over the turns of the mean of a turn's steps. `ingest`, `load`, `plan` and "
        "`plan_exchange` run on a thread beside training, and so do `write_back`, `gather` and "
        "`fill` when overlapped; in brackets the share of them that training did not wait for. "
        "`wait` is what it did.",
        ("stage", *(record["mode"] for record in staged)),
        [(name, *(_stage(record, name) for record in staged)) for name in names],
    )


def _stage(record: Record, name: str) -> str:
    """Milliseconds of a stage, with its hidden share where it has one."""
    taken = record["stage_ms"].get(name)
    if taken is None:
        return "-"
    hidden = record["stage_hidden_ms"].get(name)
    share = "" if hidden is None or not taken else f" [{100 * hidden / taken:.0f} %]"
    return f"{taken:.2f}{share}"


def _memory(modes: Sequence[Record]) -> Table:
    rows = [
        (
            record["mode"],
            _number(record.get("cache_rows")),
            _number(record.get("embedding_device_bytes")),
            _number(record.get("embedding_bytes_bound")),
        )
        for record in modes
        if record.get("embedding_device_bytes") is not None
    ]
    return Table(
        "Device bytes of the embeddings",
        "The bound is slots (D + S) + 3 U D floats, and staging of U rows in and U rows out, for "
        "the U of the largest step.",
        ("mode", "slots", "bytes", "bound"),
        rows,
    )


def _parts(modes: Sequence[Record]) -> Table:
    rows = [
        (record["mode"], name, f"{part['expected']:,}", f"{part['measured']:,}", _share(part))
        for record in modes
        for name, part in record.get("device_parts", {}).items()
    ]
    return Table(
        "Device bytes by part",
        "Of the largest step. Slots: C (D + S); ids: index tensors, dense features and labels of "
        "the steps on the device at once; rows: 3 U D; moving: fetched and evicted rows; dense: "
        "parameters, gradients, optimizer state. On a GPU the allocator's peak is all of them, "
        "activations and the other contenders on the device.",
        ("mode", "part", "counted", "measured", "measured / counted"),
        rows,
    )


def _share(part: dict[str, int]) -> str:
    return f"{part['measured'] / part['expected']:.2f}" if part["expected"] else "-"


def _rows(record: Record, name: str) -> str:
    value = record["rows_per_step"].get(name)
    return "-" if value is None else f"{value:,.0f}"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
