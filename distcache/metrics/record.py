"""What a run writes about itself: `metrics.jsonl`, a line at a time, and `summary.json`."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

SUMMARY_KEYS = (
    "mode",
    "world_size",
    "first_step",
    "steps",
    "global_batch_size",
    "final_loss",
    "eval_auc",
    "eval_logloss",
    "eval_ne",
    "samples_per_second",
    "step_ms",
    "stage_ms",
    "stage_hidden_ms",
    "hit_rate",
    "hit_rate_lookups",
    "rows_fetched",
    "rows_written_back",
    "warm_start_rows",
    "hot_rows_by_table",
    "host_to_device_bytes",
    "device_to_host_bytes",
    "collective_bytes",
    "dense_collective_bytes",
    "planning_bytes",
    "inter_node_bytes",
    "peak_device_bytes",
    "embedding_device_bytes",
    "cache_rows",
    "placement",
    "cache_state",
    "home_rows_mean",
    "home_rows_max",
    "early_rows",
    "exchange_ms",
    "exchange_hidden",
    "hot_samples",
    "early_steps",
    "phase_rate",
    "hot_steps",
    "cold_steps",
    "hot_rows_fetched",
    "cold_rows_fetched",
    "hot_host_bytes",
    "cold_host_bytes",
    "table_rows",
    "loss_digest",
    "state_digest",
)
"""The keys of `summary.json`, in order, in every mode."""


def plain(value: Any) -> Any:
    """`value` as strict JSON allows it: NaN and infinities become None, at any depth."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that `path` holds either the old text or the whole new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(plain(value), file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, on disk as soon as it is written."""

    def __init__(self, path: Path, append: bool) -> None:
        """Open `path`; `append` keeps the lines of the run that is resumed in its own folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if append else "w", encoding="utf-8", buffering=1)

    def write(self, **values: Any) -> None:
        """Add one line."""
        self._file.write(json.dumps(plain(values), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
