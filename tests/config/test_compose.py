"""Every group and experiment composes, is typed, and passes the checks."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from distcache.cli.compose import (
    Composed,
    checked_config,
    compose_command_line,
    compose_overrides,
    conf_dir,
    to_config,
)
from distcache.comm.rendezvous import Place
from distcache.config.tree import Config
from distcache.data.criteo_folder import KAGGLE_ROWS, TERABYTE_ROWS
from distcache.errors import ConfigError

GROUPS = ("model", "data", "cache", "store", "parallel", "optim", "trainer")


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def compose(*overrides: str) -> Config:
    return checked_config(compose_overrides(overrides))


def composed(monkeypatch, *words: str) -> Composed:
    """What comes of a command line."""
    monkeypatch.setattr(sys, "argv", ["train", *words])
    return compose_command_line(Place(0, 1, 0, 1))


@pytest.fixture
def lines(tmp_path: Path) -> str:
    path = tmp_path / "train.txt"
    path.write_text("")
    return f"data.path={path}"


@pytest.mark.parametrize(
    ("group", "option"), [(group, option) for group in GROUPS for option in options(group)]
)
def test_every_option_composes_and_passes(group, option, lines):
    more = {"criteo": [lines], "interactions": [lines]}
    more["parquet"] = [lines, "data.id_columns=[c]", "data.table_rows=[10]"]
    config = compose(f"{group}={option}", *more.get(option, []))
    if group not in ("cache", "trainer"):
        chosen = getattr(config, group)
        assert (chosen.mode if group == "parallel" else chosen.name) == option


@pytest.mark.parametrize("name", [name for name in options("experiment") if name != "interactions"])
@pytest.mark.parametrize("data", [None, "synthetic"])
def test_every_experiment_composes_and_passes(name, data, lines):
    overrides = [f"experiment={name}"]
    if data is not None:
        overrides += [f"data={data}", "trainer.steps=10"]
    elif name.startswith("criteo"):
        overrides.append(lines)
    config = compose(*overrides)
    kaggle = name in ("quickstart", "criteo_kaggle")
    assert config.data.table_rows == list(KAGGLE_ROWS if kaggle else TERABYTE_ROWS)


MADE = {
    "experiment=criteo_kaggle LINES": "model.name=dlrm model.embedding_dim=16 "
    "model.dense_arch=[512,256,64,16] model.over_arch=[512,256,1] optim.name=sgd "
    "optim.dense_lr=0.1 optim.embedding_lr=0.1 data.global_batch_size=128 trainer.steps=null",
    "experiment=criteo_terabyte LINES": "model.embedding_dim=64 data.global_batch_size=2048 "
    "model.dense_arch=[512,256,64] model.over_arch=[512,512,256,1]",
    "experiment=mlperf": "model.name=dcn_v2 model.embedding_dim=128 model.dense_arch=[512,256,128] "
    "model.over_arch=[1024,1024,512,256,1] model.cross_layers=3 model.cross_rank=512 "
    "optim.name=adagrad optim.dense_lr=0.005 optim.embedding_lr=0.005 "
    "data.global_batch_size=65536 trainer.steps=null",
    "experiment=quickstart": "cache.ratio=0.015 data.global_batch_size=2048 model.embedding_dim=16",
    "experiment=interactions LINES": "data.name=interactions data.table_rows=[] "
    "optim.embedding_lr=0.1",
    "experiment=quickstart model=dcn_v2 cache.ratio=null cache.rows=900 optim=adam": (
        "model.name=dcn_v2 cache.rows=900 cache.ratio=null optim.name=adam"
    ),
    "": "trainer.steps=200",
    "data=criteo LINES": "trainer.steps=null",  # one epoch of data that ends
    "model.embedding_dim=32": "model.dense_arch=[128,64,32]",
    "run.dir=here": "run.dir=here",
    **{f"run.digest={word}": f"run.digest='{word.lower()}'" for word in ("true", "auto", "True")},
    "trainer.amp=off": "trainer.amp='off'",
    "data.table_rows=[5,6,7] data.bag_size=[1,2.5,3]": "data.bag_size=[1,2.5,3]",
    "optim=adam optim.eps=1e-7 cache.ratio=0.1": "optim.eps=1e-7 cache.ratio=0.1 "
    "optim.betas=[0.9,0.999]",
}
"""Command lines, and what they come to: experiments have the published settings."""


@pytest.mark.parametrize("overrides", MADE)
def test_what_a_command_line_comes_to(overrides, lines):
    config = compose(*overrides.replace("LINES", lines).split())
    for word in MADE[overrides].split():
        key, _, text = word.partition("=")
        expected = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]
        found = attrgetter(key)(config)
        assert found == expected and repr(found) == repr(expected), key
    assert "mlperf" not in overrides or sum(config.data.bag_size) == 214


def test_the_text_that_ranks_share_has_all_values_in_it():
    assert "${" not in compose_overrides(["optim=adam"])
    assert compose("parallel=host").run.dir.endswith("-host")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("cache.row=5", "cache.row: no such key: did you mean cache.rows?"),
        ("trainer.max_steps=5", "did you mean trainer.eval_steps or trainer.steps or "),
        ("batch_size=5", "did you mean data.global_batch_size or data.bag_size"),
        ("lr=5", "did you mean optim.dense_lr or optim.embedding_lr?"),
        ("cache.order=popularity", "cache.order: this key was removed ("),
        ("cache.admission=true", "cache.admission: this key was removed ("),
        ("trainer.timeout_s=1e9", "give seconds above 0, at most 10^8"),
        ("optim.weight_decay=1e308", "optim.weight_decay=1e+308 is too large for float32"),
        ("optm=adagrad", "optm: no such key: did you mean optim"),
        ("modle=dlrm", "modle: no such key: did you mean model"),
        ("zzz=5", "zzz: no such key: `--cfg job` shows all keys"),
        ("cache=1", "cache=1: cache is a section of "),
        ("cache=wide", "cache=wide: no such cache: there is default"),
        ("run.dir=", "run.dir is empty: name a folder"),
        ("cache.rows=many", "cache.rows"),
        ("model=transformer", "model=transformer: no such model: there is dcn_v2, dlrm"),
        ("experiment=mlpref", "no such experiment: did you mean experiment=mlperf?"),
        ("data.table_rows=[3,x]", "data.table_rows=[3, 'x']: give a list of whole numbers"),
        ("optim.dense_lr=[1]", "optim.dense_lr"),
        ("+cache.lookahed=3", "did you mean cache.lookahead"),
        ("+speed=1", "speed: no such key"),
        ("model.cross_rank='${x}'", "model.cross_rank: Interpolation key 'x' not found: write"),
        ("run.dir='${oc.env:UNSET_HERE}'", "run.dir: KeyError raised while resolving"),
        ("data.table_rows=[9007199254740993]", "9,007,199,254,740,993 rows are more than"),
        ("data.table_rows=???", "data.table_rows: a value is needed"),
        ("optim.dense_lr=${optim.rate}", "rate"),
        ("rows==", "rows==: this is no key=value that can be read"),
        ("optim", "optim: this is no key=value that can be read"),
    ],
)
def test_wrong_keys_types_and_groups_are_named(override, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        compose(override)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("cache.row=5", "cache.row: no such key: did you mean cache.rows?"),
        ("cache.ratio=0.1,0.2 steps=1 -m", "steps: no such key: did you mean trainer.steps"),
        ("--config-dir mine cache.row=5", "cache.row: no such key"),
        ("model.cross_rank='${x}'", "model.cross_rank: Interpolation key 'x' not found: write"),
    ],
)
def test_the_command_line_names_unknown_keys_before_hydra(words, named, monkeypatch):
    with pytest.raises(ConfigError, match=re.escape(named)):
        composed(monkeypatch, *words.split())


VALID = [
    *("optim={name:adam,eps:1e-6}", "data={global_batch_size:64}", "cache={}", "model=[dcn_v2]"),
    *("parallel={mode:host}", "cache=[default]", "experiment=quickstart"),
    *("++cache.rows=5", "hydra.verbose=false", "cache.replicated_rows=null"),
]


@pytest.mark.parametrize("override", VALID)
def test_what_hydra_takes_is_not_refused(override, monkeypatch, tmp_path):
    assert composed(monkeypatch, override, f"run.dir={tmp_path}").text is not None


@pytest.mark.parametrize("flags", ["-c job", "-p trainer -c job", "-c job --resolve", "--info all"])
def test_hydras_own_flags_are_its_own(flags, monkeypatch, capsys):
    assert composed(monkeypatch, *flags.split(), "trainer.steps=7").text is None
    assert "steps: 7" in capsys.readouterr().out


def test_help_explains_every_key_with_its_value(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        composed(monkeypatch, "--help", "trainer.steps=7")
    shown = " ".join(capsys.readouterr().out.split())
    for section in fields(Config):
        for key in fields(section.default_factory):
            start = f" {section.name}.{key.name}="
            text = shown.partition(start)[2].partition(" ")[2]
            assert text and not text.startswith((f"{section.name}.", "Powered")), start
    assert " trainer.steps=7 Training steps; null: one epoch. " in shown
    assert " model.name=dlrm One of dlrm, dcn_v2. " in shown


OWN = ["--config-dir={0}", "--config-di {0}", "-cd {0}", "hydra.searchpath=[{0}]"]


@pytest.mark.parametrize("where", OWN)
def test_groups_of_an_own_folder_are_hydras_to_judge(where, monkeypatch, tmp_path):
    head = "# @package _global_\n"
    for name, text in (
        ("site/small", "trainer:\n  steps: 7\n"),
        ("site/other", "trainer:\n  steps: 9\n"),
        ("experiment/mine", "defaults:\n  - /site: small\n"),
    ):
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(head + text)
    words = [*where.format(tmp_path).split(), "experiment=mine", f"run.dir={tmp_path}"]
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    for more, steps in (((), 7), (("site=other",), 9)):
        text = composed(monkeypatch, *words, *more).text
        assert text is not None and to_config(text).trainer.steps == steps
    assert (root.level, root.handlers) == before  # Hydra's own would show what libraries say


def test_the_packaged_folder_comes_first(tmp_path: Path) -> None:
    package = tmp_path / "distcache"
    package.mkdir()
    with pytest.raises(ConfigError, match=r"no configuration folder at .*reinstall"):
        conf_dir(package)
    for folder in (tmp_path / "conf", package / "conf"):
        folder.mkdir()
        assert conf_dir(package) == folder
