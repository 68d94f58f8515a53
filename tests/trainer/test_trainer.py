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
    seen["whole"] = digests(whole)
    seen["summary"] = whole.summary
    seen["end"] = (mode.closed, mode.abandoned, mode.flushed, whole.stopped_by)
    seen["drawn"] = source.drawn

    often = {"trainer__eval_every": 4, "trainer__eval_steps": 3}
    evaluated, _, _ = toy(world, home / "evaluated", **often)
    seen["evaluated"], seen["eval"] = digests(evaluated), evaluated.summary["eval_auc"]

    toy(world, home / "half", trainer__steps=8)
    resumed, mode, _ = toy(world, home / "rest", trainer__resume=str(home / "half"))
    seen["resumed"], seen["resumed_summary"] = digests(resumed), resumed.summary
    seen["resumed_steps"] = mode.steps

    for name, number in (("int", signal.SIGINT), ("term", signal.SIGTERM)):
        stopped, mode, _ = toy(world, home / name, stop_after=5, number=number, run__save=False)
        seen[name] = (stopped.stopped_by, stopped.summary["steps"], mode.abandoned, mode.steps)
        again, _, _ = toy(world, home / name, trainer__resume=str(home / name / "model"))
        seen[name + "_resumed"] = digests(again)

    try:
        toy(world, home / "bad", source=ToySource(bad=(9, world_size - 1)), run__save=False)
    except NonFiniteLossError as error:
        seen["bad"] = str(error)
    repaired, _, _ = toy(world, home / "good", trainer__resume=str(home / "bad"))
    seen["repaired"] = digests(repaired)
    seen["handlers"] = signal.getsignal(signal.SIGINT) is before
    close_world(world)
    return seen


@pytest.fixture(scope="module", params=[1, 2])
def seen(request, tmp_path_factory):
    """What every rank saw, and the folder of the runs."""
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    return run_ranks(scenario, request.param, str(folder)), folder, request.param


def test_ranks_agree(seen):
    ranks, _, _ = seen
    for other in ranks[1:]:
        for name in ("whole", "summary", "eval", "resumed", "int", "term", "bad", "repaired"):
            assert other[name] == ranks[0][name], name


def test_a_whole_run_ends_in_order(seen):
    ranks, folder, _ = seen
    for rank in ranks:
        assert rank["end"] == (1, 0, 1, None)
        assert rank["drawn"] == [("train", step) for step in range(14)]
        assert rank["handlers"]
    assert sorted(entry.name for entry in (folder / "whole").iterdir()) == [
        "metrics.jsonl",
        "model",
        "summary.json",
    ]


def test_summary_has_exactly_the_keys_of_every_mode(seen):
    ranks, folder, world_size = seen
    summary = json.loads((folder / "whole" / "summary.json").read_text())
    assert list(summary) == list(SUMMARY_KEYS)
    assert summary == ranks[0]["summary"]
    assert (summary["world_size"], summary["first_step"], summary["steps"]) == (world_size, 0, 14)
    assert summary["table_rows"] == 38
    assert summary["collective_bytes"] == 8
    assert summary["step_ms"]["p90"] >= summary["step_ms"]["median"] > 0
    assert summary["samples_per_second"] > 0
    for key in ("hit_rate", "rows_fetched", "eval_auc", "cache_rows"):
        assert summary[key] is None


def test_logged_steps_are_lines_and_chain_the_digest(seen):
    ranks, folder, _ = seen
    lines = (folder / "whole" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 10, 14]
    assert json.loads(lines[-1])["loss"] == ranks[0]["summary"]["final_loss"]
    assert json.loads(lines[1])["epoch"] == 1


def test_evaluation_changes_no_digest(seen):
    ranks, folder, _ = seen
    assert ranks[0]["evaluated"] == ranks[0]["whole"]
    assert 0.5 < ranks[0]["eval"] <= 1
    lines = (folder / "evaluated" / "metrics.jsonl").read_text().splitlines()
    evaluations = [json.loads(line) for line in lines if "eval_auc" in line]
    assert [line["step"] for line in evaluations] == [4, 8, 12, 14]
    assert evaluations[-1]["eval_auc"] == ranks[0]["eval"]


def test_resume_goes_on_to_the_same_digests(seen):
    ranks, _, _ = seen
    assert ranks[0]["resumed"] == ranks[0]["whole"]
    summary = ranks[0]["resumed_summary"]
    assert (summary["first_step"], summary["steps"]) == (8, 6)
    assert ranks[-1]["resumed_steps"] == 14


@pytest.mark.parametrize(("name", "number"), [("int", 2), ("term", 15)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(seen, name, number):
    ranks, _, _ = seen
    for rank in ranks:
        assert rank[name] == (number, 7, 1, 7)
    assert ranks[0][name + "_resumed"] == ranks[0]["whole"]


def test_a_loss_that_is_not_finite_saves_the_state_before_it(seen):
    ranks, folder, world_size = seen
    assert f"step 9: the loss is not finite on rank {world_size - 1}" in ranks[0]["bad"]
    assert (folder / "bad" / "model" / ".metadata").is_file()
    assert not (folder / "bad" / "summary.json").exists()
    assert ranks[0]["repaired"] == ranks[0]["whole"]


class FixedLoss(ToyParallel):
    """Reports a given loss for every step."""

    loss = 0.5

    def train_step(self, step, stop=False):
        """The step, with its loss replaced."""
        result = super().train_step(step, stop)
        return type(result)(self.loss, (), result.stop)


def fixed(world, folder, loss, **changes):
    mode = FixedLoss(world)
    mode.loss = loss
    return toy_run(world, folder, mode, **changes)


def test_digests_by_hand(world, tmp_path):
    result = fixed(world, tmp_path, 0.25, trainer__steps=3, run__save=False)
    chain = b""
    for _ in range(3):
        chain = hashlib.sha256(chain + struct.pack("<d", 0.25)).digest()
    assert result.summary["loss_digest"] == chain.hex()
    assert not (tmp_path / "model").exists()
    mode = ToyParallel(world)
    summary = toy_run(world, tmp_path, mode, trainer__steps=0).summary
    values = [bag.weight for bag in mode.bags] + list(mode.dense.parameters())
    whole = b"".join(value.detach().numpy().tobytes() for value in values)
    assert summary["state_digest"] == hashlib.sha256(whole).hexdigest()
    assert summary["loss_digest"] is None
    assert summary["final_loss"] is None
    assert summary["step_ms"] == {"median": None, "p90": None}


def test_a_sum_that_overflows_is_refused_though_no_rank_is_to_blame(world, tmp_path):
    with pytest.raises(NonFiniteLossError, match="when summed over ranks"):
        fixed(world, tmp_path, float("inf"))


def test_no_digest_unless_asked(world, tmp_path):
    result, _, _ = toy(world, tmp_path, run__digest="false", run__save=False)
    assert result.summary["state_digest"] is None
    result, _, _ = toy(world, tmp_path, run__digest="auto", run__save=False)
    assert result.summary["state_digest"] is not None


def test_one_class_held_out_gives_null_and_a_warning(world, tmp_path, caplog):
    result, _, _ = toy(world, tmp_path, source=ToySource(labels=1.0), trainer__eval_steps=9)
    assert result.summary["eval_auc"] is None
    assert result.summary["eval_ne"] is None
    assert result.summary["eval_logloss"] > 0
    assert "both classes" in caplog.text
    assert "5 batches are held out" in caplog.text


def test_a_second_ctrl_c_interrupts_and_closes_the_mode(world, tmp_path):
    class Impatient(ToyParallel):
        def eval_step(self, step):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    mode = Impatient(world)
    with pytest.raises(KeyboardInterrupt):
        toy_run(world, tmp_path, mode, trainer__eval_steps=1)
    assert mode.closed == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stop_does_not_wait_for_a_long_evaluation(world, tmp_path):
    class Interrupted(ToyParallel):
        evaluated = 0

        def eval_step(self, step):
            self.evaluated += 1
            if self.evaluated == 2:
                signal.raise_signal(signal.SIGTERM)
            return super().eval_step(step)

    mode = Interrupted(world)
    result = toy_run(world, tmp_path, mode, trainer__eval_every=4, trainer__eval_steps=5)
    assert (mode.evaluated, result.summary["steps"], result.stopped_by) == (2, 4, signal.SIGTERM)
    assert result.summary["eval_auc"] is None


def test_a_stream_out_of_order_is_refused(world, tmp_path):
    class Swapped(ToyParallel):
        def stream(self, batches):
            first, second, *_ = super().stream(batches)
            yield from (second, first)

    with pytest.raises(DistcacheError, match="step 1 where 0 is due"):
        toy_run(world, tmp_path, Swapped(world))


def test_an_evaluation_of_an_earlier_state_is_not_the_summary_s(world, tmp_path):
    changes = {"trainer__eval_every": 4, "trainer__eval_steps": 2, "run__save": False}
    result, _, _ = toy(world, tmp_path, stop_after=4, **changes)  # evaluated after step 3
    assert "eval_auc" in (tmp_path / "metrics.jsonl").read_text()
    assert (result.summary["steps"], result.summary["eval_auc"]) == (6, None)


OPTIMIZERS = ("sgd", "rowwise_adagrad", "adam")
BAD, STOP = 6, 4


def make(world: World, optimizer: str, delay: int | None, stop_at: int | None) -> CachedParallel:
    settings = CachedSettings("data", (28,), 3, 2, dtype=torch.float64, result_delay=delay)
    features = ("cat_0", "cat_1")
    model = initialise(SmallNet(3, 8), 0, torch.float64)
    mode = CachedParallel(world, TABLES, features, model, OptimizerSpec(optimizer), settings)
    step_of = mode.train_step

    def train_step(step, stop=False):
        if step.batch.index == stop_at and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step_of(step, stop)

    mode.train_step = train_step
    return mode


def run(world, folder, optimizer, delay, stop_at=None, bad=None, **changes):
    """A run of the cached mode, whose losses are read `delay` steps later, as on a GPU."""
    changes |= {"optim__name": optimizer, "trainer__eval_every": 5, "trainer__eval_steps": 2}
    mode, source = make(world, optimizer, delay, stop_at), ToySource(bad=bad)
    return toy_run(world, folder, mode, source, lambda step: (0.05, 0.05), **changes)


def found(result) -> dict:
    keys = ("loss_digest", "state_digest", "final_loss", "eval_auc", "steps", "hit_rate")
    return {key: result.summary[key] for key in keys}


def late_cases(rank: int, size: int, folder: str) -> dict:
    """Whole runs, stopped ones, ones with a bad step and their resumption, by optimizer."""
    world, home, seen = open_world("cpu", "gloo", 60), Path(folder), {}
    for optimizer in OPTIMIZERS:
        at_once = run(world, home / "at_once", optimizer, 0)
        late = run(world, home / "late", optimizer, 2)
        seen[optimizer, "whole"] = found(at_once), found(late)
        stopped = run(world, home / "stopped", optimizer, 2, stop_at=STOP)
        seen[optimizer, "stopped"] = stopped.stopped_by, stopped.summary["steps"]
        rest = run(world, home / "rest", optimizer, 2, trainer__resume=str(home / "stopped"))
        seen[optimizer, "resumed"] = found(rest)
        bad = (BAD, size - 1)
        texts = []
        for delay in (0, 2):
            with pytest.raises(NonFiniteLossError) as caught:
                run(world, home / f"bad{delay}", optimizer, delay, bad=bad)
            texts.append(str(caught.value).replace(f"bad{delay}", "bad"))
        seen[optimizer, "bad"] = texts
        # The state that a bad step leaves is that before it: the run goes on to the same end.
        good = run(world, home / "good", optimizer, 2, trainer__resume=str(home / "bad2"))
        seen[optimizer, "repaired"] = found(good)
    close_world(world)
    return seen


@pytest.mark.parametrize("size", [1, 2])
def test_same_run_same_stop_and_the_state_before_a_bad_step(tmp_path, size) -> None:
    ranks = run_ranks(late_cases, size, str(tmp_path), timeout=300)
    for rank in ranks:
        for optimizer in OPTIMIZERS:
            at_once, late = rank[optimizer, "whole"]
            assert late == at_once and late["steps"] == 14
            by, steps = rank[optimizer, "stopped"]
            assert by == signal.SIGINT and STOP < steps <= STOP + 1 + 2
            assert steps == ranks[0][optimizer, "stopped"][1]
            for name in ("resumed", "repaired"):
                found = rank[optimizer, name]
                for key in ("loss_digest", "state_digest", "final_loss", "eval_auc"):
                    assert found[key] == at_once[key], (name, key)
            at_once, late = rank[optimizer, "bad"]
            assert late == at_once
            assert late.startswith(f"step {BAD}: the loss is not finite on rank {size - 1};")
