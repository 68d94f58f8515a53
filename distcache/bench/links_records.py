"""What the turns of one link and kind of batch come to: throughput, ratios, bytes, hidden time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from distcache.bench.report import Record
from distcache.bench.spread import ratios, spread
from distcache.parallel.statistics import COLLECTIVE


def cell_records(
    found: Sequence[Record], where: Mapping[str, str], yard: str, samples: int
) -> list[Record]:
    """One record per turn and one per contender, from those of `bench.step`.

    `where`: the cell's rate and kind of batches, put into every record; `yard`: the contender that
    others are compared with; `samples`: those of a step over all ranks.
    """
    turns = [_turn(record, samples) | where for record in found if record["kind"] == "turn"]
    by_mode: dict[str, list[Record]] = {}
    for turn in sorted(turns, key=lambda turn: turn["repetition"]):
        by_mode.setdefault(turn["mode"], []).append(turn)
    modes = {record["mode"]: record for record in found if record["kind"] == "mode"}
    yards = [turn["samples_per_second"] for turn in by_mode[yard]]
    results = []
    for mode, own in by_mode.items():
        speeds = [turn["samples_per_second"] for turn in own]
        results.append(
            {
                "kind": "result",
                **where,
                "mode": mode,
                "placement": modes[mode].get("placement"),
                "nodes": modes[mode]["nodes"],
                "early_rows": modes[mode].get("early_rows"),
                "samples_per_second": spread(speeds),
                "ratio": spread(ratios(speeds, yards)),
                "sent_per_step": modes[mode]["sent_per_step"],
                "exchange_ms": _median(own, "exchange_ms"),
                "exchange_hidden": _median(own, "exchange_hidden"),
                "stages": stages(own),
                "loss": modes[mode]["loss"],
            }
        )
    return [*turns, *results]


def _turn(record: Record, samples: int) -> Record:
    """A turn: samples per second by the median step, and the exchange's milliseconds per step.

    `exchange_hidden`: the share of it that training did not wait for; None where no stage of its
    own exchanges, as in `hybrid`.
    """
    took = sum(record["stage_ms"].get(name, 0.0) for name in COLLECTIVE)
    beside = sum(record["stage_hidden_ms"].get(name, 0.0) for name in COLLECTIVE)
    return {
        **record,
        "samples_per_second": 1e3 * samples / float(np.median(record["step_ms"])),
        "exchange_ms": took or None,
        "exchange_hidden": beside / took if took else None,
    }


def stages(turns: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Of each exchanging stage, medians over the turns: `ms` per step and its `hidden` part."""
    found = {}
    for name in COLLECTIVE:
        took = [turn["stage_ms"][name] for turn in turns if name in turn["stage_ms"]]
        if any(took):
            hidden = [turn["stage_hidden_ms"].get(name, 0.0) for turn in turns]
            found[name] = {"ms": float(np.median(took)), "hidden": float(np.median(hidden))}
    return found


def _median(turns: Sequence[Record], key: str) -> float | None:
    values = [turn[key] for turn in turns if turn[key] is not None]
    return float(np.median(values)) if values else None
