"""Each wrong value is refused with its key, its value and a way out."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from omegaconf import OmegaConf

from distcache.cli.compose import compose_overrides, given_keys, to_config
from distcache.config import checks as config_check
from distcache.config.checks import check
from distcache.config.keys import without_use
from distcache.config.tree import CacheConfig
from distcache.errors import ConfigError
from distcache.planner.victims import DEFAULT, Policy

REFUSED = {
    "cache.rows=5 cache.ratio=0.1": ("cache.rows=5 and cache.ratio=0.1", "one of them"),
    "cache.rows=5 cache.bytes=9": ("cache.rows=5 and cache.bytes=9", "one of them"),
    "cache.ratio=0": ("cache.ratio=0", "cache.rows=<"),
    "cache.ratio=1.01": ("cache.ratio=1.01", "at most 1"),
    "cache.ratio=nan": ("cache.ratio=nan", "at most 1"),
    "cache.rows=0": ("cache.rows=0", "at least 1"),
    "cache.bytes=-1": ("cache.bytes=-1", "at least 1"),
    "cache.lookahead=-1": ("cache.lookahead=-1", "at least 0"),
    "cache.prefetch=-1": ("cache.prefetch=-1", "at least 0"),
    "cache.lookahead=far": ("cache.lookahead=far", "auto"),
    "cache.prefetch=true": ("cache.prefetch=True", "auto"),
    "trainer.threads=0": ("trainer.threads=0", "at least 1"),
    "trainer.schedule=fast": ("trainer.schedule=fast", "overlapped or serial"),
    "trainer.shake_ms=-1": ("trainer.shake_ms=-1", "at least 0"),
    "cache.policy=mru": ("cache.policy=mru", "lookahead or lfu or lru or frequency or static"),
    "cache.tail=mru": ("cache.tail=mru", "choose lru or lfu or frequency"),
    "cache.policy=lru cache.tail=frequency cache.statistics=.": (
        "cache.tail=frequency",
        "leave one of them out",
    ),
    "cache.policy=static": ("cache.policy=static", "cache.statistics=<folder>"),
    "cache.tail=frequency": ("cache.tail=frequency", "distcache.analyze"),
    "cache.tail=lfu cache.half_life=0": ("cache.half_life=0", "give auto, or steps from 1"),
    "cache.tail=lfu cache.half_life=long": ("cache.half_life=long", "give auto"),
    "cache.tail=lru cache.half_life=9": ("cache.half_life=9", "cache.tail=lfu or cache.policy=lfu"),
    "cache.placement=spread": ("cache.placement=spread", "replicated or sharded"),
    "cache.replicated_share=0.1": ("cache.replicated_share=0.1", "cache.placement=mixed"),
    "cache.reduction=fast": ("cache.reduction=fast", "ordered or native"),
    "store.name=disk": ("store.name=disk", "memory"),
    "parallel.mode=ddp": ("parallel.mode=ddp", "resident"),
    "parallel.sharding=rows": ("parallel.sharding=rows", "row_wise"),
    "optim.name=lamb": ("optim.name=lamb", "adagrad"),
    "optim.betas=[0.9]": ("optim.betas=[0.9]", "two numbers"),
    "optim.betas=[0.9,1.0]": ("optim.betas=[0.9, 1.0]", "two numbers"),
    "optim=adam optim.eps=0": ("optim.eps=0", "1e-8"),
    "optim=adagrad optim.eps=0": ("optim.eps=0", "1e-8"),
    "optim.dense_lr=-1": ("optim.dense_lr=-1", "at least 0"),
    "optim.embedding_lr=inf": ("optim.embedding_lr=inf", "at least 0"),
    "optim.warmup_steps=10 optim.decay_start=5 optim.decay_steps=9": ("optim.decay_start=5", "10"),
    "trainer.dtype=bfloat16": ("trainer.dtype=bfloat16", "float64"),
    "trainer.amp=fp16": ("trainer.amp=fp16", "off or bf16"),
    "trainer.amp=bf16 trainer.dtype=float64": ("trainer.amp=bf16", "trainer.dtype=float32"),
    "trainer.backend=mpi": ("trainer.backend=mpi", "gloo or nccl"),
    "trainer.device=tpu": ("trainer.device=tpu", "cpu or cuda"),
    "trainer.steps=0": ("trainer.steps=0", "at least 1"),
    "trainer.steps=null": ("trainer.steps=null", "data.samples=<"),
    "trainer.eval_every=0": ("trainer.eval_every=0", "at least 1"),
    "trainer.eval_every=5 trainer.eval_steps=0": ("trainer.eval_every=5", "eval_steps=<"),
    "trainer.eval_steps=-1": ("trainer.eval_steps=-1", "at least 0"),
    "trainer.log_every=0": ("trainer.log_every=0", "at least 1"),
    "trainer.log_level=loud": ("trainer.log_level=LOUD", "DEBUG"),
    "trainer.timeout_s=0": ("trainer.timeout_s=0", "above 0"),
    "trainer.seed=-1": ("trainer.seed=-1", "at least 0"),
    "trainer.resume=/no/such/run": ("trainer.resume=/no/such/run", "run folder"),
    "run.digest=maybe": ("run.digest=maybe", "auto or true"),
    "run.sweep_ranks=0": ("run.sweep_ranks=0", "at least 1"),
    "model.name=bert": ("model.name=bert", "dlrm or dcn_v2"),
    "model.pooling=max": ("model.pooling=max", "sum or mean"),
    "model.embedding_dim=0": ("model.embedding_dim=0", "at least 1"),
    "model.over_arch=[64,2]": ("model.over_arch=[64, 2]", "append a 1"),
    "model.over_arch=[]": ("model.over_arch=[]", "at least 1"),
    "model.dense_arch=[64,8]": ("model.dense_arch=[64, 8]", "model.embedding_dim=16"),
    "model.dense_arch=[0,16]": ("model.dense_arch=[0, 16]", "at least 1"),
    "model.table_dims=[16,16,16,16,16,16,16,16]": ("model.table_dims", "model=dcn_v2"),
    "model=dcn_v2 model.table_dims=[16,8]": ("model.table_dims has 2", "data.table_rows has 8"),
    "model=dcn_v2 model.cross_layers=0": ("model.cross_layers=0", "at least 1"),
    "model=dcn_v2 model.cross_rank=0": ("model.cross_rank=0", "at least 1"),
    "data.name=avazu": ("data.name=avazu", "criteo"),
    "data.table_rows=[]": ("data.table_rows=[]", "at least 1"),
    "data.table_rows=[5,0]": ("data.table_rows=[5, 0]", "at least 1"),
    "data.global_batch_size=0": ("data.global_batch_size=0", "at least 1"),
    "data.dense_features=0": ("data.dense_features=0", "at least 1"),
    "data.zipf=-1": ("data.zipf=-1", "at least 0"),
    "data.samples=0": ("data.samples=0", "at least 1"),
    "data.bag_size=many": ("data.bag_size=many", "give an int"),
    "data.bag_size=true": ("data.bag_size=True", "give an int"),
    "data.bag_size=-2": ("data.bag_size=-2", "at least 0"),
    "data.bag_size=[1,2]": ("data.bag_size has 2", "data.table_rows has 8"),
    "data.on_bad_id=drop": ("data.on_bad_id=drop", "error or hash"),
    "data.on_bad_line=fix": ("data.on_bad_line=fix", "error or skip"),
    "data.weighted=true model.pooling=mean": ("data.weighted=true", "model.pooling=sum"),
    "data.path=x": ("data.path=x", "data=criteo"),
    "data=criteo": ("data.path", "data=synthetic"),
    "data=criteo data.path=/no/such/file": ("data.path=/no/such/file", "no such file"),
    "data=criteo data.path=FOLDER": ("is a folder without manifest.json", "distcache.preprocess"),
    "data=criteo data.path=HERE data.shuffle_block=0": ("data.shuffle_block=0", "at least 1"),
    "data=criteo data.path=HERE data.table_rows=[5,6]": ("data.table_rows has 2", "26"),
    "data=criteo data.path=HERE data.dense_features=4": ("data.dense_features=4", "13"),
    "data=criteo data.path=HERE data.bag_size=2": ("data.bag_size=2", "leave it out"),
    "data=criteo data.path=HERE data.weighted=true": ("data.weighted=True", "leave it out"),
    "data=criteo data.path=HERE data.samples=9": ("data.samples=9", "leave it out"),
    "parallel=hybrid model.embedding_dim=6 model.dense_arch=[6]": ("width 6", "8"),
    "parallel=hybrid model=dcn_v2 data.table_rows=[5,6] model.table_dims=[8,10]": (
        "width 10",
        "12",
    ),
    "parallel=hybrid trainer.dtype=float64": ("trainer.dtype=float64", "parallel=data"),
    "parallel=hybrid optim=adam trainer.device=cpu": ("optim=adam", "rowwise_adagrad"),
    "trainer.backend=nccl trainer.device=cpu": ("2 ranks on this machine, 0 GPUs", "gloo"),
}


@pytest.fixture
def no_fbgemm(monkeypatch):
    monkeypatch.setattr(config_check, "require_hybrid", lambda: None)


@lru_cache
def composed(*groups: str) -> str:
    return compose_overrides(groups)


def checked(overrides: list[str]) -> list[str]:
    """The warnings of a configuration; groups are composed once, for speed."""
    base = composed(*(word for word in overrides if "." not in word.partition("=")[0]))
    values = OmegaConf.from_dotlist([word for word in overrides if "." in word.partition("=")[0]])
    text = OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(base), values))
    return check(to_config(text), world_size=2, local_size=2)


@pytest.mark.parametrize("overrides", REFUSED)
def test_refused_with_key_value_and_way_out(overrides, tmp_path, no_fbgemm):
    (tmp_path / "lines").write_text("")
    with pytest.raises(ConfigError) as caught:
        words = overrides.replace("HERE", str(tmp_path / "lines"))
        checked(words.replace("FOLDER", str(tmp_path)).split())
    for words in REFUSED[overrides]:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "cache.ratio=1",
        "cache.lookahead=0 cache.prefetch=0",
        "optim=adagrad optim.eps=0 optim.initial_accumulator=0.1",
        "trainer.steps=null data.samples=100",
        "data.weighted=true data.bag_size=3.5",
        "model=dcn_v2 model.table_dims=[16,8,6,5,4,3,2,1]",
        "parallel=data model.embedding_dim=6 model.dense_arch=[6] optim=adam trainer.dtype=float64",
        "parallel=hybrid optim=adagrad",
        "trainer.log_level=debug",
        "trainer.eval_every=5 trainer.eval_steps=1",
    ],
)
def test_accepted(overrides, no_fbgemm):
    assert checked(overrides.split()) == []


def test_gpus_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks on this machine, 1 GPUs"):
        checked(["trainer.backend=nccl"])
    assert checked(["trainer.backend=gloo", "trainer.device=cuda"]) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda"):
        checked(["trainer.device=cuda"])


def test_adam_in_hybrid_is_fine_on_a_gpu(monkeypatch, no_fbgemm):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert checked(["parallel=hybrid", "optim=adam"]) == []


def test_only_hybrid_looks_for_fbgemm(monkeypatch):
    def fail() -> None:
        raise ConfigError("looked")

    monkeypatch.setattr(config_check, "require_hybrid", fail)
    for mode in ("data", "resident", "host"):
        assert checked([f"parallel={mode}"]) == []
    with pytest.raises(ConfigError, match="looked"):
        checked(["parallel=hybrid"])


def test_warnings(no_fbgemm):
    (capped,) = checked(["cache.rows=500", "data.table_rows=[100,50]"])
    assert "cache.rows=500 is capped" in capped and "150 rows" in capped
    assert checked(["cache.rows=150", "data.table_rows=[100,50]"]) == []
    (idle,) = checked(["data.global_batch_size=1"])
    assert "without a sample" in idle
    (shards,) = checked(["parallel=hybrid", "optim=rowwise_adagrad"])
    assert "row states of their own" in shards
    (nothing,) = checked(["trainer.tf32=true", "trainer.device=cpu"])
    assert "trainer.tf32=true does nothing on the CPU" in nothing


IDLE = [
    ("", 1, ""),
    ("experiment=quickstart", 1, ""),  # which sets keys of other modes
    ("parallel=hybrid parallel.sharding=row_wise", 2, ""),
    ("parallel.sharding=row_wise", 2, "parallel.sharding=row_wise"),
    ("cache.placement=sharded cache.state=home cache.rows=9", 2, ""),
    ("cache.placement=sharded cache.state=home cache.rows=9", 1, "cache.placement=sharded, "
     "cache.state=home"),
    ("cache.reduction=native", 1, "cache.reduction=native"),
    ("parallel=resident cache.rows=9 cache.lookahead=2", 1, "cache.rows=9"),
    ("parallel=resident cache.prefetch=2", 2, "cache.prefetch=2"),
    ("parallel=host store.access=zero_copy cache.tail=lru", 2, "cache.tail=lru"),
    ("parallel=resident store.access=zero_copy", 2, "store.access=zero_copy"),
    ("parallel=hybrid cache.rows=9 cache.prefetch=2", 1, "cache.prefetch=2, cache.rows=9"),
    ("optim=sgd optim.eps=1e-3", 1, "optim.eps=0.001"),
    ("optim=adam optim.eps=1e-3", 1, ""),
    ("optim=adagrad optim.betas=[0.5,0.6]", 1, "optim.betas=[0.5, 0.6]"),
    ("model.cross_layers=2 optim.decay_start=9", 1, "model.cross_layers=2, optim.decay_start=9"),
    ("model=dcn_v2 model.cross_layers=2 optim.decay_steps=5 optim.decay_start=9", 1, ""),
    ("data.on_bad_line=skip trainer.resume_data=any", 1, "data.on_bad_line=skip, "
     "trainer.resume_data=any"),
    ("parallel=hybrid trainer.schedule=serial", 2, "trainer.schedule=serial"),
    ("parallel=hybrid cache.rows=9 data.batching=hot_cold cache.statistics=x", 1, ""),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "ranks", "told"), IDLE)
def test_keys_without_use_are_told(overrides, ranks, told):
    words = overrides.split()
    config = to_config(compose_overrides(words))
    assert ", ".join(without_use(config, ranks, given_keys(words))) == told


def test_off_is_off_however_it_is_written():
    for word in ("off", "'off'", "false"):
        own = OmegaConf.create(f"trainer: {{amp: {word}}}")
        text = OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(composed()), own))
        assert to_config(text).trainer.amp == "off"
    assert to_config(compose_overrides(["trainer.amp=off"])).trainer.amp == "off"
    assert to_config(compose_overrides(["trainer.amp=bf16"])).trainer.amp == "bf16"


def test_a_preprocessed_folder_says_its_own_rows(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    words = ["data=criteo", f"data.path={tmp_path}", "cache.rows=5000"]
    assert checked(words) == []
    dims = [f"model.table_dims={[8] * 26}".replace(" ", ""), "model=dcn_v2"]
    assert checked([*words, *dims]) == []
    with pytest.raises(ConfigError, match=r"model\.table_dims has 2 entries.*has 26"):
        checked([*words, "model=dcn_v2", "model.table_dims=[8,8]"])


def test_a_glob_of_files_is_found(tmp_path):
    for day in range(2):
        (tmp_path / f"day_{day}").write_text("")
    assert checked(["data=criteo", f"data.path={tmp_path}/day_*"]) == []


def test_the_tree_and_the_planner_have_the_same_policies() -> None:
    cache = CacheConfig()
    policy = Policy.of(cache.policy, cache.tail, cache.half_life)
    assert policy == DEFAULT == Policy()
