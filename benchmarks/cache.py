"""Milliseconds per step of cached tables at the setting of DynamicEmb's published benchmark:
`python -m benchmarks.cache`.

Ten tables, one id per bag, power-law ids, no dense part: forward, backward from a fixed gradient,
and update. Cached variants are `CachedEmbeddingBagCollection` under `distcache.lookahead`, one
after the other over the same batches and the same tables in host memory. Every batch is a new one,
drawn before the first step. Each result is printed, and appended to the report, once it is there.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.cache_variants import Bag, Cached, CacheOptions, KeptStores, draw_bank
from benchmarks.report import Bench, Column, Record, Section, of_kind, pivoted, run_bench
from benchmarks.stream import union
from benchmarks.turns import shown, spread
from distcache.errors import ConfigError

log = logging.getLogger("distcache.benchmarks.cache")

_SLACK = 1.03
"""Slots per distinct row of a step below which it may not fit: parts of a cache fill unevenly."""


def run_variant(
    options: CacheOptions, device: torch.device, name: str, make: Callable[[], Any]
) -> Record:
    """Warm up one variant, time its blocks, then trace and profile further steps."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    own = make()
    record: Record = {"kind": "variant", "mode": name, "setup_s": time.perf_counter() - began}

    def go(steps: int) -> float:
        """Run some steps; the time at which the device has done them."""
        for _ in range(steps):
            own.step()
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    try:
        began = time.perf_counter()
        gc.collect()
        marks = [go(options.warmup)]
        record["warmup_s"] = marks[0] - began
        before = own.stage_sums() if isinstance(own, Cached) else None
        # No pause between blocks: the planner would get ahead of a training that stands still.
        marks += [go(options.steps) for _ in range(options.blocks)]
        record["block_ms"] = (1e3 * np.diff(marks) / options.steps).tolist()
        record["step_ms"] = spread(record["block_ms"])
        if isinstance(own, Cached) and before is not None:
            first, last = options.warmup, options.warmup + options.blocks * options.steps
            record |= own.facts(first, last)
            record["stage_ms"] = _stage_ms(before, own.stage_sums())
        if cuda:
            record["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        report_early(options, record)
        for extra in (_trace, _profile):
            try:
                record |= extra(options, device, own, name, go)
            except Exception as error:  # the timing stands without it
                log.warning("%s: no %s: %s", name, extra.__name__.strip("_"), error)
    finally:
        own.close()
    return record


def _stage_ms(
    before: tuple[int, dict[str, float]], after: tuple[int, dict[str, float]]
) -> dict[str, float]:
    """Mean milliseconds of each stage over the timed steps in between."""
    steps = max(1, after[0] - before[0])
    return {name: 1e3 * (s - before[1].get(name, 0.0)) / steps for name, s in after[1].items()}


def _trace(
    options: CacheOptions, device: torch.device, own: Any, name: str, go: Callable[[int], float]
) -> Record:
    """Stage times of steps that are all timed, and their timeline beside the report."""
    if not (isinstance(own, Cached) and options.traced):
        return {}
    with ExitStack() as stack:
        if options.out:
            stack.enter_context(own.ebc.trace(_beside(options, name, "stages")))
        before = own.stage_sums()
        go(options.traced)
        return {"traced_stage_ms": _stage_ms(before, own.stage_sums())}


def _profile(
    options: CacheOptions, device: torch.device, own: Any, name: str, go: Callable[[int], float]
) -> Record:
    """What the device does in a step, by torch's profiler, which slows the host."""
    steps = options.profiled
    if device.type != "cuda" or not steps:
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        go(steps)
    if options.out:
        seen.export_chrome_trace(str(_beside(options, name, "profile.json.gz")))
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in seen.events() or ():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            span = (event.time_range.start, event.time_range.end)
            spans.setdefault(event.name, []).append(span)
    everything = [span for found in spans.values() for span in found]
    kernels = [
        span
        for kind, found in spans.items()
        if not kind.startswith(("Memcpy", "Memset"))
        for span in found
    ]
    total = {kind: sum(end - begin for begin, end in found) for kind, found in spans.items()}
    longest = sorted(total, key=lambda kind: -total[kind])[:20]
    per_step = 1e-3 / steps
    return {
        "device": {
            "busy_ms": per_step * union(everything)[0],
            "kernels_ms": per_step * union(kernels)[0],
            "gap_ms": 1e-3 * union(everything)[1],
            "longest": [(k[:120], per_step * total[k], len(spans[k]) / steps) for k in longest],
        }
    }


def _beside(options: CacheOptions, name: str, what: str) -> Path:
    """A place beside the report for a file of one variant."""
    return Path(options.out).with_suffix(f".{name.replace(' ', '_')}.{what}")


def report_early(options: CacheOptions, record: Record) -> None:
    """Print a record and append it to the report, which a time limit may cut off."""
    line = json.dumps(record)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        with Path(options.out).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def slot_counts(options: CacheOptions, facts: dict[str, float]) -> list[int]:
    """Sizes of the cache in rows. Raises ConfigError for text that is no size."""
    counts = []
    for text in options.slots:
        try:
            times = float(text.removesuffix("x"))
        except ValueError as error:
            raise ConfigError(f"slots={text} is neither a number of rows nor like 1.1x") from error
        counts.append(int(times * facts["distinct_most"]) if text.endswith("x") else int(times))
        if counts[-1] < _SLACK * facts["distinct_most"]:
            log.warning("slots=%s leave little room for a step's distinct rows", text)
    return counts


def measure(options: CacheOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Measure all variants one after the other."""
    if options.zipf == 1:
        raise ConfigError("zipf=1: give an exponent beside 1, such as 1.0001")
    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    bank, facts = draw_bank(options)
    records: list[Record] = [{"kind": "stream", **facts}]
    report_early(options, records[0])
    kept = KeptStores()
    try:
        for name, make in variants(options, bank, device, kept, slot_counts(options, facts)):
            try:
                found = run_variant(options, device, name, make)
            except Exception as error:  # the other variants are worth their time
                log.exception("%s failed", name)
                found = {"kind": "failed", "mode": name, "error": f"{error}"[:500]}
            found |= {"host_bytes": kept.nbytes, "optimizer": options.optimizer}
            records.append(found)
            report_early(options, found)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    finally:
        kept.close()
    return records


def variants(
    options: CacheOptions,
    bank: Sequence[np.ndarray],
    device: torch.device,
    kept: KeptStores,
    counts: Sequence[int],
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of all variants and what makes them."""
    for mode in options.modes:
        if mode == "bag":
            yield mode, partial(Bag, options, bank, device)
            continue
        for slots, threads in itertools.product(counts, options.planner_threads):
            name = f"{mode} {slots}" + (f" {threads} threads" if threads else "")
            yield name, partial(Cached, options, bank, device, (mode, slots, threads), kept)


# -----------------------------------------------------------------------------
# The report.

PUBLISHED = (
    ("FBGEMM, all in HBM (16.8 M rows)", 0.959, 1.352),
    ("DynamicEmb, in HBM", 1.923, 2.185),
    ("FBGEMM MANAGED_CACHING, cache = working set", 4.146, 14.370),
    ("FBGEMM MANAGED_CACHING, cache = 0.8 of it", 4.774, 15.001),
    ("DynamicEmb caching, cache = working set", 10.873, 12.284),
    ("DynamicEmb caching, cache = 0.8 of it", 20.833, 24.333),
    ("FBGEMM UVM without cache", 13.56, 24.05),
    ("DynamicEmb without HBM", 35.5, 43.5),
)
"""Milliseconds with SGD and with Adam, on one H100 80GB at 10 tables x 25.6 M rows x 128."""


def _results(records: Sequence[Record]) -> list[Record]:
    """A row for each variant, then the published ones."""
    kinds = of_kind(records, "variant")
    published = [{"mode": f"published: {who}", "sgd": a, "adam": b} for who, a, b in PUBLISHED]
    return [{**record, record["optimizer"]: record["step_ms"]} for record in kinds] + published


def _shown_ms(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else shown(3)(value)


def _gb(key: str) -> Callable[[Record], float | None]:
    return lambda record: record[key] / 1e9 if key in record else None


def _idle(record: Record) -> float | None:
    if "device" not in record or "step_ms" not in record:
        return None
    return 1 - record["device"]["busy_ms"] / record["step_ms"]["median"]


SECTIONS = (
    Section(
        "Ids",
        "Of a step, as drawn; means over a sample of the batches.",
        "stream",
        (
            Column("ids", "ids", ","),
            Column("distinct", "distinct", ",.0f"),
            Column("most", "distinct_most", ","),
            Column("batches", "batches", ","),
            Column("drawn in s", "seconds", ".1f"),
        ),
    ),
    Section(
        "Milliseconds per step",
        "Median [quartiles] over the blocks; a variant's name ends with its slots. The published "
        "figures are at 25.6 M rows a table, ours at the rows under settings. Steady: every "
        "fetched row sent one away in all timed steps. Idle: of the step without profiler, the "
        "part in which neither kernel nor copy runs on the device.",
        _results,
        (
            Column("variant", "mode"),
            Column("SGD ms", "sgd", _shown_ms),
            Column("Adam ms", "adam", _shown_ms),
            Column("cache GB", _gb("cache_bytes"), ".2f"),
            Column("hit rate", "hit_rate", ".4f"),
            Column("distinct", "distinct", ",.0f"),
            Column("fetched", "misses", ",.0f"),
            Column("evicted", "evictions", ",.0f"),
            Column("steady", "steady"),
            Column("busy ms", lambda r: r["device"]["busy_ms"] if "device" in r else None, ".2f"),
            Column("idle", _idle, ".1%"),
            Column("peak GB", _gb("peak_bytes"), ".2f"),
            Column("host GB", _gb("host_bytes"), ".2f"),
            Column("set-up s", "setup_s", ".1f"),
        ),
    ),
    pivoted(
        ("Milliseconds per stage", "In the timed blocks; on a device of one step in ten."),
        "variant",
        lambda record: record.get("stage_ms", {}),
        ("stage", lambda record: record["mode"]),
    ),
    pivoted(
        ("Milliseconds per stage, every step timed", "In further steps."),
        "variant",
        lambda record: record.get("traced_stage_ms", {}),
        ("stage", lambda record: record["mode"]),
    ),
    pivoted(
        ("Device milliseconds per kernel or copy", "Of a profiled step; the longest ones."),
        "variant",
        lambda record: {k[:60]: ms for k, ms, _ in record.get("device", {}).get("longest", ())},
        ("kernel", lambda record: record["mode"]),
    ),
)

BENCH = Bench("Published cache benchmark", CacheOptions, measure, SECTIONS)
main = partial(run_bench, BENCH)

if __name__ == "__main__":
    sys.exit(main())
