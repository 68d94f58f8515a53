"""The main command as a user gives it: processes, run folders, digests, resume, Ctrl-C, errors; two
torchrun agents with the digests of one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from launching import environment, train
from ranks import free_port

SMALL = (
    *("data.table_rows=[4000,300,50,3]", "data.global_batch_size=64", "model.embedding_dim=8"),
    *("model.dense_arch=[16,8]", "model.over_arch=[16,1]", "cache.rows=400"),
    *("trainer.log_every=5", "trainer.device=cpu", "trainer.timeout_s=60"),
)
PROGRAM = ("-m", "distcache.train")


def run(folder: Path, ranks: int, *overrides: str, code: int = 0, **how) -> str:
    """A run in `folder`: what it said. `how`: see `launching.train`."""
    words = [*SMALL, f"run.dir={folder}", *overrides]
    done = train(words, folder.parent, ranks, PROGRAM, **how)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    return output


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def digests(folder: Path) -> tuple[str, str]:
    found = summary(folder)
    assert found["loss_digest"] and found["state_digest"]
    return found["loss_digest"], found["state_digest"]


def traced(folder: Path) -> dict[int, set[str]]:
    """Stages in the trace of a run by process number, its only file of that name."""
    (path,) = folder.glob("trace*")
    stages: dict[int, set[str]] = {}
    for event in json.loads(path.read_text()):
        if event["ph"] == "X":
            stages.setdefault(event["pid"], set()).add(event["cat"])
    return stages


def test_ctrl_c_leaves_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    folder, steps = tmp_path / "stopped", "trainer.steps=100000"
    process = subprocess.Popen(
        [sys.executable, *PROGRAM, *SMALL, f"run.dir={folder}", steps, "trainer.trace=true"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 90
        while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
            assert time.monotonic() < deadline and process.poll() is None, "no first log line"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert {"plan", "gather", "forward_backward", "wait"} <= traced(folder)[1]
    total = f"trainer.steps={summary(folder)['steps'] + 5}"
    run(tmp_path / "second", 1, total, f"trainer.resume={folder}", "cache.rows=500")
    run(tmp_path / "whole", 1, total)
    assert digests(tmp_path / "second") == digests(tmp_path / "whole")


def test_what_is_refused_or_has_nothing_to_do_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    def told() -> dict[str, str]:
        names = ("config.yaml", "environment.json", "summary.json")
        return {name: (folder / name).read_text() for name in names}

    folder, few = tmp_path / "run", ("cache.rows=300", "trainer.eval_steps=1")
    run(folder, 1, *few, "trainer.steps=4")
    was = told()
    assert summary(folder)["final_loss"] is not None
    for wrong, word in (
        ("cache.rows=20", "set cache.rows="),
        ("model.pooling=mean", "model.pooling was sum, is mean. Set what"),
        ("cache.statistics=none", "cache.statistics=none holds neither"),
    ):
        assert word in run(folder, 1, *few, "trainer.steps=8", wrong, code=1)
        assert told() == was, wrong
    said = run(folder, 1, *few, "trainer.steps=4")
    assert told() == was and "nothing to train after step 4 (trainer.steps=4): " in said
    run(folder, 1, *few, "trainer.steps=5")
    assert told() != was and summary(folder)["steps"] == 1


def test_a_killed_rank_is_started_again_in_the_same_folder(tmp_path: Path) -> None:
    """By torchrun: on from the last checkpoint, to the digests of never having died."""
    how = ("trainer.steps=600", "trainer.checkpoint_every=50", "trainer.log_every=1")
    run(tmp_path / "whole", 2, *how)
    job = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "--max-restarts=1")
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *job, *PROGRAM, *SMALL, *how],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        # The second one: the first is whole then, not only begun.
        while len(list(tmp_path.glob("runs/*/checkpoints/*/manifest.json"))) < 2:
            assert time.monotonic() < deadline and agent.poll() is None, "no checkpoint"
            time.sleep(0.02)
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        output, _ = agent.communicate(timeout=90)
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
    (folder,) = (tmp_path / "runs").iterdir()
    assert agent.returncode == 0 and "read step" in output, output
    assert summary(folder)["first_step"] > 0 and digests(folder) == digests(tmp_path / "whole")
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if "loss" in line] == list(range(1, 601))
    assert (folder / "checkpoints").stat().st_mode & 0o777 == 0o700


def test_models_widths_and_bags_from_the_command_line(tmp_path: Path) -> None:
    shape = (
        *("model=dcn_v2", "model.table_dims=[8,4,8,4]", "model.cross_rank=4"),
        *("data.bag_size=[1,2.5,3,1]", "data.weighted=true", "data.samples=640"),
        *("trainer.steps=12", "optim=rowwise_adagrad", "cache.rows=1800", "trainer.amp=bf16"),
    )
    for mode in ("data", "resident"):
        output = run(tmp_path / mode, 2, *shape, f"parallel={mode}", "trainer.trace=true")
        assert "trace of 2 rank(s)" in output and "  stall " in output and "| hidden: " in output
        assert set(traced(tmp_path / mode)) == {1, 2}
    assert digests(tmp_path / "data") == digests(tmp_path / "resident")
    found = summary(tmp_path / "data")
    assert 0 < found["hit_rate"] < 1 and found["collective_bytes"] > 0


ADAM = ("optim=adam", "cache.rows=800")
SHARDED = "cache.placement=sharded"
PLACEMENTS = (
    (),
    (SHARDED,),
    ("cache.placement=mixed", "cache.replicated_share=0.02"),
    ("cache.placement=replicated", "cache.state=home"),
    ("cache.placement=auto",),
)


def agents(
    folder: Path,
    ranks: Sequence[int],
    arguments: Sequence[str],
    prefixes: Sequence[Sequence[str]] = (),
    addresses: Sequence[str] = (),
    timeout: float = 150,
) -> list[tuple[int, str]]:
    """Run `distcache.train` under one agent for each of `ranks` (its number of ranks).

    `prefixes`: commands to start each agent with, such as `ip netns exec ...`; `addresses`: the
    agents' own, 127.0.0.1 where there are none. Returns exit code and output of each. Nothing of
    them runs on afterwards.
    """
    addresses = addresses or ["127.0.0.1"] * len(ranks)
    port, started = free_port(), []
    try:
        for number, count in enumerate(ranks):
            command = [
                *(prefixes[number] if prefixes else ()),
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(ranks))),
                *("--nproc-per-node", str(count), "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", f"{addresses[0]}:{port}", "--rdzv-id", "a-test"),
                *("--rdzv-conf", f"is_host={int(number == 0)}"),
                *("--local-addr", addresses[number], "-m", "distcache.train", *arguments),
            ]
            how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            how |= {"cwd": folder, "env": environment(), "start_new_session": True}
            started.append(subprocess.Popen(command, **how))
        texts = [one.communicate(timeout=timeout)[0] for one in started]
        return [(one.returncode, text) for one, text in zip(started, texts, strict=True)]
    finally:
        for one in started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGTERM)  # the agent ends its ranks, then itself
                try:
                    one.communicate(timeout=40)
                except subprocess.TimeoutExpired:
                    os.killpg(one.pid, signal.SIGKILL)
                    one.wait()


def two_agents(folder: Path, ranks: tuple[int, int], *more: str, **how) -> None:
    ends = agents(folder.parent, ranks, [*SMALL, *ADAM, f"run.dir={folder}", *more], **how)
    assert [code for code, _ in ends] == [0, 0], ends
    # The agents number the nodes as they come: one of them has rank 0.
    assert sum("run folder" in text for _, text in ends) == 1, ends


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 2), (1, 3)])
def test_agents_with_several_ranks(tmp_path: Path, ranks: tuple[int, int]) -> None:
    run(tmp_path / "one", 4, *ADAM, "trainer.steps=6")
    for number, placement in enumerate(PLACEMENTS):
        two_agents(tmp_path / f"two{number}", ranks, "trainer.steps=6", *placement)
        assert digests(tmp_path / f"two{number}") == digests(tmp_path / "one"), placement


def test_two_agents_have_the_digests_of_one(tmp_path: Path, **how) -> None:
    run(tmp_path / "one", 2, *ADAM, "trainer.steps=4")
    two_agents(tmp_path / "two", (1, 1), SHARDED, "trainer.steps=4", "trainer.trace=true", **how)
    assert digests(tmp_path / "two") == digests(tmp_path / "one")
    assert set(traced(tmp_path / "two")) == {1, 2}
    bytes_of = [summary(tmp_path / name)["inter_node_bytes"] for name in ("one", "two")]
    assert bytes_of[0] is None and bytes_of[1] > 0


@pytest.mark.slow
def test_an_error_on_the_command_line_ends_both_agents(tmp_path: Path) -> None:
    ends = agents(tmp_path, (1, 1), [*SMALL, "cache.ratio=7"])
    assert [code for code, _ in ends] == [1, 1]
    assert sum("cache.ratio=7" in text for _, text in ends) >= 1, ends
    assert list(tmp_path.iterdir()) == []


NODES = (
    (f"distcache-{os.getpid()}-a", "dc-a", "10.213.7.1"),
    (f"distcache-{os.getpid()}-b", "dc-b", "10.213.7.2"),
)
"""Name, cable and address of two network namespaces."""


@pytest.fixture
def two_networks() -> Iterator[None]:
    """Two network namespaces, joined by a cable; skips where that is not permitted."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2)")
    if os.geteuid():
        pytest.skip("needs root: only root makes network namespaces")
    (a, cable_a, _), (b, cable_b, _) = NODES
    steps = [f"netns add {a}", f"netns add {b}"]
    steps += [f"link add {cable_a} netns {a} type veth peer {cable_b} netns {b}"]
    for name, cable, address in NODES:
        steps.append(f"-n {name} address add {address}/24 dev {cable}")
        steps += [f"-n {name} link set {device} up" for device in ("lo", cable)]
    try:
        for step in steps:
            done = subprocess.run(["ip", *step.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"ip {step} is not permitted here: {done.stderr.strip()}")
        yield
    finally:
        for name, _, _ in NODES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.slow
def test_agents_in_two_networks(tmp_path: Path, two_networks: None) -> None:
    """Nothing but the cable joins the two nodes; each has a loopback of its own."""
    prefixes = [f"ip netns exec {n} env GLOO_SOCKET_IFNAME={c}".split() for n, c, _ in NODES]
    addresses = [address for _, _, address in NODES]
    test_two_agents_have_the_digests_of_one(tmp_path, prefixes=prefixes, addresses=addresses)
