"""The package keeps its shape: rooms without circles, pure rooms pure, errors, no prints."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "distcache"
FILES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts): ast.parse(file.read_text())
    for file in sorted(PACKAGE.rglob("*.py"))
}
THIRD_PARTY = {"torch", "torchrec", "torchmetrics", "numpy", "hydra", "omegaconf", "tqdm"}
THIRD_PARTY |= {"yaml", "pyarrow", "fbgemm_gpu", "matplotlib", "triton", "numba", "llvmlite"}
MOVES = {"engine", "parallel", "embedding", "store", "cache", "streams", "checkpoint", "trainer"}
"""What a pure room never imports: whatever moves rows, or knows a device or a run."""
PURE = ("layout", "step_plan", "planner", "replay", "models", "errors", "ops")
SIZES = {"sizing", "popularity"}
"""What the engine never imports: it gets slots, a placement and popularity as values."""
BELOW_CONFIG = "errors layout step_plan streams cache optim models ops store comm planner engine"


def imports_of(tree: ast.AST) -> list[str]:
    """Dotted names of everything imported anywhere in a file, `from a import b` as `a.b`."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def doors() -> dict[str, set[str]]:
    """Which rooms (top-level modules and folders) every room imports."""
    found = defaultdict(set)
    for file, tree in FILES.items():
        if file.endswith(".__main__"):  # a command of a folder, which nothing imports
            continue
        room = file.split(".")[0]
        for name in imports_of(tree):
            top, there = (*name.split("."), "__init__")[:2]
            if top == "distcache":
                found[room] |= {there} - {room, "__init__"}
            else:
                assert top in sys.stdlib_module_names | THIRD_PARTY, f"{name} is not in the lock"
    found.pop("__init__")  # the public names, imported when asked for
    return found


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Rooms that import each other in a circle, the first once more at its end; none without."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_imports_between_rooms_form_no_circle_and_the_pure_ones_move_nothing() -> None:
    rooms = doors()
    assert circle(rooms) == []
    assert not {room: rooms[room] & MOVES for room in PURE if rooms[room] & MOVES}
    for room in BELOW_CONFIG.split():
        above = {"config", "cli", "checkpoint", "trainer"}
        assert not rooms[room] & above, f"{room} imports {rooms[room] & above}"
        assert not rooms[room] & SIZES, f"{room} imports what decides slots and placement"
    assert not rooms["checkpoint"] & {"config", "cli", "trainer"}
    for name in ("cluster", "cost", "demand", "traffic"):
        imports = [name.split(".") for name in imports_of(FILES[f"sizing.{name}"])]
        rooms = {parts[1] for parts in imports if parts[0] == "distcache"}
        assert not rooms & MOVES, f"sizing/{name} moves rows"


@pytest.mark.parametrize("file", FILES)
def test_files_raise_errors_and_log(file: str) -> None:
    for node in ast.walk(FILES[file]):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: raise a distcache.errors one"
        assert not isinstance(node, ast.ExceptHandler) or node.type, f"line {node.lineno}: bare"
        printed = isinstance(node, ast.Name) and node.id == "print"
        assert not printed, f"line {node.lineno}: use logging"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            length = node.end_lineno - first.lineno + 1
            assert length <= 60, f"{node.name}: {length} lines beside its docstring"


def test_the_rules_see_a_breach() -> None:
    tree = ast.parse("import os\ndef f():\n    from distcache.trainer import Trainer")
    assert imports_of(tree) == ["os", "distcache.trainer.Trainer"]
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()})) == set("abc")
