"""Ranks with other package versions: an error where it matters, a warning where it does not."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import distcache
from distcache import versions
from distcache.comm.rendezvous import compare_versions, find_place, open_store
from distcache.comm.world import open_world
from distcache.errors import ConfigError
from distcache.layout import TableSpec

HERE = versions.versions_here()
INSTALLED = versions.installed


def test_versions_are_words() -> None:
    assert HERE["torch"] == torch.__version__ and HERE["python"].startswith("3.")
    assert all(isinstance(value, str) and value for value in HERE.values())
    assert json.loads(json.dumps(HERE)) == HERE
    assert re.fullmatch("[0-9a-f]{8}", HERE[versions.SOURCE])


@pytest.mark.parametrize("name", ["distcache", "torch", "numpy", versions.SOURCE])
def test_versions_that_matter_are_refused(name: str) -> None:
    says = rf"{name} is .* on rank 0 and '9.9' on rank 1; install the same packages on all nodes"
    with pytest.raises(ConfigError, match=says):
        compare_versions([HERE, HERE | {name: "9.9"}], False, False, True)


def test_other_versions_are_told_by_rank_0(caplog) -> None:
    for name, where in (("torchrec", (True, False)), ("triton", (False, True))):
        other = [HERE, HERE | {name: "0.1", "numba": "not installed"}]
        compare_versions(other, False, False, warn=False)
        assert not caplog.text
        compare_versions(other, False, False, warn=True)
        assert f"{name} is " in caplog.text and "and 'not installed' on rank 1" in caplog.text
        caplog.clear()
        with pytest.raises(ConfigError, match=f"{name} is .* and '0.1' on rank 1"):
            compare_versions(other, *where, warn=True)


def refusals(rank: int, size: int) -> dict[str, str]:
    """A command, `distcache.fit` and both collections where rank 1 has another numpy, or other
    settings."""
    from torchrec import EmbeddingBagConfig, EmbeddingConfig

    found = {}

    def note(name: str, work, **given) -> None:
        with pytest.raises(ConfigError) as caught:
            work(**given)
        found[name] = str(caught.value)

    def fit(more=0, **settings) -> None:
        tables = [TableSpec("t", 10 + more, 4, ("f",))]
        settings = {"trainer.device": "cpu", **settings}
        distcache.fit([], tables, torch.nn.Linear(4, 1), settings=settings)

    def bags(lr=0.1, **settings) -> None:
        table = EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t")
        update = distcache.optim.SGD(lr=lr)
        distcache.CachedEmbeddingBagCollection([table], optimizer=update, **settings)

    def rows(wide=0) -> None:
        table = EmbeddingConfig(num_embeddings=10, embedding_dim=4 + wide, name="t")
        sgd = distcache.optim.SGD(lr=0.1)
        distcache.CachedEmbeddingCollection([table], optimizer=sgd)

    def command() -> None:
        open_world("cpu", "gloo", 60, open_store(find_place()))

    dist.init_process_group("gloo")
    note("fit settings", fit, **{"trainer.seed": rank, "optim.dense_lr": 0.5 + rank})
    note("fit tables", fit, more=rank)
    note("bags settings", bags, lookahead=3 + rank, prefetch=1 + rank)
    note("bags optimizer", bags, lr=0.1 + rank)
    note("rows table", rows, wide=rank * 4)
    note("kinds", rows if rank else bags)
    other = {"numpy": "9.9.9"} if rank else {}
    versions.installed = lambda name: other[name] if name in other else INSTALLED(name)
    for work in (fit, bags, rows):
        note(work.__name__, work)
    dist.barrier()
    dist.destroy_process_group()
    note("command", command)
    return found


def test_the_library_and_commands_compare_versions_and_settings(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = run_ranks(refusals, 2)
    assert first == second
    bags, rows = "'CachedEmbeddingBagCollection'", "'CachedEmbeddingCollection'"
    for name, *words in (
        *((name, "numpy is", "'9.9.9' on rank 1") for name in ("fit", "bags", "rows", "command")),
        ("fit settings", "trainer.seed is 0 on rank 0 and 1 on rank 1"),
        ("fit settings", "optim.dense_lr is 0.5 on rank 0 and 1.5 on rank 1"),
        ("fit tables", "rows=10,", "rows=11,"),
        ("bags settings", "lookahead is 3 on rank 0 and 4 on rank 1"),
        ("bags settings", "prefetch is 1 on rank 0 and 2 on rank 1"),
        ("bags optimizer", "SGD(lr=0.1) on rank 0 and SGD(lr=1.1) on rank 1"),
        ("rows table", "dim=4,", "dim=8,"),
        ("kinds", f"the collection is {bags} on rank 0 and {rows} on rank 1"),
    ):
        assert all(word in first[name] for word in words), (name, first[name])
    assert not list(tmp_path.iterdir()), "no run folder is made before the ranks agree"
