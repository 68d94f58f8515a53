"""The run from end to end on a toy mode: loop, stop, resume, summary; one and two ranks. Losses
that are read steps later: same run, same stop, and the state before a bad step."""

from __future__ import annotations

import hashlib
import json
import signal
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from protocol_cases import planner_threads
from ranks import run_ranks
from toy_parallel import TABLES, ToyParallel, ToySource, toy_run

from distcache.comm.world import close_world, open_world
from distcache.errors import DistcacheError, NonFiniteLossError
from distcache.parallel.base import Step
from distcache.trainer.record import SUMMARY_KEYS

BAD, STOP = 9, 5


def toy(world, folder, source=None, stop_after=None, number=signal.SIGINT, delay=0, **changes):
    """One run in `folder`: its result, its mode and its source."""
    source, mode = source or ToySource(), ToyParallel(world, delay, stop_after, number)
    falling = toy_run(world, folder, mode, source, lambda step: (0.1 / (1 + step), 0.1), **changes)
    return falling, mode, source


def scenario(rank: int, world_size: int, folder: str, delay: int) -> dict[str, Any]:
    """All runs of one world size in one set of processes; what each came to."""
    world, home, seen = open_world("cpu", timeout_s=60), Path(folder), {}
    torch.set_num_threads(1)
    before = signal.getsignal(signal.SIGINT)
    run = partial(toy, world, delay=delay)
    whole, mode, source = run(home / "whole")
    seen["whole"], seen["summary"], seen["drawn"] = digests(whole), whole.summary, source.drawn
    seen["end"] = (mode.closed, planner_threads(), whole.stopped_by)

    often = {"trainer__eval_every": 4, "trainer__eval_steps": 3}
    evaluated, _, _ = run(home / "evaluated", **often)
    seen["eval"], seen["alike"] = evaluated.summary["eval_auc"], [digests(evaluated)]

    run(home / "half", trainer__steps=8)
    resumed, mode, _ = run(home / "rest", trainer__resume=str(home / "half"))
    seen["rest"] = resumed.summary["first_step"], resumed.summary["steps"], int(mode.applied)
    seen["alike"].append(digests(resumed))

    for number in (signal.SIGINT, signal.SIGTERM):
        folder = home / str(int(number))
        stopped, mode, _ = run(folder, stop_after=STOP, number=number, run__save=False)
        seen[number] = (stopped.stopped_by, stopped.summary["steps"], int(mode.applied))
        again, _, _ = run(folder, trainer__resume="auto")
        seen["alike"].append(digests(again))

    try:
        run(home / "bad", source=ToySource(bad=(BAD, world_size - 1)), run__save=False)
    except NonFiniteLossError as error:
        seen["bad"] = str(error)
    # The state that a bad step leaves is that before it: the run goes on to the same end.
    repaired, _, _ = run(home / "good", trainer__resume=str(home / "bad"))
    seen["alike"] += [digests(repaired), digests(toy(world, home / "at once")[0])]
    seen["handlers"] = signal.getsignal(signal.SIGINT) is before
    close_world(world)
    return seen


def digests(result) -> tuple[str, str]:
    return result.summary["loss_digest"], result.summary["state_digest"]


@pytest.fixture(
    scope="module", params=[pytest.param((1, 0), marks=pytest.mark.slow), (2, 0), (1, 2), (2, 2)]
)
def seen(request, tmp_path_factory):
    size, delay = request.param
    folder = tmp_path_factory.mktemp(f"world{size}")
    return run_ranks(scenario, size, str(folder), delay), folder, delay


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_whole_run_ends_in_order_and_says_what_every_mode_says(seen):
    ranks, folder, _ = seen
    for rank in ranks:
        assert rank["end"] == (1, 0, None)
        assert rank["drawn"] == [("train", step) for step in range(14)]
        assert rank["handlers"]
        for name in ("whole", "summary", "eval", "bad"):
            assert rank[name] == ranks[0][name], name
    names = sorted(entry.name for entry in (folder / "whole").iterdir())
    assert names == ["checkpoints", "metrics.jsonl", "summary.json"]
    summary = json.loads((folder / "whole" / "summary.json").read_text())
    assert list(summary) == list(SUMMARY_KEYS)
    assert summary == ranks[0]["summary"]
    known = {"world_size": len(ranks), "first_step": 0, "steps": 14, "table_rows": 38}
    known["eval_auc"] = None
    assert known == {key: summary[key] for key in known}
    assert summary["step_ms"]["p90"] >= summary["step_ms"]["median"] > 0
    assert summary["samples_per_second"] > 0
    logged = lines(folder / "whole")
    assert [line["step"] for line in logged] == [5, 10, 14]
    assert logged[-1]["loss"] == summary["final_loss"] and logged[1]["epoch"] == 1


def test_evaluated_resumed_stopped_and_repaired_runs_have_the_bits_of_the_whole(seen):
    ranks, folder, delay = seen
    for rank in ranks:
        assert rank["alike"] == [ranks[0]["whole"]] * 6
        assert rank["rest"] == (8, 6, 14)
        for number in (signal.SIGINT, signal.SIGTERM):  # to one rank: all after the same step
            by, steps, applied = rank[number]
            assert (by, steps) == (number, ranks[0][number][1]) and steps == applied
            assert STOP + 2 <= steps <= STOP + 2 + delay
    evaluations = [line for line in lines(folder / "evaluated") if "eval_auc" in line]
    assert [line["step"] for line in evaluations] == [4, 8, 12, 14]
    assert 0.5 < evaluations[-1]["eval_auc"] == ranks[0]["eval"] <= 1
    assert f"step {BAD}: the loss is not finite on rank {len(ranks) - 1}" in ranks[0]["bad"]
    assert (folder / "bad" / "checkpoints" / f"step_{BAD:08d}" / "manifest.json").is_file()
    assert not (folder / "bad" / "summary.json").exists()


class Odd(ToyParallel):
    """Reports `loss` for every step where one is given, and gets the signals in `signals`: those
    of the evaluation batch of that number."""

    def __init__(self, world, loss: float | None = None, signals: dict | None = None) -> None:
        super().__init__(world)
        self.loss, self.signals, self.evaluated = loss, signals or {}, 0

    def train_step(self, step, asks=0):
        result = super().train_step(step, asks)
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
    assert not (tmp_path / "checkpoints").exists()
    mode = ToyParallel(world)
    values = [mode.table_block(at, 0, table.rows) for at, table in enumerate(TABLES)]
    values += [value.detach() for value in mode.dense_state().values()]
    whole = b"".join(value.numpy().tobytes() for value in values)
    summary = toy_run(world, tmp_path, mode, trainer__steps=0, run__digest="auto").summary
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
    for second in (signal.SIGINT, signal.SIGTERM):  # which torchrun makes of a second Ctrl-C
        mode = Odd(world, signals={1: (signal.SIGINT, second)})
        with pytest.raises(KeyboardInterrupt):
            toy_run(world, tmp_path, mode, trainer__eval_steps=1)
        assert mode.closed == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stream_out_of_order_and_a_sum_that_overflows_are_refused(world, tmp_path):
    class Swapped(ToyParallel):
        def stream(self, batches):
            for step in super().stream(batches):
                yield Step(replace(step.batch, index=1), step.context)

    with pytest.raises(DistcacheError, match="step 1 where 0 is due"):
        toy_run(world, tmp_path, Swapped(world))
    with pytest.raises(NonFiniteLossError, match="when summed over ranks"):  # no rank is to blame
        toy_run(world, tmp_path, Odd(world, float("inf")))


def test_an_evaluation_of_an_earlier_state_is_not_the_summary_s(world, tmp_path):
    changes = {"trainer__eval_every": 4, "trainer__eval_steps": 2, "run__save": False}
    result, _, _ = toy(world, tmp_path, stop_after=4, **changes)  # evaluated after step 3
    assert "eval_auc" in (tmp_path / "metrics.jsonl").read_text()
    assert (result.summary["steps"], result.summary["eval_auc"]) == (6, None)
