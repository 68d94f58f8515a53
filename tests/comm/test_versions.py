"""Ranks with other package versions: an error where it matters, a warning where it does not."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.distributed as dist
from launching import train
from ranks import run_ranks

import distcache
from distcache import versions
from distcache.comm.rendezvous import compare_versions
from distcache.errors import ConfigError
from distcache.layout import TableSpec

INSTALLED = versions.installed


def pretend(**given: str | None) -> None:
    """From now on this process has other versions of some distributions."""
    versions.installed = lambda name: given[name] if name in given else INSTALLED(name)


HERE = versions.versions_here()


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


def library(rank: int, size: int) -> dict[str, str]:
    """`distcache.fit` and both collections where rank 1 has another numpy, or other settings."""
    from torchrec import EmbeddingBagConfig, EmbeddingConfig

    dist.init_process_group("gloo")
    found = {}

    def note(name: str, work) -> None:
        with pytest.raises(ConfigError) as caught:
            work()
        found[name] = str(caught.value)

    def fit(**settings) -> None:
        tables = [TableSpec("t", 10 + settings.pop("more", 0), 4, ("f",))]
        settings = {"trainer.device": "cpu", **settings}
        distcache.fit([], tables, torch.nn.Linear(4, 1), settings=settings)

    def bags(**settings) -> None:
        update = distcache.optim.SGD(lr=settings.pop("lr", 0.1))
        table = EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t")
        distcache.CachedEmbeddingBagCollection([table], optimizer=update, **settings)

    def rows(**settings) -> None:
        wide = settings.pop("wide", 0)
        table = EmbeddingConfig(num_embeddings=10, embedding_dim=4 + wide, name="t")
        sgd = distcache.optim.SGD(lr=0.1)
        distcache.CachedEmbeddingCollection([table], optimizer=sgd, **settings)

    note("fit settings", lambda: fit(**{"trainer.seed": rank, "optim.dense_lr": 0.5 + rank}))
    note("fit tables", lambda: fit(more=rank))
    note("bags settings", lambda: bags(lookahead=3 + rank, prefetch=1 + rank))
    note("bags optimizer", lambda: bags(lr=0.1 + rank))
    note("rows table", lambda: rows(wide=rank * 4))
    note("kinds", lambda: (rows if rank else bags)())
    pretend(**({"numpy": "9.9.9"} if rank else {}))
    for name, work in (("fit", fit), ("bags", bags), ("rows", rows)):
        note(name, work)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_the_library_compares_versions_and_settings(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = run_ranks(library, 2)
    assert first == second
    for name in ("fit", "bags", "rows"):
        assert "numpy is" in first[name] and "'9.9.9' on rank 1" in first[name]
    assert "trainer.seed is 0 on rank 0 and 1 on rank 1" in first["fit settings"]
    assert "optim.dense_lr is 0.5 on rank 0 and 1.5 on rank 1" in first["fit settings"]
    assert "rows=10," in first["fit tables"] and "rows=11," in first["fit tables"]
    assert "lookahead is 3 on rank 0 and 4 on rank 1" in first["bags settings"]
    assert "prefetch is 1 on rank 0 and 2 on rank 1" in first["bags settings"]
    assert "SGD(lr=0.1) on rank 0 and SGD(lr=1.1) on rank 1" in first["bags optimizer"]
    assert "dim=4," in first["rows table"] and "dim=8," in first["rows table"]
    bags, rows = "'CachedEmbeddingBagCollection'", "'CachedEmbeddingCollection'"
    assert f"the collection is {bags} on rank 0 and {rows} on rank 1" in first["kinds"]
    assert not list(tmp_path.iterdir()), "no run folder is made before the ranks agree"


FAKED = """
import os, sys
from distcache import versions
real = versions.installed
if os.environ["RANK"] == "1":
    versions.installed = lambda name: "0.0.1" if name == "distcache" else real(name)
from distcache.cli.run import leave
from distcache.train import main
leave(main())
"""


def test_a_launch_with_two_versions_ends_before_the_first_step(tmp_path) -> None:
    script = tmp_path / "faked.py"
    script.write_text(FAKED)
    done = train([f"run.dir={tmp_path / 'run'}"], tmp_path, 2, (str(script),))
    text = done.stdout + done.stderr
    assert done.returncode == 1
    assert re.search("the ranks differ: distcache is .* on rank 0 and '0.0.1' on rank 1", text), (
        text
    )
    assert not (tmp_path / "run").exists()
