"""Tables of a report: cells of text, a note that says what the numbers mean, and their Markdown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of a report; cells are text, `note` says what the numbers mean."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def markdown_table(table: Table) -> str:
    """The rows of a table as Markdown; all columns but the first are aligned to the right."""
    marks = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = [table.columns, tuple(marks), *table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
