"""Ranks with other package versions: an error where it matters, a warning where it does not."""

from __future__ import annotations

import json
import logging
import re
import threading

import pytest
import torch
import torch.distributed as dist
from launching import train
from ranks import run_ranks

import distcache
from distcache import versions
from distcache.comm import rendezvous
from distcache.comm.agreement import agree_before_world, agree_on_versions
from distcache.comm.rendezvous import Place
from distcache.comm.world import close_world, current_world, open_world
from distcache.errors import ConfigError, PeerError
from distcache.layout import TableSpec

INSTALLED = versions.installed


def pretend(**given: str | None) -> None:
    """From now on this process has other versions of some distributions."""
    versions.installed = lambda name: given[name] if name in given else INSTALLED(name)


def compared(rank: int, size: int) -> list[tuple[str, list[str]]]:
    """What rank 1 pretends to have, one case after the other: the error and what is logged."""
    world = open_world("cpu", timeout_s=60)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("distcache").addHandler(handler)
    found = []
    for given, hybrid in (
        ({}, False),
        ({"numpy": "9.9.9"}, False),
        ({"numba": None, "triton": "0.1"}, False),
        ({"torchrec": "0.1"}, False),
        ({"torchrec": "0.1"}, True),
        ({"distcache": "0.0.1"}, False),
    ):
        pretend(**(given if rank else {}))
        logged.clear()
        try:
            agree_on_versions(world, hybrid)
            error = ""
        except ConfigError as caught:
            error = str(caught)
        found.append((error, list(logged)))
    pretend()
    real = torch.__version__
    if rank:
        torch.__version__ = "2.12.1+cu130"
        versions.source_checksum = lambda: "0badc0de"
    with pytest.raises(ConfigError) as caught:
        agree_on_versions(world)
    torch.__version__ = real
    found.append((str(caught.value), []))
    close_world(world)
    return found


def test_versions_that_differ() -> None:
    first, second = run_ranks(compared, 2)
    assert [error for error, _ in first] == [error for error, _ in second]
    same, numpy, speed, unused, used, own, torches = first
    assert same == ("", [])
    assert f"numpy is {INSTALLED('numpy')!r} on rank 0 and '9.9.9' on rank 1" in numpy[0]
    assert "install the same packages on all nodes" in numpy[0]
    assert speed[0] == "" and len(speed[1]) == 1
    assert "'not installed' on rank 1" in speed[1][0] and "and '0.1' on rank 1" in speed[1][0]
    assert unused[0] == "" and "torchrec is" in unused[1][0]
    assert "torchrec is" in used[0] and "'0.1' on rank 1" in used[0] and used[1] == []
    assert "distcache is" in own[0] and "'0.0.1' on rank 1" in own[0]
    assert f"torch is '{torch.__version__}' on rank 0 and '2.12.1+cu130' on rank 1" in torches[0]
    assert re.search("distcache's source is '[0-9a-f]{8}' on rank 0 and '0badc0de'", torches[0])
    assert all(not logged for _, logged in second), "rank 0 alone warns"


def test_one_rank_has_nobody_to_differ_from() -> None:
    world = current_world(torch.device("cpu"))
    agree_on_versions(world)
    agree_before_world(None, Place())


def test_versions_are_words() -> None:
    here = versions.versions_here()
    assert here["torch"] == torch.__version__ and here["python"].startswith("3.")
    assert all(isinstance(value, str) and value for value in here.values())
    assert json.loads(json.dumps(here)) == here


def test_over_the_launchs_store_before_any_group(monkeypatch) -> None:
    store, found = dist.HashStore(), {}
    seen = {0: "1.0", 1: "1.0", 2: "2.0"}
    own = threading.local()

    def installed(name: str) -> str | None:
        return seen[own.rank] if name == "distcache" else "5"

    monkeypatch.setattr(versions, "installed", installed)

    def run(rank: int) -> None:
        own.rank = rank
        try:
            agree_before_world(store, Place(rank, 3), timeout_s=20)
        except ConfigError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [0, 1, 2]
    for text in found.values():
        assert "distcache is '1.0' on ranks 0, 1 and '2.0' on rank 2" in text


def test_command_lines_that_differ_are_named() -> None:
    store, found = dist.HashStore(), {}
    given = (["a=1", "b=2"], ["b=2", "a=1"], ["a=1"])

    def start(rank: int, lines: tuple[list[str], ...], name: str) -> None:
        own = dist.PrefixStore(name, store)
        try:
            agree_before_world(own, Place(rank, 3), 20, lines[rank])
        except ConfigError as error:
            found[name, rank] = str(error)

    for name, lines in (("differ", given), ("same", (*given[:2], given[1]))):
        threads = [threading.Thread(target=start, args=(rank, lines, name)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(found) == [("differ", rank) for rank in range(3)], "the order does not matter"
    for text in found.values():
        assert "the ranks' command lines differ: b is '2' on ranks 0, 1 and " in text
        assert "on rank 2; start all" in text and "a is" not in text
        assert "nodes with the same arguments" in text


def test_a_rank_that_does_not_start_is_named(monkeypatch, caplog) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.02)
    store = dist.HashStore()
    store.set("versions/1", "{}")
    with pytest.raises(PeerError, match=r"ranks \[2, 3\] did not start within 0 s"):
        agree_before_world(store, Place(0, 4), timeout_s=0.1)
    assert caplog.text.count("waits for ranks [2, 3] to start") == 1
    caplog.clear()
    with pytest.raises(PeerError, match=r"ranks \[0\] did not start"):
        agree_before_world(dist.HashStore(), Place(2, 4), timeout_s=0.1)
    assert not caplog.text, "rank 0 says for whom all wait"


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
