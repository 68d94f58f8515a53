"""The run from end to end on a toy mode: loop, stop, resume, summary; one and two ranks. Losses
that are read steps later: same run, same stop, and the state before a bad step."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from scenarios import SmallNet
from toy_parallel import TABLES, ToyParallel, ToySource, toy_run

from distcache.comm.world import World, close_world, open_world
from distcache.errors import DistcacheError, NonFiniteLossError
from distcache.models import initialise
from distcache.parallel.base import OptimizerSpec
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.trainer.record import SUMMARY_KEYS


def toy(world, folder, source=None, stop_after=None, number=signal.SIGINT, **changes):
    """One run in `folder`: its result, its mode and its source."""
    source, mode = source or ToySource(), ToyParallel(world, stop_after, number)
    falling = toy_run(world, folder, mode, source, lambda step: (0.1 / (1 + step), 0.1), **changes)
    return falling, mode, source


def digests(result) -> tuple[str, str]:
    return result.summary["loss_digest"], result.summary["state_digest"]


def scenario(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """All runs of one world size in one set of processes; what each came to."""
    world, home, seen = open_world("cpu", timeout_s=60), Path(folder), {}
    torch.set_num_threads(1)
    before = signal.getsignal(signal.SIGINT)
    whole, mode, source = toy(world, home / "whole")
    seen["whole"], seen["summary"], seen["drawn"] = digests(whole), whole.summary, source.drawn
    seen["end"] = (mode.closed, mode.abandoned, mode.flushed, whole.stopped_by)

    often = {"trainer__eval_every": 4, "trainer__eval_steps": 3}
    evaluated, _, _ = toy(world, home / "evaluated", **often)
    seen["eval"], seen["alike"] = evaluated.summary["eval_auc"], [digests(evaluated)]

    toy(world, home / "half", trainer__steps=8)
    resumed, mode, _ = toy(world, home / "rest", trainer__resume=str(home / "half"))
    seen["rest"] = resumed.summary["first_step"], resumed.summary["steps"], mode.steps
    seen["alike"].append(digests(resumed))

    for number in (signal.SIGINT, signal.SIGTERM):
        folder = home / str(int(number))
        stopped, mode, _ = toy(world, folder, stop_after=5, number=number, run__save=False)
        seen[number] = (stopped.stopped_by, stopped.summary["steps"], mode.abandoned, mode.steps)
        again, _, _ = toy(world, folder, trainer__resume=str(folder / "model"))
        seen["alike"].append(digests(again))

    try:
        toy(world, home / "bad", source=ToySource(bad=(9, world_size - 1)), run__save=False)
    except NonFiniteLossError as error:
        seen["bad"] = str(error)
    repaired, _, _ = toy(world, home / "good", trainer__resume=str(home / "bad"))
    seen["alike"].append(digests(repaired))
    seen["handlers"] = signal.getsignal(signal.SIGINT) is before
    close_world(world)
    return seen


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    return run_ranks(scenario, request.param, str(folder)), folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_whole_run_ends_in_order_and_says_what_every_mode_says(seen):
    ranks, folder = seen
    for rank in ranks:
        assert rank["end"] == (1, 0, 1, None)
        assert rank["drawn"] == [("train", step) for step in range(14)]
        assert rank["handlers"]
        for name in ("whole", "summary", "eval", "bad"):
            assert rank[name] == ranks[0][name], name
    names = sorted(entry.name for entry in (folder / "whole").iterdir())
    assert names == ["metrics.jsonl", "model", "summary.json"]
    summary = json.loads((folder / "whole" / "summary.json").read_text())
    assert list(summary) == list(SUMMARY_KEYS)
    assert summary == ranks[0]["summary"]
    known = {"world_size": len(ranks), "first_step": 0, "steps": 14, "table_rows": 38}
    known |= {"collective_bytes": 8}
    known |= dict.fromkeys(("hit_rate", "rows_fetched", "eval_auc", "cache_rows"))
    assert known.items() <= {key: summary[key] for key in known}.items()
    assert summary["step_ms"]["p90"] >= summary["step_ms"]["median"] > 0
    assert summary["samples_per_second"] > 0
    logged = lines(folder / "whole")
    assert [line["step"] for line in logged] == [5, 10, 14]
    assert logged[-1]["loss"] == summary["final_loss"] and logged[1]["epoch"] == 1


def test_evaluated_resumed_stopped_and_repaired_runs_have_the_bits_of_the_whole(seen):
    ranks, folder = seen
    for rank in ranks:
        assert rank["alike"] == [ranks[0]["whole"]] * 5
        assert rank["rest"] == (8, 6, 14)
        for number in (signal.SIGINT, signal.SIGTERM):  # to one rank: all after the same step
            assert rank[number] == (number, 7, 1, 7)
    evaluations = [line for line in lines(folder / "evaluated") if "eval_auc" in line]
    assert [line["step"] for line in evaluations] == [4, 8, 12, 14]
    assert 0.5 < evaluations[-1]["eval_auc"] == ranks[0]["eval"] <= 1
    assert f"step 9: the loss is not finite on rank {len(ranks) - 1}" in ranks[0]["bad"]
    assert (folder / "bad" / "model" / ".metadata").is_file()
    assert not (folder / "bad" / "summary.json").exists()


class Odd(ToyParallel):
    """Reports `loss` for every step where one is given, and gets the signals in `signals`: those
    of the evaluation batch of that number."""

    def __init__(self, world, loss: float | None = None, signals: dict | None = None) -> None:
        super().__init__(world)
        self.loss, self.signals, self.evaluated = loss, signals or {}, 0

    def train_step(self, step, stop=False):
        result = super().train_step(step, stop)
        return result if self.loss is None else type(result)(self.loss, (), result.stop)

    def eval_step(self, step):
        self.evaluated += 1
        for number in self.signals.get(self.evaluated, ()):
            signal.raise_signal(number)
        return super().eval_step(step)


def test_digests_by_hand_and_only_where_asked(world, tmp_path):
    result = toy_run(world, tmp_path, Odd(world, 0.25), trainer__steps=3, run__save=False)
    chain = b""
    for _ in range(3):
        chain = hashlib.sha256(chain + struct.pack("<d", 0.25)).digest()
    assert result.summary["loss_digest"] == chain.hex()
    assert not (tmp_path / "model").exists()
    mode = ToyParallel(world)
    summary = toy_run(world, tmp_path, mode, trainer__steps=0, run__digest="auto").summary
    values = [bag.weight for bag in mode.bags] + list(mode.dense.parameters())
    whole = b"".join(value.detach().numpy().tobytes() for value in values)
    assert summary["state_digest"] == hashlib.sha256(whole).hexdigest()
    assert (summary["loss_digest"], summary["final_loss"]) == (None, None)
    assert summary["step_ms"] == {"median": None, "p90": None}
    result, _, _ = toy(world, tmp_path, run__digest="false", run__save=False)
    assert result.summary["state_digest"] is None


def test_one_class_held_out_gives_null_and_a_warning(world, tmp_path, caplog):
    result, _, _ = toy(world, tmp_path, source=ToySource(labels=1.0), trainer__eval_steps=9)
    assert result.summary["eval_auc"] is None
    assert result.summary["eval_ne"] is None
    assert result.summary["eval_logloss"] > 0
    assert "both classes" in caplog.text
    assert "5 batches are held out" in caplog.text


def test_a_stop_does_not_wait_for_a_long_evaluation_nor_ctrl_c_twice(world, tmp_path):
    mode = Odd(world, signals={2: (signal.SIGTERM,)})
    result = toy_run(world, tmp_path, mode, trainer__eval_every=4, trainer__eval_steps=5)
    assert (mode.evaluated, result.summary["steps"], result.stopped_by) == (2, 4, signal.SIGTERM)
    assert result.summary["eval_auc"] is None
    mode = Odd(world, signals={1: (signal.SIGINT, signal.SIGINT)})
    with pytest.raises(KeyboardInterrupt):
        toy_run(world, tmp_path, mode, trainer__eval_steps=1)
    assert mode.closed == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stream_out_of_order_and_a_sum_that_overflows_are_refused(world, tmp_path):
    class Swapped(ToyParallel):
        def stream(self, batches):
            first, second, *_ = super().stream(batches)
            yield from (second, first)

    with pytest.raises(DistcacheError, match="step 1 where 0 is due"):
        toy_run(world, tmp_path, Swapped(world))
    with pytest.raises(NonFiniteLossError, match="when summed over ranks"):  # no rank is to blame
        toy_run(world, tmp_path, Odd(world, float("inf")))


def test_an_evaluation_of_an_earlier_state_is_not_the_summary_s(world, tmp_path):
    changes = {"trainer__eval_every": 4, "trainer__eval_steps": 2, "run__save": False}
    result, _, _ = toy(world, tmp_path, stop_after=4, **changes)  # evaluated after step 3
    assert "eval_auc" in (tmp_path / "metrics.jsonl").read_text()
    assert (result.summary["steps"], result.summary["eval_auc"]) == (6, None)


OPTIMIZERS = ("sgd", "rowwise_adagrad", "adam")
BAD, STOP = 6, 4


def run(world: World, folder, optimizer, delay, stop_at=None, bad=None, **changes):
    """A run of the cached mode, whose losses are read `delay` steps later, as on a GPU."""
    settings = CachedSettings("data", (28,), 3, 2, dtype=torch.float64, result_delay=delay)
    model, spec = initialise(SmallNet(3, 8), 0, torch.float64), OptimizerSpec(optimizer)
    mode = CachedParallel(world, TABLES, ("cat_0", "cat_1"), model, spec, settings)
    step_of = mode.train_step

    def train_step(step, stop=False):
        if step.batch.index == stop_at and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step_of(step, stop)

    mode.train_step = train_step
    changes |= {"optim__name": optimizer, "trainer__eval_every": 5, "trainer__eval_steps": 2}
    source = ToySource(bad=bad)
    result = toy_run(world, folder, mode, source, lambda step: (0.05, 0.05), **changes)
    keys = ("loss_digest", "state_digest", "final_loss", "eval_auc", "steps", "hit_rate")
    return {key: result.summary[key] for key in keys} | {"by": result.stopped_by}


def late_cases(rank: int, size: int, folder: str) -> dict:
    """Whole runs, stopped ones, ones with a bad step and their resumption, by optimizer."""
    world, home, seen = open_world("cpu", "gloo", 60), Path(folder), {}
    for optimizer in OPTIMIZERS:
        found = {
            "at once": run(world, home / "at_once", optimizer, 0),
            "late": run(world, home / "late", optimizer, 2),
            "stopped": run(world, home / "stopped", optimizer, 2, stop_at=STOP),
        }
        for delay in (0, 2):
            with pytest.raises(NonFiniteLossError) as caught:
                run(world, home / f"bad{delay}", optimizer, delay, bad=(BAD, size - 1))
            found[f"bad {delay}"] = str(caught.value).replace(f"bad{delay}", "bad")
        # The state that a bad step leaves is that before it: the run goes on to the same end.
        for name in ("stopped", "bad2"):
            resume = {"trainer__resume": str(home / name)}
            found[f"after {name}"] = run(world, home / "rest", optimizer, 2, **resume)
        seen[optimizer] = found
    close_world(world)
    return seen


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_same_run_same_stop_and_the_state_before_a_bad_step(tmp_path, size) -> None:
    ranks = run_ranks(late_cases, size, str(tmp_path), timeout=300)
    for rank in ranks:
        for optimizer, found in rank.items():
            whole, stopped = found["at once"], found["stopped"]
            assert found["late"] == whole and whole["steps"] == 14
            assert stopped["by"] == signal.SIGINT and STOP < stopped["steps"] <= STOP + 1 + 2
            assert stopped["steps"] == ranks[0][optimizer]["stopped"]["steps"]
            for name in ("after stopped", "after bad2"):
                for key in ("loss_digest", "state_digest", "final_loss", "eval_auc"):
                    assert found[name][key] == whole[key], (name, key)
            assert found["bad 0"] == found["bad 2"]
            said = f"step {BAD}: the loss is not finite on rank {size - 1};"
            assert found["bad 2"].startswith(said)
