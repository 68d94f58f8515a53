"""Each wrong value is refused with its key, its value and a way out; so are versions of
torch, fbgemm and torchrec that do not fit."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache

import pytest
import torch
from omegaconf import OmegaConf

from distcache import versions
from distcache.cli.compose import compose_overrides, to_config
from distcache.config import checks as config_check
from distcache.config import rules_of
from distcache.config.checks import check, check_values
from distcache.config.tree import CacheConfig, Config
from distcache.errors import ConfigError
from distcache.planner.victims import DEFAULT, Policy
from distcache.versions import check_versions, require_hybrid

PARQUET = "data=parquet data.id_columns=[a,b] data.table_rows=[5,6] "
MIXED = "cache.placement=mixed "

REFUSED = {
    "cache.rows=5 cache.ratio=0.1": ("cache.rows=5 and cache.ratio=0.1", "one of them"),
    "cache.rows=5 cache.bytes=9": ("cache.rows=5 and cache.bytes=9", "one of them"),
    "cache.policy=lru cache.tail=frequency cache.statistics=.": ("cache.tail=frequency", "one of"),
    "cache.tail=lfu cache.half_life=0": ("cache.half_life=0", "give auto, or steps from 1"),
    "cache.tail=lfu cache.half_life=long": ("cache.half_life=long", "give auto"),
    "cache.tail=lru cache.half_life=9": ("cache.half_life=9", "cache.tail=lfu or cache.policy=lfu"),
    "cache.warm_start=0.5": ("cache.warm_start=0.5 fills slots", "give cache.statistics"),
    "cache.split=by_curve": ("cache.split=by_curve needs", "give cache.statistics"),
    "cache.split=fair": ("cache.split=fair is unknown",),
    "cache.split={t_cat_0:~-3}": ("cache.split: t_cat_0=-3",),
    MIXED + "cache.replicated_rows=7": ("cache.replicated_rows=7", "t_cat_0:1000"),
    MIXED + "cache.replicated_rows={t_cat_0:~-1}": ("t_cat_0=-1", "at least 0"),
    MIXED + "cache.replicated_rows={a:~1} cache.replicated_share=0.1": ("give one of them",),
    "cache.placement=sharded cache.reduction=native": ("native", "cache.placement=sharded"),
    "cache.state=home cache.reduction=native": ("native", "cache.state=home"),
    "optim.betas=[0.9]": ("optim.betas=[0.9]", "two numbers"),
    "optim.betas=[0.9,1.0]": ("optim.betas=[0.9, 1.0]", "two numbers"),
    "optim=adam optim.eps=0": ("optim.eps=0", "1e-8"),
    "optim=adagrad optim.eps=0": ("optim.eps=0", "1e-8"),
    "optim=counted_adam optim.eps=0": ("optim.eps=0", "counted_adam"),
    "optim=momentum_sgd optim.momentum=1": ("optim.momentum=1 ", "below 1"),
    "optim=ftrl optim.lr_power=0": ("optim.lr_power=0.0", "below 0"),
    "optim=ftrl optim.weight_decay=0.1": ("optim.weight_decay=0.1 is a key of", "optim=ftrl"),
    "optim=adam optim.l1=0.1": ("optim.l1=0.1 is a key of optim=ftrl", "optim=adam"),
    "optim.warmup_steps=10 optim.decay_start=5 optim.decay_steps=9": ("optim.decay_start=5", "10"),
    "trainer.amp=bf16 trainer.dtype=float64": ("trainer.amp=bf16", "trainer.dtype=float32"),
    "trainer.resume=/no/such/run": ("trainer.resume=/no/such/run is no folder", "run folder"),
    "trainer.steps=null": ("trainer.steps=null", "data.samples=<"),
    "trainer.eval_every=5 trainer.eval_steps=0": ("trainer.eval_every=5", "eval_steps=all"),
    "trainer.log_level=loud": ("trainer.log_level=LOUD", "DEBUG"),
    "trainer.timeout_s=0": ("trainer.timeout_s=0", "above 0"),
    "model.over_arch=[64,2]": ("model.over_arch=[64, 2]", "append a 1"),
    "model.over_arch=[]": ("model.over_arch=[]", "at least 1"),
    "model.dense_arch=[64,8]": ("model.dense_arch=[64, 8]", "model.embedding_dim=16"),
    "model.dense_arch=[0,16]": ("model.dense_arch=[0, 16]", "at least 1"),
    "model=dcn_v2 model.table_dims=[16,8]": ("model.table_dims has 2", "data.table_rows has 8"),
    "data.table_rows=[]": ("data.table_rows=[]", "at least 1"),
    "data.table_rows=[5,0]": ("data.table_rows=[5, 0]", "at least 1"),
    "data.bag_size=many": ("data.bag_size=many", "give an int"),
    "data.bag_size=true": ("data.bag_size=True", "give an int"),
    "data.bag_size=-2": ("data.bag_size=-2", "at least 0"),
    "data.zipf=nan": ("data.zipf=nan is out of range", "at least 0"),
    "data.bag_size=[1,2]": ("data.bag_size has 2", "data.table_rows has 8"),
    "data.weighted=true model.pooling=mean": ("data.weighted=true", "model.pooling=sum"),
    "data=criteo": ("data.path", "data=synthetic"),
    "data=criteo data.path=/no/such/file": ("data.path=/no/such/file", "no such file"),
    "data=criteo data.path=FOLDER": ("is a folder without manifest.json", "distcache.preprocess"),
    "data=criteo data.path=HERE data.table_rows=[5,6]": ("data.table_rows has 2", "26"),
    "data=criteo data.path=HERE data.dense_features=4": ("data.dense_features=4", "13"),
    "parallel=hybrid model.embedding_dim=6 model.dense_arch=[6]": ("width 6", "8"),
    "parallel=hybrid model=dcn_v2 data.table_rows=[5,6] model.table_dims=[8,10]": ("10", "12"),
    "parallel=hybrid trainer.dtype=float64": ("trainer.dtype=float64", "parallel=data"),
    "parallel=hybrid optim=adam trainer.device=cpu": ("optim=adam", "rowwise_adagrad"),
    "parallel=hybrid optim=ftrl": ("optim=ftrl", "one of these, or parallel=data"),
    "parallel=hybrid optim=sgd optim.weight_decay=0.1": ("optim.weight_decay=0.1", "parallel=data"),
    "data=parquet": ("data.path is not set, and data=parquet reads files", "=<file or glob>"),
    PARQUET + "data.path=none*": ("data.path=none*: no such file",),
    PARQUET + "data.path=.": ("data.path=. is a folder", "'./*'"),
    "data=parquet data.path=HERE": ("data.id_columns is empty",),
    PARQUET + "data.path=HERE data.table_rows=[5]": ("2 entries, data.table_rows 1",),
    PARQUET + "data.path=HERE data.table_rows=[5,0]": ("data.table_rows=[5, 0]",),
    PARQUET + "data.path=HERE data.label_column=null": ("data.label_column is not set",),
    PARQUET + "data.path=HERE data.weight_columns={c:~w}": ("its keys from data.id_columns",),
    PARQUET + "data.path=HERE data.on_bad_line=skip": ("Parquet has no lines",),
    PARQUET + "data.path=HERE data.held_out=0.1 data.held_out_path=HERE": ("contradict",),
    PARQUET + "data.path=HERE data.weight_columns={a:~w} model.pooling=mean": ("pooling=mean:",),
    "data=interactions data.path=HERE data.delimiter=''": ("data.delimiter is empty",),
    "data=interactions data.path=HERE data.table_rows=[1,2,3]": ("rows of users and items",),
    "data=interactions data.path=HERE data.held_out=0.1": ("data.held_out_by=last, which holds",),
    "data.batching=hot_cold data.samples=9": ("needs to know which rows are hot: give cache.st",),
    "data.batching=hot_cold cache.statistics=x": ("data.samples=null is a stream without",),
    "data.batching=hot_cold data.hot_rows=-1": ("data.hot_rows=-1: give auto, a whole number",),
    "data.batching=hot_cold data.hot_rows=1.5": ("data.hot_rows=1.5: give auto",),
    "data.batching=hot_cold data.hot_rows=many": ("data.hot_rows=many: give auto",),
    "data=criteo data.path=FOLDER/ids.npy": ("is a file of", "give the folder, data.path=FOLDER"),
    "data=criteo data.path=/dev/zero": ("data.path=/dev/zero is no regular file but",),
    "data=interactions data.path=FOLDER/pipe": ("pipe is no regular file but",),
}


@pytest.fixture(autouse=True)
def no_fbgemm(monkeypatch):
    monkeypatch.setattr(config_check, "require_hybrid", lambda: None)


@pytest.fixture
def files(tmp_path) -> Callable[[str], list[str]]:
    """Overrides with the paths of a file of lines (HERE) and of the folder that it is in."""
    for name in ("lines", "day_0", "day_1"):
        (tmp_path / name).write_text("")
    os.mkfifo(tmp_path / "pipe")
    return lambda text: (
        text.replace("HERE", f"{tmp_path}/lines").replace("FOLDER", f"{tmp_path}").split()
    )


@lru_cache
def composed(*groups: str) -> str:
    return compose_overrides(groups)


def configured(overrides: list[str]) -> Config:
    """A configuration whose groups are composed once, for speed."""
    base = composed(*(word for word in overrides if "." not in word.partition("=")[0]))
    overrides = [word.replace("~", " ") for word in overrides]
    values = OmegaConf.from_dotlist([word for word in overrides if "." in word.partition("=")[0]])
    text = OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(base), values))
    return to_config(text)


def checked(overrides: list[str]) -> list[str]:
    return check(configured(overrides))


@pytest.mark.parametrize("overrides", REFUSED)
def test_refused_with_key_value_and_way_out(overrides, tmp_path, files):
    if ".npy" in overrides:
        (tmp_path / "manifest.json").touch()
        (tmp_path / "ids.npy").touch()
    with pytest.raises(ConfigError) as caught:
        checked(files(overrides))
    for words in REFUSED[overrides]:
        assert words.replace("FOLDER", str(tmp_path)) in str(caught.value)


def sides(rule) -> tuple[list, list]:
    """Values outside the rule of a field, and values within."""
    if "choice" in rule:
        return ["mru"], rule["choice"]
    if "counted" in rule:
        return [rule["counted"] - 1, "far", True, 1.5], ["auto", rule["counted"]]
    if "all_or" in rule:
        return [rule["all_or"] - 1, "auto", True, 1.5], ["all", rule["all_or"] + 1]
    if "share" in rule:
        low, high = rule["share"][0] == "(", rule["share"][-1] == ")"
        ends = [0] * low + [1] * high, [0] * (not low) + [1] * (not high)
        return [-0.1, 1.1, math.nan, "many", True, *ends[0]], [0.5, *ends[1]]
    if "size" in rule:
        return [rule["size"] - 1, "many", True, 1.5], [rule["size"], 1 << 40]
    if "least" in rule:
        return [rule["least"] - 1, math.nan, math.inf], [rule["least"], rule["least"] + 1]
    return [], ["neither this nor the default"]


def test_rules_of_single_values():
    """Each rule that stands beside a field of the tree, on both sides of its bound, and with the
    field that says whether it is read."""
    plain, rules = to_config(composed()), {key: r for key, r in rules_of(Config).items() if r}
    assert len(rules) > 60 and sum("only" in rule for rule in rules.values()) > 25
    for key, rule in rules.items():
        section, name = key.split(".")
        config = deepcopy(plain)
        part, (wrong, fine) = getattr(config, section), sides(rule)
        for word in rule.get("only", [""]):
            if "only" in rule:
                setattr(part, rule["by"], word)
            for value in wrong:
                setattr(part, name, value)
                with pytest.raises(ConfigError, match=re.escape(f"{key}={value} is ")) as caught:
                    check_values(config)
                assert re.search("choose |at least |above 0", str(caught.value))
            for value in fine:
                setattr(part, name, value)
                check_values(config)
        if "only" in rule:
            known = rules[f"{section}.{rule['by']}"]["choice"]
            setattr(part, rule["by"], next(word for word in known if word not in rule["only"]))
            words = re.escape(f"={rule['only'][0]}") + ".*: leave it out"
            with pytest.raises(ConfigError, match=f"^{key}=.* is a key of {section}.*{words}"):
                check_values(config)
    plain.data.batching = "split"
    with pytest.raises(ConfigError, match=r"data\.batching=split is unknown"):
        check_values(plain)


ACCEPTED = {
    "cache.ratio=1": "",
    "cache.lookahead=0 cache.prefetch=0": "",
    "optim=adagrad optim.eps=0 optim.initial_accumulator=0.1": "",
    "trainer.steps=null data.samples=100": "",
    "data.weighted=true data.bag_size=3.5": "",
    "model=dcn_v2 model.table_dims=[16,8,6,5,4,3,2,1]": "",
    "model.embedding_dim=6 model.dense_arch=[6] optim=adam trainer.dtype=float64": "",
    "parallel=hybrid optim=adagrad": "",
    "trainer.log_level=debug": "",
    "trainer.eval_every=5 trainer.eval_steps=1": "",
    PARQUET + "data.path=HERE data.weight_columns={a:~w} data.nulls=zero": "",
    "data=interactions data.path=HERE": "",
    "data=criteo data.path=FOLDER/day_*": "",
    "cache.rows=150 data.table_rows=[100,50]": "",
    "cache.rows=500 data.table_rows=[100,50]": "cache.rows=500 is capped: the tables have 150 rows",
    "parallel=hybrid optim=rowwise_adagrad": "row states of their own",
    "trainer.checkpoint_every=9 run.save=false": "trainer.checkpoint_every=9: run.save=false keeps",
}


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_accepted_with_a_warning_or_none(overrides, files):
    warnings = checked(files(overrides))
    assert len(warnings) == bool(ACCEPTED[overrides])
    assert ACCEPTED[overrides] in "".join(warnings)


def test_adam_of_hybrid_wants_a_gpu(monkeypatch):
    for gpus in (0, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        if gpus:
            assert checked(["parallel=hybrid", "optim=adam"]) == []
            continue
        with pytest.raises(ConfigError, match="fbgemm has no Adam on the CPU"):
            checked(["parallel=hybrid", "optim=adam"])


def test_only_hybrid_looks_for_fbgemm(monkeypatch):
    looked = []
    monkeypatch.setattr(config_check, "require_hybrid", lambda: looked.append(1))
    for mode in ("data", "resident", "host", "hybrid"):
        assert checked([f"parallel={mode}"]) == [] and len(looked) == (mode == "hybrid")


@pytest.mark.parametrize("word", ["off", "'off'", "false"])
def test_off_is_off_however_it_is_written(word):
    own = OmegaConf.create(f"trainer: {{amp: {word}}}")
    text = OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(composed()), own))
    assert to_config(text).trainer.amp == "off"


def test_a_preprocessed_folder_says_its_own_rows(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    words = ["data=criteo", f"data.path={tmp_path}", "cache.rows=5000"]
    assert checked(words) == []
    dims = [f"model.table_dims={[8] * 26}".replace(" ", ""), "model=dcn_v2"]
    assert checked([*words, *dims]) == []
    with pytest.raises(ConfigError, match=r"model\.table_dims has 2 entries.*has 26"):
        checked([*words, "model=dcn_v2", "model.table_dims=[8,8]"])


def test_the_tree_and_the_planner_have_the_same_policies() -> None:
    cache = CacheConfig()
    assert Policy.of(cache) == DEFAULT == Policy()


def test_fitting_versions_pass():
    check_versions("2.13.0+cpu", False, {"fbgemm-gpu-cpu": "1.8.0"}, "1.8.0")
    check_versions("2.11.0+cu130", True, {"fbgemm-gpu-cpu": "1.6.0"}, "1.6.1")


@pytest.mark.parametrize(
    ("release", "cuda", "fbgemm", "torchrec", "words"),
    [
        ("2.13.0", False, {}, None, ["torchrec and fbgemm", "fbgemm-gpu-cpu==1.8.*"]),
        ("2.13.0", True, {}, "1.8.0", ["needs fbgemm", "'fbgemm-gpu==1.8.*'", "--no-deps"]),
        ("2.12.1", False, {"fbgemm-gpu-cpu": "1.7.0"}, None, ["needs torchrec", "torchrec==1.7.*"]),
        ("2.13.0+cpu", False, {"fbgemm-gpu-cpu": "1.6.0"}, "1.6.1",
         ["fbgemm-gpu-cpu 1.6.0 was built for torch 2.11", "torch 2.13.0+cpu", "1.8.*"]),
        ("2.13.0", True, {"fbgemm-gpu": "0.9.0"}, "1.8.0",
         ["another version", "fbgemm-gpu==1.8.*"]),
        ("2.20.0", False, {"fbgemm-gpu": "1.8.0"}, "1.8.0", ["torch 2.20.0", "parallel=data"]),
    ],
)  # fmt: skip
def test_misfits_name_the_way_out(release, cuda, fbgemm, torchrec, words):
    with pytest.raises(ConfigError) as caught:
        check_versions(release, cuda, fbgemm, torchrec)
    for word in words:
        assert word in str(caught.value)
    assert "parallel=data" in str(caught.value)


@pytest.fixture
def load(monkeypatch):
    """Sets what importing fbgemm gives, or raises, where the versions fit."""

    def set_to(found) -> None:
        def load(name: str):
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(versions.importlib, "import_module", load)

    monkeypatch.setattr(versions, "check_versions", lambda *values: None)
    return set_to


@pytest.mark.parametrize(
    "error",
    [OSError("undefined symbol: _ZN3c10\nmore"), ImportError("no module"), AttributeError()],
)
def test_what_does_not_load_is_explained(load, error):
    load(error)
    with pytest.raises(ConfigError, match="does not load beside torch") as caught:
        require_hybrid()
    text = str(caught.value)
    assert "pip install" in text and "more" not in text
    assert (str(error).splitlines() or ["AttributeError"])[0] in text


def test_other_installations_that_do_not_work_are_named(monkeypatch, load):
    load(sys)
    monkeypatch.setattr(torch.ops, "fbgemm", object(), raising=False)
    with pytest.raises(ConfigError, match="asynchronous_complete_cumsum"):
        require_hybrid()
    load(OSError("undefined symbol"))
    both = {"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}
    monkeypatch.setattr(versions, "fbgemm_here", lambda: both)
    with pytest.raises(ConfigError, match="fbgemm-gpu and fbgemm-gpu-cpu are installed"):
        require_hybrid()
