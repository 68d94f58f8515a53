"""The example of docs/plan.md is what the program says."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from distcache.plan import main

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
PROGRAM = ["python", "-m", "distcache.plan"]


def commands(text: str) -> list[list[str]]:
    """The command lines of the page's first block."""
    block = text.split("```")[1].replace("\\\n", " ")
    return [shlex.split(line) for line in block.strip().splitlines()]


def test_the_example_is_what_the_program_says(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = PAGE.read_text()
    shown = text.partition("<!-- plan -->")[2].partition("<!-- /plan -->")[0]
    command = commands(text)[1]  # "the second command above says"
    assert command[:3] == PROGRAM
    # The sweep, which the page does not show, is as long as another key says.
    assert main([*command[3:], "most_ranks=1", f"output={tmp_path}"]) == 0
    said = capsys.readouterr().out.partition("By number of ranks")[0]
    assert said.strip() and shown.strip().strip("`").strip() == said.strip()
