"""The tutorial as a notebook, and its outputs: `python docs/make_tutorial.py [--run <folder>]`.

`docs/tutorial.md` is the source. Its parts become cells of `docs/tutorial.ipynb`:

* a `bash` block: a `%%bash` cell; one of `export NAME="..."` lines: a cell that sets os.environ;
* a `python` block: a cell;
* a `text` block right after one of these: the output of its cell;
* a picture after a comment `<!-- picture: <file of the run> -->`: a cell that shows that file;
* all else, blocks of other words included (`bash own data`): Markdown.

Without arguments the notebook is written anew. `--run` first runs all blocks in order in an empty
folder and puts what they said, and the pictures that they made, in place of those that are there.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
SOURCE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r"<!-- picture: (\S+) -->\n!\[[^\n]*\]\((\S+)\)")
_PART = re.compile(f"{_FENCE.pattern}|{_PICTURE.pattern}", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r'^export (\w+)="(.*)"$')


class TutorialError(Exception):
    """A block of the tutorial failed; what it said."""


@dataclass(frozen=True)
class Part:
    """`kind`: text, bash, python, picture, or the words of another fence. `body`: the Markdown, the
    code, or the picture's file in `docs/`; `made`: the file of the run that is shown there."""

    kind: str
    body: str
    output: str | None = None
    made: str = ""

    @property
    def runs(self) -> bool:
        """Whether it is code that runs."""
        return self.kind in ("bash", "python")


@dataclass
class Session:
    """What blocks leave for those after them: the folder, exported variables, Python's names."""

    folder: Path
    environment: dict[str, str]
    names: dict[str, Any] = field(default_factory=dict)

    def run(self, part: Part) -> str:
        """Run a block; what it said. Raises TutorialError where it fails."""
        settings = exports(part)
        if settings is not None:
            self.environment.update(settings)
            return ""
        return self._bash(part.body) if part.kind == "bash" else self._python(part.body)

    def _bash(self, code: str) -> str:
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", code],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        said = as_seen(done.stdout.decode())
        if done.returncode:
            raise TutorialError(f"exit code {done.returncode} of\n{code}\n{said}")
        return said

    def _python(self, code: str) -> str:
        said = io.StringIO()
        try:
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(said):
                exec(compile(code, SOURCE.name, "exec"), self.names)
        except Exception as error:
            raise TutorialError(f"{code}\n{said.getvalue()}{traceback.format_exc()}") from error
        return said.getvalue()


def new_session(folder: Path) -> Session:
    """In `folder`, with this Python and this checkout."""
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(DOCS.parent), *([before] if before else [])])
    return Session(folder, environment)


def as_seen(said: str) -> str:
    """Text as a terminal shows it in the end: of a line that was drawn anew, its last state."""
    lines = said.removesuffix("\n").split("\n") if said else []
    return "".join(line.rstrip("\r").rpartition("\r")[2].rstrip() + "\n" for line in lines)


def exports(part: Part) -> dict[str, str] | None:
    """The variables that a block of exports sets; None for other blocks."""
    found = [_EXPORT.match(line) for line in part.body.splitlines()]
    if part.kind != "bash" or not all(found):
        return None
    return {match[1]: match[2] for match in found if match}


def parts(text: str) -> list[Part]:
    """The parts of the Markdown, in order."""
    found: list[Part] = []
    end = 0
    for match in _PART.finditer(text):
        between = text[end : match.start()].strip("\n")
        if between:
            found.append(Part("text", between))
        end = match.end()
        kind, body, made, picture = match.groups()
        if picture:
            found.append(Part("picture", picture, made=made))
        elif kind == "text" and found and found[-1].runs and found[-1].output is None:
            if between:
                raise ValueError(f"an output that follows no block: {body[:60]}")
            found[-1] = replace(found[-1], output=body)
        else:
            found.append(Part(kind, body))
    rest = text[end:].strip("\n")
    return [*found, Part("text", rest)] if rest else found


def with_outputs(text: str, outputs: Sequence[str]) -> str:
    """`text` with the outputs of its blocks, in order, in place of those that are there."""
    left = iter(outputs)

    def pieces() -> Iterator[str]:
        end, follows = 0, False
        for match in _FENCE.finditer(text):
            kind, body = match.groups()
            between = text[end : match.start()]
            end = match.end()
            if kind == "text" and follows and not between.strip():
                follows = False
                continue
            yield between + match[0]
            follows = Part(kind, body).runs
            if follows:
                said = next(left)
                yield f"\n\n```text\n{said}```" if said else ""
        yield text[end:]

    return "".join(pieces())


def notebook(text: str) -> dict[str, Any]:
    """The notebook (nbformat 4.5) of the Markdown."""
    cells, count = [], 0
    for place, part in enumerate(parts(text)):
        cell: dict[str, Any] = {"id": f"part-{place:02d}", "metadata": {}}
        if part.runs or part.kind == "picture":
            count += 1
            cell |= {"cell_type": "code", "execution_count": count}
            cell |= {"source": _lines(_code(part)), "outputs": _outputs(part, count)}
        else:
            body = part.body
            if part.kind != "text":
                body = f"```{part.kind}\n{body}```"
            cell |= {"cell_type": "markdown", "source": _lines(body)}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def as_file(book: dict[str, Any]) -> str:
    """The text of the notebook's file."""
    return json.dumps(book, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _code(part: Part) -> str:
    if part.kind == "picture":
        return f'from IPython.display import Image\n\nImage("{part.made}")'
    settings = exports(part)
    if settings is not None:
        lines = [f'os.environ["{name}"] = "{value}"' for name, value in settings.items()]
        return "\n".join(["import os", "", *lines])
    return f"%%bash\n{part.body}" if part.kind == "bash" else part.body


def _outputs(part: Part, count: int) -> list[dict[str, Any]]:
    if part.kind == "picture":
        image = base64.b64encode((DOCS / part.body).read_bytes()).decode()
        data = {"image/png": image, "text/plain": ["<IPython.core.display.Image object>"]}
        return [
            {
                "output_type": "execute_result",
                "execution_count": count,
                "data": data,
                "metadata": {},
            }
        ]
    if part.output is None:
        return []
    return [{"output_type": "stream", "name": "stdout", "text": _lines(part.output)}]


def _lines(text: str) -> list[str]:
    return text.rstrip("\n").splitlines(keepends=True)


def run_all(folder: Path) -> None:
    """Run every block in the empty `folder`; write the outputs and pictures into `docs/`."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    text, session, outputs = SOURCE.read_text(), new_session(folder), []
    for part in parts(text):
        if part.runs:
            sys.stderr.write(f"{part.body}\n")
            outputs.append(session.run(part))
            sys.stderr.write(f"{outputs[-1]}\n")
        elif part.kind == "picture":
            (DOCS / part.body).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / part.made, DOCS / part.body)
    SOURCE.write_text(with_outputs(text, outputs))


def main() -> int:
    """Write the notebook, after a run if one is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="run all blocks here first")
    folder = parser.parse_args().run
    if folder is not None:
        run_all(folder)
    NOTEBOOK.write_text(as_file(notebook(SOURCE.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
