"""What the reports of all commands are made of: tables with a note, units, the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """A table of a report; cells are text, `note` says what the numbers mean."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    @classmethod
    def of(
        cls,
        title: str,
        note: str,
        columns: Sequence[tuple[str, Callable[[T], str]]],
        entries: Iterable[T],
    ) -> Table:
        """A row for each of `entries`; `columns`: a title, and what makes a cell of an entry."""
        rows = [tuple(cell(entry) for _, cell in columns) for entry in entries]
        return cls(title, note, tuple(name for name, _ in columns), rows)

    @property
    def section(self) -> str:
        """The table as Markdown under its title and note."""
        return f"## {self.title}\n\n{self.note}\n\n{markdown_table(self)}"

    @property
    def aligned(self) -> str:
        """The table for a terminal: the first column to the left, the others to the right."""
        cells = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        shown = []
        for first, *others in cells:
            rest = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
            shown.append("  ".join([first.ljust(widths[0]), *rest]).rstrip())
        return "\n".join(shown)


def markdown_table(table: Table) -> str:
    """The rows of a table as Markdown; all columns but the first are aligned to the right."""
    marks = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = [table.columns, tuple(marks), *table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def human_bytes(count: float) -> str:
    """A byte count in a unit that reads well."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def percent(value: float | None, digits: int = 2) -> str:
    """A share in percent, `-` for None."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def machine_text(environment: dict[str, Any]) -> str:
    """Machine, versions and commit in a line or two."""
    hardware, commit = environment["hardware"], environment["commit"] or {}
    versions = [f"{name} {version}" for name, version in environment["versions"].items() if version]
    state = commit.get("commit", "unknown") + (" with changes" if commit.get("dirty") else "")
    return f"{hardware['cpu']}, {hardware['cores']} cores. {', '.join(versions)}. Commit: {state}."


def tidy(panel: Any) -> None:
    """A panel of a figure with a faint grid, and no frame above and to the right."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.3)
    panel.set_axisbelow(True)


def plain_numbers(panel: Any) -> None:
    """Numbers such as 0.5 and 20 on logarithmic axes, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(lambda *_: ""))
