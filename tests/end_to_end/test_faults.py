"""Ranks that are killed, stopped or out of room while checkpoints are written, damaged checkpoints,
and agents that go and come: the same end as without, or an error that names what to do."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from fault_campaign import drawn, endure
from launching import environment, train
from ranks import Job, free_port, run_ranks
from toy_parallel import ToyParallel, ToySource, toy_run

from distcache.checkpoint.manifest import BlockFile, Manifest
from distcache.comm.rendezvous import cause_of
from distcache.comm.world import close_world, open_world
from distcache.engine.full_tables import Snapshot
from distcache.errors import ConfigError, DataError

PROGRAM = ("-m", "distcache.train")
SMALL = (
    *("data.table_rows=[4000,300,50,3]", "data.global_batch_size=64", "model.embedding_dim=8"),
    *("model.dense_arch=[16,8]", "model.over_arch=[16,1]", "cache.rows=1200"),
    *("trainer.log_every=1", "trainer.device=cpu", "trainer.timeout_s=60"),
)

HANG_S = 6.0
"""`trainer.timeout_s` of the run whose rank 1 stands still."""


@pytest.mark.parametrize("points", [5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_killed_at_any_point_a_run_goes_on_to_its_own_bits(tmp_path: Path, points: int) -> None:
    died = sum(endure(*case)[0] for case in drawn(points, seed=points, home=tmp_path))
    assert died >= points // 2


def trained(rank: int, size: int, home: str, fault: str) -> tuple[list[str], str, float]:
    """A run with a fault of rank 1: its digests, its error and how long it took."""
    limit = HANG_S if fault == "stands still" else 60.0
    world, began = open_world("cpu", "gloo", limit), time.monotonic()
    mode, error, found = ToyParallel(world), None, ["", ""]
    write, calls = BlockFile.write, []

    def stop(*arguments: Any) -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return write(*arguments)

    def fail(*arguments: Any) -> Any:
        raise MemoryError("no room")

    if rank == 1 and fault == "stands still":
        BlockFile.write = stop
    if rank == 1 and fault == "thread":
        Snapshot.block = fail
    if rank == 1 and "disk" in fault:  # the kernel's own refusal, at the first block of values
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
        train_step = mode.train_step

        def step(*arguments: Any) -> Any:
            calls.append(1)
            if fault == "disk for a while" and len(calls) == 11:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            return train_step(*arguments)

        mode.train_step = step
    every = {"trainer__checkpoint_every": 3, "trainer__keep_checkpoints": 9}
    try:
        done = toy_run(world, Path(home), mode, ToySource(), **every if fault else {})
        found = [done.summary["loss_digest"], done.summary["state_digest"]]
    except Exception as caught:
        error = caught
        cause_of(world.store, rank, error)
    close_world(world, orderly=error is None)
    said = "" if error is None else f"{type(error).__name__}: {error}"
    return found, said, time.monotonic() - began


@pytest.mark.parametrize("fault", ["disk for a while", "disk", "thread"])
def test_what_one_rank_cannot_write_is_no_checkpoint_and_training_goes_on(tmp_path, fault) -> None:
    whole = run_ranks(trained, 2, str(tmp_path / "whole"), "")[0][0]
    ends = [end.value for end in Job(trained, 2, str(tmp_path / "run"), fault).ends(100)]
    folders = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    for found, error, _ in ends:
        if fault == "disk":  # the last one is not beside training
            last = tmp_path / "run" / "checkpoints" / "step_00000014"
            assert error.startswith(f"DistcacheError: the checkpoint {last} could not be written")
            assert "rank 1" in error and "File too large" in error and folders == []
        else:
            assert (found, error) == (whole, "")
    assert fault == "disk" or folders[-1].name == "step_00000014"
    assert "step_00000003" not in [folder.name for folder in folders]
    for folder in folders:
        Manifest.read(folder).verify(folder)


def test_a_rank_that_stands_still_while_it_writes_is_named(tmp_path: Path) -> None:
    job = Job(trained, 2, str(tmp_path), "stands still")
    _, error, took = job.ends(100, but=(1,))[0].value
    assert error.startswith("PeerError: ") and "rank 1 did not come within" in error
    assert took < 10 * HANG_S
    assert not list(tmp_path.glob("checkpoints/*/manifest.json"))


def damage(path: Path, how: str, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "cut":
        os.truncate(path, rng.randrange(len(data)))
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "cut", "flipped"])
def test_a_damaged_file_leads_to_the_older_checkpoint(world, tmp_path, caplog, how) -> None:
    every = {"trainer__checkpoint_every": 7, "trainer__keep_checkpoints": 9}
    every |= {"trainer__resume": "auto"}
    folder, rng = tmp_path / "run", random.Random(how)

    def ends() -> tuple:
        summary = toy_run(world, folder, ToyParallel(world), ToySource(), **every).summary
        return summary["loss_digest"], summary["state_digest"], summary["first_step"]

    whole, last = ends(), folder / "checkpoints/step_00000014"
    names = [path.name for path in last.iterdir()]
    assert len(names) == 3
    for name in names * (1 if how == "missing" else 4):
        caplog.clear()
        damage(last / name, how, rng)
        assert ends() == (*whole[:2], 7)
        lost = (name, how) == ("manifest.json", "missing")  # then it is none
        assert lost or ("passed over" in caplog.text and name in caplog.text), (name, caplog.text)
        Manifest.read(last).verify(last)


def test_another_model_and_another_version_are_refused_with_the_way_out(world, tmp_path) -> None:
    toy_run(world, tmp_path, ToyParallel(world), ToySource())
    (own,) = tmp_path.glob("checkpoints/step_*")
    auto = {"trainer__resume": "auto"}
    with pytest.raises(ConfigError, match=f"{own.name} .*optim was adam, is sgd.*another run.dir"):
        toy_run(world, tmp_path, ToyParallel(world), ToySource(), optim__name="sgd", **auto)
    found = Manifest.read(own)
    (own / "manifest.json").unlink()
    Manifest(found.header | {"format": 9}, found.files).write(own)
    with pytest.raises(ConfigError, match=f"{own.name} has checkpoint format 9.*resume with the"):
        toy_run(world, tmp_path, ToyParallel(world), ToySource(), **auto)
    for path in own.glob("*.distcp"):
        path.unlink()
    with pytest.raises(DataError, match="1 are damaged"):
        toy_run(world, tmp_path, ToyParallel(world), ToySource(), **auto)


# -----------------------------------------------------------------------------
# Agents that go and come.


class Agents:
    """torchrun's agents of one job in `home`, one rank each; `texts`: what they said."""

    def __init__(self, home: Path, words: tuple[str, ...]) -> None:
        self.home, self.words, self.port = home, words, free_port()
        self.started: list[subprocess.Popen] = []

    def start(self) -> subprocess.Popen:
        """One more; the first serves the rendezvous."""
        first = int(not self.started)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--max-restarts=3"),
            *(
                "--nproc-per-node=1",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{self.port}",
            ),
            *("--rdzv-id=a-test", "--local-addr=127.0.0.1"),
            f"--rdzv-conf=is_host={first},last_call_timeout=2,keep_alive_interval=1",
            *(*PROGRAM, *SMALL, *self.words),
        ]
        with (self.home / f"agent-{len(self.started)}").open("w") as out:
            # Without it torch's agents cannot take in another one.
            own = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
            how = {"cwd": self.home, "env": own, "start_new_session": True}
            self.started.append(subprocess.Popen(command, stdout=out, stderr=out, **how))
        return self.started[-1]

    def text(self, number: int) -> str:
        return (self.home / f"agent-{number}").read_text()

    def until(self, happened, what: str) -> None:
        deadline = time.monotonic() + 120
        while not happened():
            assert time.monotonic() < deadline and self.started[0].poll() is None, (
                what, self.text(0)[-3000:],
            )  # fmt: skip
            time.sleep(0.1)

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.started:
            for process in (agent.pid, *ranks_of(agent)):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            agent.wait()


def ranks_of(agent: subprocess.Popen) -> list[int]:
    try:
        found = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    except OSError:
        return []
    return [int(process) for process in found]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_agents_go_and_come(tmp_path: Path) -> None:
    """Two agents; one is killed, the other goes on alone; a third one joins it."""
    words = ("trainer.steps=2500", "trainer.dtype=float64", "trainer.checkpoint_every=50")
    done = train([*SMALL, *words, "run.dir=whole"], tmp_path, program=PROGRAM)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"

    def lines(name: str) -> list[dict]:
        text = (tmp_path / name / "metrics.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if "loss" in line]

    def whole() -> list[Path]:
        return list(folder.glob("checkpoints/*/manifest.json"))

    with Agents(tmp_path, (*words, f"run.dir={folder}")) as agents:
        first, second = agents.start(), agents.start()
        agents.until(whole, "no first checkpoint")
        orphans = ranks_of(second)
        os.kill(second.pid, signal.SIGKILL)
        second.wait()
        agents.until(lambda: not any(Path(f"/proc/{own}").exists() for own in orphans), "orphans")
        agents.until(lambda: "on 1 rank(s)" in agents.text(0), "not alone")
        third = agents.start()
        assert [first.wait(250), third.wait(60)] == [0, 0], agents.text(0)[-3000:]
        said = agents.text(0) + agents.text(2)
    assert said.count("on 2 rank(s)") == 2 and said.count("on 1 rank(s)") == 1
    assert "published no configuration" not in said
    expected, found = lines("whole"), lines("run")
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    losses = [[line["loss"] for line in of] for of in (found, expected)]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-10, atol=0)
    ends = [max((tmp_path / of).glob("checkpoints/step_*")) for of in ("run", "whole")]
    values, others = map(checkpoints.tensors, ends)
    assert values.keys() == others.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, others[name], rtol=1e-10, atol=1e-10, msg=name)
    for path in whole():
        Manifest.read(path.parent).verify(path.parent)


@pytest.mark.slow
def test_torchrun_that_is_asked_to_end_leaves_a_checkpoint(tmp_path: Path) -> None:
    words = ("trainer.steps=100000", "trainer.checkpoint_every=100000", "run.dir=run")
    with Agents(tmp_path, words) as agents:
        agent = agents.start()
        agents.until(lambda: "step 1/" in agents.text(0), "no step")
        agent.send_signal(signal.SIGTERM)
        agent.wait(100)
        assert "stopped by SIGTERM after step" in agents.text(0)
    (own,) = (tmp_path / "run").glob("checkpoints/step_*")
    Manifest.read(own).verify(own)
