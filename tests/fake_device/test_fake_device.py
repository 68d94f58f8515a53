"""On a device that does things late and forgets: it is as it says, and trainer and drop-in have
there the bits of `resident`.

What runs in a process that has the device takes one argument; calls and results can be pickled. No
loop here reads a loss at once: one that does orders all streams by itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ebc_cases import Pooled, batches, cached, dense_optimizer, loss_of, mixed_configs, using
from fake_device.fake_cuda import DEVICE
from fake_device.process import run
from fake_device.runs import digest_of
from scenarios import Shaker

from distcache import CachedEmbedding, CachedEmbeddingBag, lookahead, train
from distcache.optim import SGD

KEYS = """
    trainer.device=cuda trainer.backend=gloo trainer.steps=16 trainer.log_level=ERROR
    data.table_rows=[900,200,40] data.global_batch_size=24 data.dense_features=3 data.bag_size=2.0
    data.zipf=0.6 data.weighted=true
    model.embedding_dim=8 model.dense_arch=[8,8] model.over_arch=[8,1]
    optim=adagrad cache.lookahead=3 run.save=false
"""

SCHEDULES = [("lazy", 1), ("moody", 2), ("random", 3)]
RESIDENT = ["parallel=resident", "trainer.cuda_graph=false"]
CPU = ["parallel=resident", "trainer.device=cpu"]

ONE = [(150, 0, "staged"), (250, 1, "zero_copy"), (430, 3, "staged")]
"""Rows, P and access: caches that hold hardly more than the rows of P + 1 steps."""

TWO = [(150, 0, "staged", "replicated"), (250, 1, "zero_copy", "mixed")]
TWO += [(290, 3, "zero_copy", "sharded"), (160, 1, "staged", "sharded")]
"""The same with the placement, for two ranks."""

SIZES = {"replicated": (170, 260, 440), "sharded": (110, 170, 300), "mixed": (140, 200, 330)}
REST = [
    (rows, prefetch, access, placement)
    for access in ("staged", "zero_copy")
    for placement, sizes in SIZES.items()
    for prefetch, rows in zip((0, 1, 3), sizes, strict=True)
]


def command(call: dict[str, Any]) -> dict[str, Any]:
    """The summary of `python -m distcache.train`: its loop reads losses two steps late on a GPU.

    `keys`: beside KEYS; `folder`: the run's.
    """
    sys.argv = ["train", *KEYS.split(), *call["keys"], f"run.dir={call['folder']}"]
    code = train.main()
    if code:
        raise RuntimeError(f"exit code {code}")
    return json.loads((call["folder"] / "summary.json").read_text())


def keys(rows: int, prefetch: int, access: str, placement: str = "replicated") -> list[str]:
    """The keys of mode `data`."""
    given = [f"cache.rows={rows}", f"cache.prefetch={prefetch}", f"store.access={access}"]
    share = ["cache.replicated_share=0.05"] if placement == "mixed" else []
    return [*given, f"cache.placement={placement}", *share]


def calls(folder: Path, cases: list[list[str]], *common: str) -> list[dict[str, Any]]:
    """Calls of `command`, each with a folder of its own."""
    return [{"keys": [*common, *keys], "folder": folder / str(i)} for i, keys in enumerate(cases)]


def check(found: list[list[dict[str, Any]]]) -> None:
    """All runs on the device have the digests of the first, which is `resident`."""
    of_all = [summary for by_rank in found for summary in by_rank]
    assert len({(one["loss_digest"], one["state_digest"]) for one in of_all}) == 1
    assert min(by_rank[0]["rows_written_back"] for by_rank in found[1:]) > 50


@pytest.mark.slow
def test_one_rank_has_the_bits_of_resident(guard: Path, tmp_path: Path) -> None:
    cases = [RESIDENT, *(keys(*case) for case in ONE), CPU]
    under = [*SCHEDULES, *SCHEDULES[:2]]
    *found, on_cpu = run(guard, command, calls(tmp_path, cases), under=under)
    check(found)
    # The device computes what the CPU does, but for rounding.
    assert found[0][0]["final_loss"] == pytest.approx(on_cpu[0]["final_loss"], rel=1e-5)


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_resident(guard: Path, tmp_path: Path) -> None:
    cases = [RESIDENT, *(keys(*case) for case in TWO)]
    check(run(guard, command, calls(tmp_path, cases), 2, under=[*SCHEDULES, *SCHEDULES[1:]]))


WHOLE = ["trainer.amp=bf16", "trainer.eval_every=6", "trainer.eval_steps=3", "run.save=true"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_evaluates_and_goes_on_from_a_checkpoint(
    guard: Path, tmp_path: Path, ranks: int
) -> None:
    """In bfloat16; a run that begins staged may go on in place, under another scheduler."""
    started = [*keys(*ONE[2]), "trainer.steps=9"]
    rest = [*keys(*ONE[1]), f"trainer.resume={tmp_path}/2"]
    given = calls(tmp_path, [RESIDENT, keys(*ONE[1]), started, rest], *WHOLE)
    under = [("lazy", 0), ("moody", 1), ("random", 2), ("moody", 3)]
    found = run(guard, command, given, ranks, under=under)
    names = ("state_digest", "eval_auc", "eval_logloss", "final_loss")
    first, _, half, last = ([by_rank[0][name] for name in names] for by_rank in found)
    check(found[:2])
    assert last == first != half


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_placement_has_the_bits_of_resident(
    guard: Path, tmp_path: Path, ranks: int, optimizer: str
) -> None:
    cases = [RESIDENT, *(keys(*case) for case in REST if ranks > 1 or case[3] == "replicated")]
    given = calls(tmp_path, cases, f"optim={optimizer}", "trainer.steps=24")
    check(run(guard, command, given, ranks, under=[SCHEDULES[i % 3] for i in range(len(given))]))


def drop_in(call: dict[str, Any]) -> tuple[list[float], str, int]:
    """Losses of a loop over the drop-in collection, the digest of these and all weights, and how
    many rows were written back.

    `settings`: of the collection; `device`; `ahead`: through a look-ahead; `own_stream`: so many
    steps inside a stream that is made after the collection, as before a CUDA graph is captured;
    `kind`: of the collection.
    """
    using(call["kind"])
    device, losses = call["device"], []
    ebc = cached(tables=mixed_configs(), device=device, **call["settings"])
    ebc.tables.engine.delay_hook = Shaker(0)
    model = Pooled(ebc).to(device)
    dense = dense_optimizer(model)
    given = batches(15, tables=mixed_configs())
    for batch in lookahead(given, ebc) if call["ahead"] else given:
        with own_stream() if len(losses) < call["own_stream"] else contextlib.nullcontext():
            batch.dense_features = batch.dense_features.to(device, non_blocking=True)
            loss = loss_of(model, batch)
            dense.zero_grad()
            loss.backward()
            ebc.step()
            dense.step()
            losses.append(loss.detach())
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    state["losses"] = torch.stack(losses).cpu()
    written = ebc.summary()["rows_written_back"]
    ebc.close()
    digest = "".join(digest_of(state[name]) for name in sorted(state))
    return state["losses"].tolist(), digest, written


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """Inside a stream that is ordered after what was done before it, and before what follows."""
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


KIND = {"kind": "bags", "own_stream": 0}


def loop(prefetch: int, access: str, schedule: str = "overlapped", **how: Any) -> dict[str, Any]:
    """A call of `drop_in`, through a look-ahead."""
    settings = {"rows": 260, "prefetch": prefetch, "store_access": access, "schedule": schedule}
    return {"settings": settings, "device": "cuda", "ahead": True} | KIND | how


LOOPS = [
    loop(0, "staged", "serial", ahead=False),
    loop(1, "staged", own_stream=4),
    loop(3, "zero_copy", own_stream=15),
    loop(0, "staged", own_stream=15, ahead=False),
    loop(2, "zero_copy"),
]


def check_loops(guard: Path, given: list[dict[str, Any]], seed: int) -> None:
    """All have the bits of the first, and the CPU's numbers."""
    under = [SCHEDULES[(seed + at) % 3] for at in range(len(given) + 1)]
    on_cpu = given[0] | {"device": "cpu"}
    *found, expected = [one for (one,) in run(guard, drop_in, [*given, on_cpu], under=under)]
    losses, digest, _ = found[0]
    assert [one[1] for one in found] == [digest] * len(found)
    assert min(one[2] for one in found) > 50
    assert losses == pytest.approx(expected[0], rel=1e-5)


def test_a_collection_has_the_same_bits_in_any_stream(guard: Path) -> None:
    check_loops(guard, LOOPS, 0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_a_collection_of_sequences_has_the_same_bits(guard: Path, seed: int) -> None:
    given = [one | {"kind": "sequences"} for one in LOOPS]
    check_loops(guard, given if seed else given[:2], seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_look_ahead_has_the_same_bits(guard: Path, seed: int) -> None:
    each = [(p, access) for p in range(4) for access in ("staged", "zero_copy")]
    given = [loop(*one, own_stream=steps) for one in each for steps in (0, 4, 15)]
    check_loops(guard, [*LOOPS, *given], seed)


def promises(call: None) -> list[str]:
    """The names of the checks that have passed of what the device promises."""
    checks = (
        nothing_is_done_before_somebody_waits,
        streams_are_ordered_by_events_alone,
        memory_is_used_again_unless_a_stream_is_recorded,
        a_pinned_buffer_is_read_late,
        freed_pinned_memory_is_overwritten_unless_an_event_was_recorded,
        devices_do_not_mix,
        backward_runs_on_the_stream_of_forward,
    )
    for check in checks:
        check()
    return [check.__name__ for check in checks]


def nothing_is_done_before_somebody_waits() -> None:
    there = torch.ones(3, device="cuda")
    assert math.isnan(there.host[0])
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    assert not event.query() and event.query()  # who looks again sees the device go on
    assert there.host.tolist() == [1, 1, 1]
    there.add_(1)
    before = DEVICE.counts["host wait", "MainThread"]
    assert there.sum().item() == 6
    assert DEVICE.counts["host wait", "MainThread"] == before + 1


def streams_are_ordered_by_events_alone() -> None:
    other, there = torch.cuda.Stream(), torch.ones(3, device="cuda")
    with torch.cuda.stream(other):
        assert there.isnan().all().item()
        other.wait_stream(torch.cuda.default_stream())
        assert not there.isnan().any().item()


def memory_is_used_again_unless_a_stream_is_recorded() -> None:
    other = torch.cuda.Stream()
    for recorded in (False, True):
        there = torch.ones(3, device="cuda")
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            twice = there * 2
        if recorded:
            there.record_stream(other)
        del there
        torch.zeros(3, device="cuda").cpu()  # may lie where `there` lay
        with torch.cuda.stream(other):
            assert twice.isnan().any().item() is not recorded


def a_pinned_buffer_is_read_late() -> None:
    for pinned, value in ((True, 7), (False, 1)):
        buffer = torch.ones(2, pin_memory=pinned)
        there = buffer.to("cuda", non_blocking=True)
        buffer.fill_(7)
        assert there.tolist() == [value, value]


def freed_pinned_memory_is_overwritten_unless_an_event_was_recorded() -> None:
    def copied(protected: bool) -> torch.Tensor:
        buffer = torch.ones(8, pin_memory=True)
        part = buffer[4:] if protected else torch.from_numpy(buffer.numpy()[4:])
        assert part.is_pinned()
        return part.to("cuda", non_blocking=True)

    assert copied(protected=True).tolist() == [1, 1, 1, 1]
    assert copied(protected=False).isnan().all().item()
    lost = copied(protected=False)
    other = torch.full((8,), 3.0, pin_memory=True)  # gets the block that was freed
    assert lost.tolist() == [3, 3, 3, 3] and other.tolist() == [3] * 8


def devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda") + torch.ones(2)


def backward_runs_on_the_stream_of_forward() -> None:
    stream, leaf = torch.cuda.Stream(), torch.ones(3, device="cuda", requires_grad=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        product = (leaf * leaf).sum()
    product.backward()  # waits on the device for the gradient, which comes from `stream`
    assert leaf.grad is not None and leaf.grad.tolist() == [2, 2, 2]


def test_the_device_keeps_its_promises(guard: Path) -> None:
    ((done,),) = run(guard, promises, [None])
    assert len(done) == 7
    assert not torch.cuda.is_available()  # nothing of it here


def modules(call: dict[str, Any]) -> tuple[list[list[float]], str]:
    """The outputs of torch.nn's kinds of module over a few steps, and their digest; `moved`: with
    ids that were brought to the device, as loops of training libraries do."""
    device, found = call["device"], []
    generator = torch.Generator().manual_seed(0)
    given = [(torch.rand(8, 4, generator=generator) ** 2 * 90).long() for _ in range(12)]
    how = {"padding_idx": 3, "rows": 60, "device": device, "optimizer": SGD(lr=0.1)}
    torch.manual_seed(0)
    own = CachedEmbedding(90, 8, **how), CachedEmbeddingBag(90, 8, mode="sum", **how)
    for batch in lookahead(given, own) if call["ahead"] else given:
        ids = batch.to(device, non_blocking=True) if call["moved"] else batch
        rows, bags = own[0](ids), own[1](ids, None, torch.ones(ids.shape, device=device))
        (rows.sum(1) * bags).tanh().sum().backward()
        for module in own:
            module.step()
        found.append(torch.cat([rows.flatten(), bags.flatten()]).detach())
    outputs = torch.stack(found).cpu()
    for module in own:
        module.close()
    return outputs.tolist(), digest_of(outputs)


def test_modules_as_torchs_have_the_cpus_numbers(guard: Path) -> None:
    ways = [(ahead, moved) for ahead in (True, False) for moved in (True, False)]
    calls = [{"device": "cuda", "ahead": ahead, "moved": moved} for ahead, moved in ways]
    on_cpu = {"device": "cpu", "ahead": False, "moved": False}
    under = [SCHEDULES[at % 3] for at in range(len(calls) + 1)]
    *found, expected = [one for (one,) in run(guard, modules, [*calls, on_cpu], under=under)]
    assert len({digest for _, digest in found}) == 1
    torch.testing.assert_close(torch.tensor(found[0][0]), torch.tensor(expected[0]))
