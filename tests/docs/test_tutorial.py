"""The tutorial: its commands run, leave what the text names, and the notebook says the same."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from criteo_lines import make_lines, write_lines

DOCS = Path(__file__).resolve().parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("make_tutorial", DOCS / "make_tutorial.py")
assert SPEC is not None and SPEC.loader is not None
tutorial = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = tutorial
SPEC.loader.exec_module(tutorial)

TEXT = tutorial.SOURCE.read_text()
PARTS = tutorial.parts(TEXT)
PROSE = "\n".join(part.body for part in PARTS if part.kind == "text")
SMALLER = {
    "DATA": " data.table_rows=[100000,30000,15000,10000,2000,1000,100,10] data.samples=12800"
    " data.global_batch_size=256",
    "RUN": " trainer.eval_steps=5 trainer.log_every=20 trainer.threads=1",
}
"""What is added to the variables that the tutorial begins with."""

NOT_MEASURED = {"3.11", "2.13.0", "2,048", "1.5"}
"""Numbers of the text that are versions or defaults."""


def smaller(part):
    """`part` with small variables, and one run of each mode."""
    body = part.body.replace("repeats=3", "repeats=1")
    for name, more in SMALLER.items():
        body = re.sub(rf'^(export {name}="[^"\n]*)"', rf'\1{more}"', body, flags=re.MULTILINE)
    return replace(part, body=body)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Future, Path, Future]:
    """Small runs of all blocks and, beside them, of those for one's own data: for each its folder
    and what it comes to."""
    pytest.importorskip("matplotlib")
    folder, own = tmp_path_factory.mktemp("tutorial"), tmp_path_factory.mktemp("own")
    with ThreadPoolExecutor(2) as beside:
        runs = beside.submit(run_tutorial, folder), beside.submit(run_own, own)
    return folder, runs[0], own, runs[1]


def run_tutorial(folder: Path) -> dict[int, str]:
    """Run all blocks in `folder`; what each of them said, by its place."""
    opened = tutorial.new_session(folder)
    return {place: opened.run(smaller(part)) for place, part in enumerate(PARTS) if part.runs}


def run_own(folder: Path) -> str:
    """Run the lines for Criteo in `folder`, on lines that are made up; what they said."""
    write_lines(folder / "train.txt", make_lines(3500))
    opened = tutorial.new_session(folder)
    for part in PARTS:
        if tutorial.exports(part) is not None:
            opened.run(smaller(part))
    (own,) = [part for part in PARTS if part.kind == "bash own data"]
    path = 'data.path=kaggle"'
    assert path in own.body
    assert " cache.ratio=0.015" in own.body
    body = own.body.replace(" cache.ratio=0.015", "")
    body = body.replace(path, f'{path[:-1]} cache.ratio=1 data.global_batch_size=256"')
    return opened.run(replace(own, kind="bash", body=body))


@pytest.mark.slow
def test_all_blocks_run_and_what_the_text_claims_holds(both) -> None:
    """They say something where the text shows it, and leave the files that it names."""
    folder, mine, _, _ = both
    said = mine.result()
    assert len(said) >= 15
    for place, words in said.items():
        assert bool(words) == (PARTS[place].output is not None), PARTS[place].body
    named = set(re.findall(r"`(runs/[\w./-]+)`", PROSE))
    named |= {part.made for part in PARTS if part.kind == "picture"}
    assert {"runs/default/trace.json", "runs/compare/table.md"} <= named
    # With repeats=1 a log has no number.
    assert not [n for n in named if not (folder / n.replace("data-1.log", "data.log")).exists()]
    left = folder.glob("runs/*/summary.json")
    runs = {path.parent.name: json.loads(path.read_text()) for path in left}
    for key in ("loss_digest", "state_digest", "eval_auc"):
        assert runs["resident"][key] == runs["default"][key] == runs["chosen"][key]
    assert runs["proportional"]["state_digest"] == runs["by_curve"]["state_digest"]
    assert runs["hot_cold"]["hot_rows_fetched"] == 0 and runs["hot_cold"]["hot_steps"] > 0
    foretold = json.loads((folder / "runs/analysis/report.json").read_text())["prediction"]
    assert foretold["cases"][0]["fetched"] == runs["default"]["rows_fetched"]
    table = (folder / "runs/compare/table.md").read_text()
    assert table.count("same / same") == 2 and "differ / " not in table and "/ differ" not in table


@pytest.mark.slow
def test_the_lines_for_criteo_run(both) -> None:
    _, _, folder, theirs = both
    assert "AUC" in theirs.result()
    for name in ("default", "chosen", "hot_cold", "compare/resident"):
        found = json.loads((folder / "runs" / name / "summary.json").read_text())
        assert found["steps"] > 0 and 0 < found["eval_auc"] < 1
    assert (folder / "runs/analysis/misses.png").exists()
    assert (folder / "runs/compare/table.md").exists()


def test_numbers_links_and_pictures_of_the_text() -> None:
    """Numbers in it are of the outputs; links and pictures are there."""
    shown = "\n".join(f"{part.body}\n{part.output or ''}" for part in PARTS if part.kind != "text")
    known = {number.replace(",", "") for number in re.findall(r"\d[\d.,]*\d|\d", shown)}
    plain = re.sub(r"`[^`\n]*`|\([^)\s]*\)", "", PROSE)  # keys and links
    found = set(re.findall(r"\d[\d,]*[.,]\d+(?:\.\d+)?", plain)) - NOT_MEASURED
    assert len(found) >= 8
    assert not {number for number in found if number.replace(",", "") not in known}
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("https://") or (DOCS / target).exists(), target
    pictures = [part for part in PARTS if part.kind == "picture"]
    assert TEXT.count("![") == len(pictures) >= 3
    for part in pictures:
        data = (DOCS / part.body).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) < 150_000, part.body


def test_the_notebook_is_that_of_the_text() -> None:
    made = tutorial.as_file(tutorial.notebook(TEXT))
    assert tutorial.NOTEBOOK.read_text() == made, "run python docs/make_tutorial.py"
    book = json.loads(made)
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in book["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in ids)
    keys = {"cell_type", "id", "metadata", "source"}
    for cell in book["cells"]:
        is_code, source = cell["cell_type"] == "code", "".join(cell["source"])
        assert set(cell) == keys | ({"execution_count", "outputs"} if is_code else set())
        if is_code and not source.startswith("%%bash"):
            compile(source, cell["id"], "exec")


def test_parts_and_outputs_of_a_text() -> None:
    text = "One.\n\n```bash\necho a\n```\n\n```text\nold\n```\n\nTwo.\n\n```python\nx = 1\n```\n"
    found = [(part.kind, part.output) for part in tutorial.parts(text)]
    assert found == [("text", None), ("bash", "old\n"), ("text", None), ("python", None)]
    bare, new = text.replace("```text\nold\n```\n\n", ""), text.replace("old", "new")
    assert tutorial.with_outputs(text, ["new\n", ""]) == new
    assert tutorial.with_outputs(bare, ["new\n", ""]) == new
    assert tutorial.as_seen("a:  0%\ra: 100%\nb\n\nc") == "a: 100%\nb\n\nc\n"
    assert tutorial.with_outputs(text, ["", "1\n"]) == f"{bare[:-1]}\n\n```text\n1\n```\n"


def test_a_block_that_fails_is_an_error(tmp_path: Path) -> None:
    opened = tutorial.new_session(tmp_path)
    bodies = ("false\ntrue\n", "false | true\n", "echo $NOT_SET_ANYWHERE\n", "1 / 0\n")
    for body in bodies:
        python = "/ 0" in body
        said = "ZeroDivisionError" if python else "exit code 1"
        with pytest.raises(tutorial.TutorialError, match=said):
            opened.run(tutorial.Part("python" if python else "bash", body))
