"""The package keeps its shape: imports never go up a floor, files stay short, logging not print."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "distcache"
FLOORS = (
    "config config_cache config_check config_data config_keys config_values layout shard_plan "
    "step_plan errors paths versions ops",
    "store cache streams comm",
    "planner popularity cost data models optim",
    "coordinator pipeline parallel embedding",
    "trainer evaluate checkpoint metrics run",
    "train fitting compare preprocess analyze plan export bench cli __init__",
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
FILES = sorted(PACKAGE.rglob("*.py"))
THIRD_PARTY = {"torch", "torchrec", "torchmetrics", "numpy", "hydra", "omegaconf", "tqdm"}
THIRD_PARTY |= {"yaml", "pyarrow", "fbgemm_gpu", "matplotlib", "triton", "numba"}


def part_of(file: Path) -> str:
    """The module or folder of the package that a file belongs to."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


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


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_down_or_sideways(file: Path) -> None:
    here = part_of(file)
    assert here in FLOOR, f"{here} is on no floor: add it to FLOORS"
    for name in imports_of(ast.parse(file.read_text())):
        top, part = (*name.split("."), "__init__")[:2]
        if top != "distcache":
            assert top in sys.stdlib_module_names | THIRD_PARTY, f"{name} is not in the lock"
            continue
        assert part in FLOOR, f"{name}: import from the module that has it"
        assert FLOOR[part] <= FLOOR[here], (
            f"floor {FLOOR[here]} imports {name}, floor {FLOOR[part]}"
        )
        above_config = FLOOR[here] >= FLOOR["trainer"] or FLOOR[here] == 0
        assert part != "config" or above_config, "below the trainer nothing sees a config"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_files_are_short_and_say_what_goes_wrong(file: Path) -> None:
    source = file.read_text()
    assert len(source.splitlines()) <= 300
    for node in ast.walk(ast.parse(source)):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: raise a distcache.errors one"
        assert not isinstance(node, ast.ExceptHandler) or node.type, f"line {node.lineno}: bare"
        printed = isinstance(node, ast.Name) and node.id == "print"
        assert not printed, f"line {node.lineno}: use logging"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 75, f"{node.name}: {length} lines with its docstring"


def test_the_rules_see_a_breach() -> None:
    tree = ast.parse("import os\ndef f():\n    from distcache.trainer import Trainer")
    assert imports_of(tree) == ["os", "distcache.trainer.Trainer"]
    assert FLOOR["trainer"] > FLOOR["cache"]
