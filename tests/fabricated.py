"""Run folders as training leaves them, made up."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CACHED = {"hit_rate": 0.83, "hit_rate_lookups": 0.97, "cache_rows": 5_000, "planning_bytes": 3e5}
MOVING = {"host_to_device_bytes": 4e5, "device_to_host_bytes": 3.8e5}


def summary(mode: str, ms: float = 12.0, digest: str = "a", steps: int = 200, **more: Any) -> dict:
    """A summary: nulls where a mode has no such value, bytes per step times the steps."""
    own = {"data": CACHED | MOVING, "host": MOVING}.get(mode, {})
    own = {"collective_bytes": 1.9e6, "dense_collective_bytes": 6e5} | own
    times = {key: steps if key.endswith("bytes") else 1 for key in own}
    small = mode == "data"
    return {
        **{"mode": mode, "world_size": 2, "first_step": 0, "steps": steps},
        **{"global_batch_size": 2048, "final_loss": 0.7787, "eval_auc": 0.7123},
        **{"samples_per_second": 2048 / ms * 1000, "step_ms": {"median": ms, "p90": 1.1 * ms}},
        **{"stage_ms": {"plan": 1.5, "wait": 0.1}, "stage_hidden_ms": {"plan": 1.4}},
        **dict.fromkeys([*CACHED, *MOVING], None),
        **{key: value * times[key] for key, value in own.items()},
        "peak_device_bytes": 6.1e7 if small else 2.2e9,
        "embedding_device_bytes": 4.1e7 if small else 2.16e9,
        **{"table_rows": 33762577, "loss_digest": digest, "state_digest": digest},
        **more,
    }


def write_run(folder: Path, values: dict, drift: float = 0.0) -> None:
    """Write `summary.json` and `metrics.jsonl`; losses drift by a share."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(values))
    draw, ms = random.Random(1), values["step_ms"]["median"]
    lines: list[dict] = []
    for step in range(4, values["steps"] + 1, 4):
        window = ms * (1 + draw.uniform(-0.03, 0.03))
        if step <= 8:
            window *= 10  # the first steps are slow
        rate = values["global_batch_size"] / window * 1000
        loss = (0.4 + 0.3 * 0.99**step) * (1 + drift)
        line = {"step": step, "loss": loss, "samples_per_second": rate, "step_ms": window}
        lines.append(line)
    lines.append({"step": values["steps"], "eval_auc": 0.7})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
