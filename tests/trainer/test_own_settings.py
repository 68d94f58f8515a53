"""distcache.fit without ranks: wrong settings, what does not fit, TorchRec configs, the example."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from launching import TORCHRUN, environment, run
from own_items import ROWS, SCENARIO, slices
from scenarios import SmallNet

import distcache
from distcache.config.keys import flat_settings
from distcache.errors import ConfigError, StepTooLargeError
from distcache.fitting import own_config


def test_wrong_settings_are_named(tmp_path):
    def start(**changes):
        settings = changes.pop("settings", {})
        return distcache.fit([], SCENARIO.tables, SmallNet(5, 24), settings=settings, **changes)

    for changes, message in (
        ({"parallel": "fast"}, "parallel.mode=fast"),
        ({"optimizer": "lion"}, "optim.name=lion"),
        ({"settings": {"cache.row": 3}}, "cache.row: no such key: did you mean cache.rows"),
        ({"settings": {"cache": 3}}, "cache=3: cache is a section"),
        ({"settings": {"cache": {"row": 3}}}, "cache.row: no such key: did you mean cache.rows"),
        ({"settings": {5: 3}}, "5: no such key"),
        ({"settings": ["cache.rows"]}, r"settings=\['cache.rows'\] is no mapping"),
        ({"settings": {"model.pooling": "mean"}}, r"settings\['model.pooling'\] means nothing"),
        ({"settings": {"model": {"embedding_dim": 4}}}, r"\['model.embedding_dim'\] means nothing"),
        ({"settings": {"data.zipf": 2.0}}, r"\['data.zipf'\] means nothing to batches of your own"),
        ({"settings": {"parallel.mode": "host"}}, r"\['parallel.mode'\]: .* argument parallel="),
        ({"settings": {"optim": {"name": "sgd"}}}, r"\['optim.name'\]: .* argument optimizer="),
        ({"settings": {"run.sweep_ranks": 2}}, r"\['run.sweep_ranks'\] means nothing"),
        ({"settings": {"cache.rows": "many"}}, "cache.rows=many: give a whole number or null"),
        ({"settings": {"cache.rows": 3, "cache.ratio": 0.1}}, "contradict each other"),
        (
            {"settings": {"cache.placement": "auto"}},
            r"auto .* settings\['data.global_batch_size'\]",
        ),
        ({"settings": {"cache.placement": "mixed"}}, r"mixed .* give settings\['data.global_b"),
        ({"settings": {"cache.split": "by_curve"}}, r"cache.split=by_curve .* give settings"),
        ({"settings": {"cache.policy": "static"}}, r"cache.policy=static .* give settings"),
        ({"settings": {"trainer.eval_every": 3}}, "there is no eval_loader"),
        (
            {"settings": {"data.batching": "hot_cold", "cache.statistics": "x"}},
            "batches of your own loader",
        ),
        ({"settings": {"trainer.resume": str(tmp_path / "no")}}, "is no folder"),
        ({"epochs": 0}, "epochs=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(**changes)
    with pytest.raises(ConfigError, match="tables is empty"):
        distcache.fit([], [], SmallNet(5, 24))


@pytest.mark.parametrize("settings", [{"run.digest": False}, {"run": {"digest": "false"}}])
def test_words_that_python_has_as_booleans(settings):
    config = own_config("data", "sgd", flat_settings(settings), 1)
    assert config.run.digest == "false"


def test_the_batch_size_may_stand_in_its_section():
    settings = {"cache.placement": "auto", "data": {"global_batch_size": 64}}
    assert own_config("data", "sgd", flat_settings(settings), 1).data.global_batch_size == 64


def test_keys_without_use_are_told_by_fit_too(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("distcache"), "propagate", True)
    caplog.set_level(logging.INFO)
    own = {"optim.betas": [0.5, 0.6], "cache": {"placement": "sharded"}, "run.save": False}
    distcache.fit(
        slices(0, 1, 2),
        SCENARIO.tables,
        SCENARIO.model(),
        settings=ROWS | own | {"run.dir": str(tmp_path)},
    )
    # A set, for pytest may listen to a logger that did not propagate besides.
    assert {line for line in caplog.messages if "without use" in line} == {
        "without use in this mode, on 1 rank(s): cache.placement=sharded, optim.betas=[0.5, 0.6]"
    }


def test_what_does_not_fit_is_named(tmp_path):
    class Column(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = SCENARIO.model()

        def forward(self, dense, pooled):
            return self.net(dense, pooled).unsqueeze(1)

    settings = ROWS | {"run.dir": str(tmp_path), "run.save": False}
    (tmp_path / "bad_lines.json").touch()  # of an earlier run in this folder
    for mode in ("data", "hybrid"):
        with pytest.raises(ConfigError, match=r"returned \[\d+, 1\] for \d+ samples.*squeeze"):
            distcache.fit(slices(0, 1), SCENARIO.tables, Column(), parallel=mode, settings=settings)
    assert not (tmp_path / "bad_lines.json").exists()
    few = settings | {"cache.rows": 20}
    with pytest.raises(StepTooLargeError, match="or lower the batch size of your loaders"):
        distcache.fit(slices(0, 1), SCENARIO.tables, SCENARIO.model(), settings=few)


def test_torchrec_configs_are_tables():
    from torchrec import EmbeddingBagConfig, PoolingType

    from distcache.fitting import table_specs

    config = EmbeddingBagConfig(
        name="t", embedding_dim=8, num_embeddings=50, feature_names=["a"], pooling=PoolingType.MEAN
    )
    assert table_specs([config]) == [distcache.TableSpec("t", 50, 8, ("a",), "mean")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_runs(checkout, tmp_path, ranks):
    launcher = [sys.executable]
    if ranks > 1:
        launcher = [*TORCHRUN, "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    done = run(
        [*launcher, str(checkout / "examples" / "own_data.py")],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "20 steps, final loss 0." in done.stdout
