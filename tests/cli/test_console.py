"""The console command, and arguments without `key=`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from distcache.__main__ import COMMANDS, main
from distcache.cli.compose import name_positional
from distcache.data.criteo_folder import PreprocessSettings
from distcache.errors import ConfigError
from distcache.evaluate import EvaluateConfig
from distcache.export import ExportConfig


def test_help_lists_commands_that_are_modules(capsys) -> None:
    assert main([]) == main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in shown and find_spec(f"distcache.{name}")


def test_installation_makes_the_command() -> None:
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    scripts = tomllib.loads(project.read_text())["project"]["scripts"]
    assert scripts == {"distcache": "distcache.__main__:main"}


@pytest.mark.parametrize(
    ("command", "words"),
    [("trian", "did you mean train?"), ("x", "there is train, evaluate, compare")],
)
def test_unknown_command_is_refused(command: str, words: str, capsys) -> None:
    assert main([command]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {command}: no such command: {words}")


def test_command_runs_its_module_and_returns_its_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distcache", "checkpoint", "verify", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip() == f"error: verify={tmp_path}: there is no checkpoint"


@pytest.mark.parametrize(
    ("schema", "arguments", "named"),
    [
        (EvaluateConfig, ["runs/x", "metrics=m.json"], ["metrics=m.json", "resume=runs/x"]),
        (EvaluateConfig, ["--cfg", "job", "runs/x"], ["--cfg", "job", "resume=runs/x"]),
        (ExportConfig, ["output", "o", "runs/x"], ["output=o", "resume=runs/x"]),
        (PreprocessSettings, ["day_0", "day_1", "output=o"], ["output=o", "input=day_0,day_1"]),
        (ExportConfig, ["+a=1", "~b"], ["+a=1", "~b"]),
    ],
)
def test_argument_without_key(schema: type, arguments: list[str], named: list[str]) -> None:
    assert name_positional(arguments, schema) == named


def test_argument_without_key_is_refused_where_its_key_is_not_clear() -> None:
    from distcache.checkpoint.__main__ import CheckpointConfig

    for schema, arguments, words in (
        (ExportConfig, ["runs/x", "runs/y"], "runs/x runs/y: give one resume"),
        (ExportConfig, ["runs/x", "resume=runs/y"], "runs/x resume=runs/y: give one resume"),
        (CheckpointConfig, ["runs/x"], "runs/x: this is no key=value: give key=value"),
        (CheckpointConfig, ["verify"], "verify: this is no key=value: give a value, verify="),
    ):
        with pytest.raises(ConfigError, match=words):
            name_positional(arguments, schema)
