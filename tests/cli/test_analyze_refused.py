"""The command line of the analysis: what it refuses, and its help."""

from __future__ import annotations

from pathlib import Path

import pytest
from analyses import SMALL, refused

from distcache.analyze import main
from distcache.cli.analyze_run import AnalyzeConfig, check_line
from distcache.cli.compose import read_line
from distcache.errors import ConfigError
from distcache.store import memory as available


def test_data_without_a_lookup(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    said = refused(capsys, *SMALL, "data.bag_size=0", f"output={tmp_path}")
    assert "look up no id at all" in said and "data.bag_size" in said
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    source = ("data=criteo", f"data.path={empty}", f"output={tmp_path}")
    assert "empty.txt is empty" in refused(capsys, *source)


def test_memory_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(available, "available_memory", lambda: 100_000)
    said = refused(capsys, *SMALL, f"output={tmp_path}")
    assert "counts of all lookups" in said and "lower analyze.memory" in said


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("analyze.target_hit_rate=1", "analyze.target_hit_rate=1.0: give a share"),
        ("analyze.sample=1.5", "analyze.sample=1.5: give auto, or a share"),
        ("analyze.sample=some", "analyze.sample=some: give auto"),
        ("analyze.memory=4x", "analyze.memory=4x: give a number of bytes"),
        ("analyze.memory=100", "analyze.memory=100 is too little"),
        ("analyze.replay=0", "analyze.replay=0 is out of range"),
        ("analyze.policies=[lru]", "analyze.policies says what simulate=true replays"),
        (
            "simulate=true analyze.policies=best",
            "analyze.policies=best is unknown: choose among lookahead",
        ),
        ("simulate=true analyze.policies=lru-lfu", "analyze.policies=lru-lfu is unknown"),
        ("analyze.sizes=0", "analyze.sizes=0.0: give shares"),
        ("analyze.sizes=1.5", "analyze.sizes=1.5: give shares"),
        ("analyze.world_sizes=0", "analyze.world_sizes="),
        (
            "analyze.hit_rate=1",
            "analyze.hit_rate: no such key: did you mean analyze.target",
        ),
        ("run.dir=here", "run.dir: nothing is trained"),
        ("trace=x.txt", "trace=x.txt is a trace to simulate: give simulate=true"),
        ("--simulate", "--simulate: write simulate=..."),
        ("analyze.output=x", "analyze.output: no such key: did you mean output?"),
        ("analyze.replay=many", "analyze.replay=many: give a whole number"),
        ("data.nonsense=1", "nonsense"),
        ("cache.ratio=2", "cache.ratio=2"),
    ],
)
def test_what_makes_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture, word: str, named: str
) -> None:
    assert named in refused(capsys, f"output={tmp_path}", *SMALL, *word.split())


def test_help_names_every_key(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for key in ("analyze.target_hit_rate=0.95", "analyze.sample=auto", "simulate=false", "trace="):
        assert key in shown


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    said = refused(capsys, *SMALL, f"output={tmp_path / 'file/out'}")
    assert "output=" in said and "name another folder" in said
    with pytest.raises(ConfigError, match="nothing is trained"):
        check_line(read_line("analyze", AnalyzeConfig, ["parallel=host"]))
