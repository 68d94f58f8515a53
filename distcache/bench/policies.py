"""Rows that every policy fetches, beside Belady's MIN: `python -m distcache.bench.policies`.

Traces are recorded once and replayed through the planner that training runs, policy after policy;
nothing is trained. Statistics, where a policy reads some, are counts of the trace itself.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distcache.bench.command import Bench, run_bench
from distcache.bench.options import at_least, option
from distcache.bench.policy_tables import tables
from distcache.bench.policy_traces import NAMES, TraceSettings, make_trace, missing
from distcache.bench.report import Record
from distcache.errors import ConfigError
from distcache.planner.policy import POLICIES, TAILS, Policy
from distcache.replay import Case, Outcome, popularity_of, replay
from distcache.trace import Trace

log = logging.getLogger("distcache.bench.policies")

MODULE = "distcache.bench.policies"
PURPOSE = "Hit rates and rows fetched of every policy and of Belady's MIN, by replay."

_WINDOWS = 16
"""Windows of a trace whose distinct rows are counted."""


@dataclass(frozen=True)
class PoliciesOptions:
    """The keys of the command line."""

    traces: tuple[str, ...] = option(NAMES, "traces to replay")
    sizes: tuple[float, ...] = option((0.5, 1.5, 5.0), "cache sizes, % of the rows")
    policies: tuple[str, ...] = option(POLICIES, "policies")
    tails: tuple[str, ...] = option(TAILS, "tails of lookahead")
    windows: tuple[int, ...] = option((8, 32, 128), "L of lookahead")
    prefetch: tuple[int, ...] = option((0, 1), "P: a slot is held for so many steps after its use")
    all_ahead: bool = option(True, "lookahead over the whole trace as well, with the tail lru")
    steps: int = option(600, "steps of each trace, at most")
    rows: int = option(1_000_000, "rows of the drawn traces")
    lookups: int = option(8192, "lookups of a step of the drawn traces")
    criteo_batch: int = option(2048, "samples of a step of the Criteo-shaped trace, 26 ids each")
    criteo_shrink: int = option(1, "divides the rows of its tables")
    book_batch: int = option(128, "samples of a step of the Amazon-Book trace, 2 ids each")
    book: str = option("", "file of the Amazon-Book interactions: user item item ...")
    seed: int = option(0, "of all that is drawn")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, rows=self.rows, lookups=self.lookups)
        at_least(1, criteo_batch=self.criteo_batch, criteo_shrink=self.criteo_shrink)
        at_least(1, book_batch=self.book_batch)
        at_least(0, prefetch=min(self.prefetch), windows=min(self.windows))
        unknown = [name for name in self.traces if name not in NAMES]
        if unknown:
            raise ConfigError(f"traces={unknown[0]} is unknown: choose of {','.join(NAMES)}")
        for size in self.sizes:
            if not 0 < size <= 100:
                raise ConfigError(f"sizes={size} is not a percentage above 0 and at most 100")
        contenders(self)  # says which policy or tail is unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    bench = Bench("Policies", MODULE, PURPOSE, PoliciesOptions, measure, tables, "INFO")
    return run_bench(bench, arguments)


ALL = -1
"""The L of lookahead over the whole trace: what only its holds tell from MIN."""


def contenders(options: PoliciesOptions) -> list[tuple[Policy | None, int]]:
    """Every policy with its L, MIN first. Raises ConfigError for an unknown one."""
    found: list[tuple[Policy | None, int]] = [(None, 0)]
    if options.all_ahead:
        found.append((Policy(), ALL))
    for name in options.policies:
        policies = [Policy(name, tail) for tail in options.tails]
        if policies[0].uses_window:
            found += [(policy, window) for window in options.windows for policy in policies]
        else:
            found.append((Policy(name), 0))
    return found


def measure(options: PoliciesOptions) -> list[Record]:
    """Records of all traces: `trace`, `skipped` and `outcome`."""
    settings = TraceSettings(
        options.steps,
        options.rows,
        options.lookups,
        options.criteo_batch,
        options.criteo_shrink,
        options.book_batch,
        options.book,
        options.seed,
    )
    records: list[Record] = []
    for name in options.traces:
        reason = missing(name, settings)
        if reason is not None:
            log.warning("trace %s is left out: %s", name, reason)
            records.append({"kind": "skipped", "trace": name, "reason": reason})
            continue
        started = time.perf_counter()
        trace = make_trace(name, settings)
        seconds = time.perf_counter() - started
        log.info("%s: %d ids of %d rows in %.1f s", name, trace.ids, trace.rows, seconds)
        records.append(_trace_record(name, trace, options, seconds))
        records += _outcomes(name, trace, options)
    return records


def _trace_record(
    name: str, trace: Trace, options: PoliciesOptions, seconds: float
) -> dict[str, Any]:
    (home,) = trace.of_world(1)
    return {
        "kind": "trace",
        "trace": name,
        "rows": trace.rows,
        "named_rows": len(home.names),
        "steps": trace.steps,
        "ids": trace.ids,
        "distinct_per_step": float(home.distinct.mean()),
        "largest_step": int(home.distinct.max()),
        "window_rows": {str(window): window_rows(trace, window) for window in options.windows},
        "bytes": trace.nbytes,
        "seconds": seconds,
    }


def window_rows(trace: Trace, window: int) -> float:
    """Mean distinct rows of `window` steps in a row (of all steps where there are fewer)."""
    (home,) = trace.of_world(1)
    window = min(window, home.steps)
    starts = np.unique(np.linspace(0, home.steps - window, _WINDOWS).astype(np.int64))
    found = [
        len(np.unique(home.numbers[home.starts[start] : home.starts[start + window]]))
        for start in starts
    ]
    return float(np.mean(found))


def _outcomes(name: str, trace: Trace, options: PoliciesOptions) -> list[Record]:
    records = []
    popularity = popularity_of([trace])
    asked = contenders(options)
    for size in options.sizes:
        slots = max(1, math.ceil(trace.rows * size / 100))
        for prefetch in options.prefetch:
            cases = [
                Case(policy, (slots,), trace.steps if window == ALL else window, prefetch)
                for policy, window in asked
            ]
            outcomes = replay(trace, cases, popularity)
            for outcome, (_, window) in zip(outcomes, asked, strict=True):
                record = _outcome_record(outcome, outcomes[0].fetched)
                if window == ALL:
                    record |= {"label": "lookahead over all", "lookahead": None}
                records.append({"kind": "outcome", "trace": name, "size": size, **record})
    return records


def _outcome_record(outcome: Outcome, least: int) -> Record:
    policy, case, served = outcome.case.policy, outcome.case, outcome.refused is None
    return {
        "slots": case.slots[0],
        "prefetch": case.prefetch,
        "label": case.label,
        "policy": "MIN" if policy is None else policy.name,
        "tail": policy.tail if policy is not None and policy.uses_window else None,
        "admission": False,
        "lookahead": case.lookahead,
        "refused": outcome.refused,
        "hit_rate": outcome.hit_rate,
        "hit_rate_lookups": outcome.hit_rate_lookups,
        "rows_fetched": outcome.fetched,
        "rows_written_back": outcome.written_back,
        "tight_steps": outcome.tight_steps,
        "ratio_to_min": outcome.fetched / least if served and least else None,
        "seconds": outcome.seconds,
        "ids_per_second": outcome.ids / outcome.seconds if served else None,
    }


if __name__ == "__main__":
    sys.exit(main())
