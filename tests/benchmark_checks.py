"""What the tests of all benches look for in a report's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Bench, of_kind, tables_of
from distcache.cli.run import markdown_table

HARDWARE = {"cpu", "cores", "memory_bytes", "gpus"}

of = of_kind


def read_report(out: Path, bench: Bench) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the records of a report's JSON lines, after checking that the Markdown
    beside them says the same."""
    lines = out.with_suffix(".jsonl").read_text().split("\n")[:-1]
    head, *records = map(json.loads, lines)
    text = out.read_text()
    for table in tables_of(bench.sections, records):
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert f"## {table.title}\n" in text
        assert markdown_table(table) in text
    assert head["kind"] == "environment"
    assert set(head["hardware"]) == HARDWARE
    assert {"torch", "numpy", "python"} <= set(head["versions"])
    assert str(head["hardware"]["cpu"]) in text
    assert head["versions"]["torch"] in text
    assert f"`{' '.join(head['command'])}`" in text
    assert "commit" in head and "settings" in head
    return head, records


def check_spread(found: dict[str, Any], values: list[float]) -> None:
    """`found` is the spread of `values`."""
    assert found["count"] == len(values)
    assert found["min"] == min(values)
    assert found["max"] == max(values)
    np.testing.assert_allclose(found["median"], np.median(values))
    np.testing.assert_allclose(
        [found["q1"], found["q3"]], [np.quantile(values, 0.25), np.quantile(values, 0.75)]
    )
