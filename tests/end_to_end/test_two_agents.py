"""Two nodes with the digests of one: as two torchrun agents, and ranks that are told so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import agents
from launching import train

SMALL = (
    "data.table_rows=[4000,300,50,3]",
    "data.global_batch_size=64",
    "model.embedding_dim=8",
    "model.dense_arch=[16,8]",
    "model.over_arch=[16,1]",
    "optim=adam",
    "cache.rows=800",
    "trainer.device=cpu",
    "trainer.timeout_s=60",
)
PROGRAM = ("-m", "distcache.train")


def one_node(home: Path, name: str, ranks: int, *more: str) -> dict:
    done = train([*SMALL, f"run.dir={name}", *more], home, ranks, PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((home / name / "summary.json").read_text())


def two_nodes(home: Path, name: str, ranks: tuple[int, int], *more: str) -> dict:
    words = [*SMALL, f"run.dir={name}", *more]
    done = train(words, home, sum(ranks), PROGRAM, nodes=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((home / name / "summary.json").read_text())


def two_agents(home: Path, name: str, ranks: tuple[int, int], *more: str, **how) -> dict:
    ends = agents(home, ranks, [*SMALL, f"run.dir={name}", *more], **how)
    assert [code for code, _ in ends] == [0, 0], ends
    # The agents number the nodes as they come: one of them has rank 0.
    assert sum("run folder" in text for _, text in ends) == 1, ends
    return json.loads((home / name / "summary.json").read_text())


def digests(summary: dict) -> tuple[str, str]:
    assert summary["loss_digest"] and summary["state_digest"]
    return summary["loss_digest"], summary["state_digest"]


AUTO = ("cache.placement=auto",)
HOME = ("cache.placement=replicated", "cache.state=home")
MIXED = ("cache.placement=mixed", "cache.replicated_share=0.02")
SHARDED = ("cache.placement=sharded",)


def named(placements: list[tuple[str, ...]]) -> list[str]:
    return ["+".join(key.rpartition("=")[2] for key in keys) or "default" for keys in placements]


@pytest.mark.parametrize(
    "placement", [pytest.param((), marks=pytest.mark.slow), SHARDED], ids=named([(), SHARDED])
)
def test_two_nodes_have_the_digests_of_one(tmp_path: Path, placement: tuple[str, ...]) -> None:
    saves = (*placement, "run.save=true")
    one = one_node(tmp_path, "one", 2, *saves, "trainer.steps=8")
    two = two_nodes(tmp_path, "two", (1, 1), *placement, "trainer.steps=4", *saves)
    assert one["world_size"] == two["world_size"] == 2
    assert one["inter_node_bytes"] is None and two["inter_node_bytes"] > 0
    whole = (*placement, "trainer.steps=8", "trainer.trace=true")
    again = two_nodes(tmp_path, "again", (1, 1), *whole, "trainer.resume=two")
    assert digests(again) == digests(one)
    assert (tmp_path / "again" / "trace.json").exists()
    back = one_node(tmp_path, "back", 2, *placement, "trainer.steps=8", "trainer.resume=two")
    assert digests(back) == digests(one)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 2), (1, 3)])
def test_agents_with_several_ranks(tmp_path: Path, ranks: tuple[int, int]) -> None:
    one = one_node(tmp_path, "one", 4, "trainer.steps=6")
    for number, placement in enumerate(((), SHARDED, MIXED, HOME, AUTO)):
        two = two_agents(tmp_path, f"two{number}", ranks, "trainer.steps=6", *placement)
        assert digests(two) == digests(one), placement


def test_two_agents_have_the_digests_of_one(tmp_path: Path) -> None:
    one = one_node(tmp_path, "one", 2, "trainer.steps=4")
    two = two_agents(tmp_path, "two", (1, 1), *SHARDED, "trainer.steps=4")
    assert digests(two) == digests(one)


def test_an_error_on_the_command_line_ends_both_agents(tmp_path: Path) -> None:
    ends = agents(tmp_path, (1, 1), [*SMALL, "cache.ratio=7"])
    assert [code for code, _ in ends] == [1, 1]
    assert sum("cache.ratio=7" in text for _, text in ends) >= 1, ends
    assert list(tmp_path.iterdir()) == []


NAMES = tuple(f"distcache-{os.getpid()}-{end}" for end in "ab")
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def two_networks() -> Iterator[None]:
    """Two network namespaces, joined by a cable; skips where that is not permitted."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2)")
    if os.geteuid():
        pytest.skip("needs root: only root makes network namespaces")
    steps = [
        *(("netns", "add", name) for name in NAMES),
        (
            "link",
            "add",
            "dc-a",
            "netns",
            NAMES[0],
            "type",
            "veth",
            "peer",
            "dc-b",
            "netns",
            NAMES[1],
        ),
    ]
    for name, cable, address in zip(NAMES, ("dc-a", "dc-b"), ADDRESSES, strict=True):
        steps.append(("-n", name, "address", "add", f"{address}/24", "dev", cable))
        steps += [("-n", name, "link", "set", device, "up") for device in ("lo", cable)]
    try:
        for step in steps:
            done = ip(*step)
            if done.returncode:
                pytest.skip(f"ip {' '.join(step)} is not permitted here: {done.stderr.strip()}")
        yield
    finally:
        for name in NAMES:
            ip("netns", "delete", name)


@pytest.mark.slow
def test_agents_in_two_networks(tmp_path: Path, two_networks: None) -> None:
    """Nothing but the cable joins the two nodes; each has a loopback of its own."""
    prefixes = [
        ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={cable}")
        for name, cable in zip(NAMES, ("dc-a", "dc-b"), strict=True)
    ]
    one = one_node(tmp_path, "one", 2, "trainer.steps=4")
    how = {"prefixes": prefixes, "addresses": ADDRESSES}
    two = two_agents(tmp_path, "two", (1, 1), "trainer.steps=4", *SHARDED, **how)
    assert digests(two) == digests(one)
