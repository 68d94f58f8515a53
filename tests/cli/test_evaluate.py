"""`distcache.evaluate`: what training's evaluation says, at any number of ranks, and as Parquet."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launching import train

from distcache.checkpoint.manifest import Manifest
from distcache.cli.compose import Line, to_config
from distcache.errors import ConfigError
from distcache.evaluate import EvaluateConfig, check_outputs, config_of
from distcache.trainer.record import auc, log_loss

SMALL = (
    *("data.table_rows=[400,30]", "data.global_batch_size=32", "model.embedding_dim=4"),
    *("model.dense_arch=[4]", "model.over_arch=[1]", "cache.rows=200", "optim=adam"),
    *("trainer.device=cpu", "trainer.dtype=float64", "trainer.steps=6", "trainer.eval_steps=4"),
    *("parallel=data", "trainer.timeout_s=60", "run.dir=run"),
    *("trainer.checkpoint_every=3", "trainer.checkpoint_whole_every=2"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a run of two ranks in `run`, whose last checkpoint rests on the one before."""
    folder = tmp_path_factory.mktemp("evaluate")
    done = train(SMALL, folder, 2, ("-m", "distcache.train"))
    assert done.returncode == 0, done.stderr
    return folder


def evaluated(home: Path, ranks: int, *words: str) -> tuple[dict, dict[str, np.ndarray]]:
    files = ("predictions=out/a.parquet", "metrics=out/a.json")
    done = train([*files, *words], home, ranks, ("-m", "distcache.evaluate"))
    assert done.returncode == 0 and "AUC" in done.stdout, done.stdout + done.stderr
    columns = pq.read_table(home / "out" / "a.parquet").to_pydict()
    return json.loads((home / "out" / "a.json").read_text()), {
        name: np.array(values) for name, values in columns.items()
    }


def test_metrics_and_predictions_are_those_of_training_at_any_number_of_ranks(home):
    before = {path: path.stat().st_mtime_ns for path in (home / "run").rglob("*")}
    trained, found = json.loads((home / "run" / "summary.json").read_text()), {}
    for ranks, words in ((2, ()), (1, ()), (3, ("parallel=resident",))):
        said, rows = found[ranks] = evaluated(home, ranks, "resume=run", *words)
        assert (said["step"], said["samples"]) == (6, 128)
        for name in ("auc", "logloss", "ne"):
            assert said[name] == pytest.approx(trained[f"eval_{name}"], rel=1e-12)
        assert rows["sample"].tolist() == list(range(128))
        np.testing.assert_allclose(rows["logit"], found[2][1]["logit"], rtol=1e-10)
        assert rows["label"].tolist() == found[2][1]["label"].tolist()
    rows = found[1][1]
    assert auc(rows["logit"], rows["label"]) == found[1][0]["auc"]
    assert log_loss(rows["logit"], rows["label"]) == found[1][0]["logloss"]
    np.testing.assert_allclose(rows["probability"], 1 / (1 + np.exp(-rows["logit"])), rtol=1e-12)
    assert {path: path.stat().st_mtime_ns for path in (home / "run").rglob("*")} == before


def test_the_number_of_batches_means_the_same_in_train_and_evaluate(home):
    ids = np.arange(200) % 30
    table = pa.table({"label": ids % 2, "a": ids, "b": ids})
    pq.write_table(table, home / "clicks.parquet")
    finite = ("data=parquet", "data.path=clicks.parquet", "data.id_columns=[a,b]")
    finite += ("data.held_out=0.4", "data.global_batch_size=32")  # 80 held-out samples
    words = [*finite, "trainer.steps=1", "run.dir=all", "run.save=true", "trainer.eval_steps=all"]
    done = train([*SMALL, *words], home, 1, ("-m", "distcache.train"))
    assert done.returncode == 0, done.stderr
    trained = json.loads((home / "all" / "summary.json").read_text())
    for count, samples in (("all", None), (2, 64), (99, None)):
        said, rows = evaluated(home, 1, "resume=all", f"trainer.eval_steps={count}")
        assert said["samples"] == (samples or len(rows["label"]))
        if samples is None:
            assert said["auc"] == pytest.approx(trained["eval_auc"], rel=1e-12)
            assert said["samples"] == 80
    refused = train(["resume=all", "trainer.eval_steps=0"], home, 1, ("-m", "distcache.evaluate"))
    assert refused.returncode == 1
    assert "trainer.eval_steps=0 evaluates nothing: give trainer.eval_steps=all" in refused.stderr
    none = [*SMALL, *finite, "trainer.steps=1", "run.dir=none", "trainer.eval_steps=0"]
    done = train(none, home, 1, ("-m", "distcache.train"))
    assert done.returncode == 0 and "AUC" not in done.stdout
    assert json.loads((home / "none" / "summary.json").read_text())["eval_auc"] is None
    endless = ["trainer.eval_steps=all", "run.dir=endless"]
    done = train([*SMALL, *endless], home, 1, ("-m", "distcache.train"))
    assert done.returncode == 1 and "trainer.eval_steps=all" in done.stderr


def test_a_checkpoint_and_other_batches(home):
    folder = max(path.parent for path in (home / "run").rglob(".metadata"))
    assert "base" in Manifest.read(folder).header
    _, rows = evaluated(home, 1, f"resume={folder}", "trainer.eval_steps=2")
    assert len(rows["label"]) == 64


def line(given: str = "", **values) -> Line[EvaluateConfig]:
    own = EvaluateConfig()
    for name, value in values.items():
        setattr(own, name, value)
    return Line(own, frozenset(given.split()), ())


def test_keys_of_the_line_take_the_place_of_those_of_the_run(home, monkeypatch):
    monkeypatch.chdir(home)
    own = line("data.global_batch_size parallel resume", resume="run")
    own.values.data.global_batch_size, own.values.parallel.mode = 8, "host"
    config = to_config(config_of(own))
    assert (config.data.global_batch_size, config.parallel.mode) == (8, "host")
    assert (config.data.table_rows, config.optim.name) == ([400, 30], "adam")
    assert config.trainer.resume == str(home / "run") == config.run.dir


@pytest.mark.parametrize(
    ("given", "resume", "said"),
    [
        ("", "", "resume is not set"),
        ("", "out/none", "no config.yaml is there or above"),
        *(
            (key, "run", f"{key}: the configuration is that of the run")
            for key in ("experiment", "run.dir")
        ),
        ("", "own", "eval_loader="),
    ],
)
def test_what_cannot_be_evaluated(home, monkeypatch, given, resume, said):
    monkeypatch.chdir(home)
    (home / "own").mkdir(exist_ok=True)
    text = (home / "run" / "config.yaml").read_text().replace("name: synthetic", "name: own")
    (home / "own" / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        config_of(line(given, resume=resume))


def test_files_that_cannot_be_written_are_told_before_anything_is_read(home):
    with pytest.raises(ConfigError, match=r"metrics=.* is a folder"):
        check_outputs(None, home, ExitStack())
    with pytest.raises(ConfigError, match="predictions=/proc/none cannot be written"):
        check_outputs(Path("/proc/none/a.parquet"), None, ExitStack())
