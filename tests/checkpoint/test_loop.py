"""`distcache.save` and `load`: loops of one's own that stop, and go on as if they had not."""

from __future__ import annotations

import io
import logging
import pickle
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoints import Payload
from ebc_cases import (
    DENSE,
    assert_same,
    batches,
    cached,
    configs,
    job,
    mine,
    ranks,
    weights_of,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import distcache
from distcache import lookahead
from distcache.checkpoint.manifest import Manifest
from distcache.embedding import step as embedding_step
from distcache.errors import (
    ConfigError,
    DataError,
    DistcacheError,
    NonFiniteLossError,
    PeerError,
    PlanError,
)

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 5


class Two(nn.Module):
    """A collection with Adagrad's rows and one with SGD's, `Linear` after both."""

    def __init__(self, drop: float = 0.0, **settings: Any) -> None:
        super().__init__()
        settings = {"timeout_s": 60, "rows": 260, "dtype": torch.float64} | settings
        self.first, self.second = cached("adagrad", **settings), cached("sgd", **settings)
        width = 8 * sum(len(table.feature_names) for table in configs())
        self.drop, self.over = nn.Dropout(drop), nn.Linear(2 * width + DENSE, 1).double()

    def forward(self, dense: Tensor, ids: Any) -> Tensor:
        both = [self.first(ids).values(), self.second(ids).values()]
        return self.over(self.drop(torch.cat([*both, dense], dim=1).double()))

    def close(self) -> None:
        self.first.close()
        self.second.close()


class Loop:
    """A user's: Adam, a scheduler and a count of batches beside the tables."""

    def __init__(self, size: int = 1, seed: int = 0, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = Two(**settings)
        self.outer = DistributedDataParallel(self.model) if size > 1 else self.model
        self.dense = torch.optim.Adam(self.model.over.parameters(), lr=0.01)
        self.all = [self.dense, self.model.first.optimizer, self.model.second.optimizer]
        self.rates = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in self.all]
        self.step, self.losses = 0, list[float]()

    def extra(self) -> dict[str, Any]:
        return {"rates": [one.state_dict() for one in self.rates], "losses": self.losses}

    def save(self, path: Path, **extra: Any) -> None:
        distcache.save(path, self.outer, self.all, step=self.step, extra=self.extra() | extra)

    def load(self, path: Path) -> dict[str, Any]:
        self.step, extra = distcache.load(path, self.outer, self.all)
        for one, state in zip(self.rates, extra.pop("rates"), strict=True):
            one.load_state_dict(state)
        self.losses = extra.pop("losses", [])
        return extra

    def train(self, data: list, ahead: bool = False, folder: Path | None = None) -> None:
        own = data[self.step :]
        for batch in lookahead(own, self.model.first) if ahead else own:
            for one in self.all:
                one.zero_grad()
            logits = self.outer(batch.dense_features, batch.sparse_features)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.double())
            loss.backward()
            for one in (*self.all, *self.rates):
                one.step()
            self.losses.append(loss.item())
            self.step += 1
            if folder is not None:
                self.save(folder / f"step_{self.step}")

    def end(self) -> dict[str, Any]:
        """All that has been trained, by name; the loop is over."""
        found = weights_of(self.model)
        for at, one in enumerate(self.all):
            for key, state in one.state_dict()["state"].items():
                found |= {
                    f"{at}.{key}.{name}": torch.as_tensor(v).clone() for name, v in state.items()
                }
        self.model.close()
        return found | {"losses": torch.tensor(self.losses)}


@job
def stopped(rank: int, size: int, folder: str, ahead: bool) -> dict:
    data, path = mine(rank, size, STEPS), Path(folder)
    whole = Loop(size, drop=0.2)
    torch.manual_seed(rank)
    whole.train(data, ahead)
    expected = whole.end()
    saving = Loop(size, drop=0.2)
    torch.manual_seed(rank)
    saving.save(path / "step_0")
    saving.train(data, ahead, path)
    assert_same(saving.end(), expected)
    for step in range(STEPS + 1):
        loop = Loop(size, seed=9, drop=0.2)
        if step == 3:
            loop.train(data[:1], ahead)  # rows are cached and counted already
        assert loop.load(path / f"step_{step}" if step < STEPS else path) == {}
        assert loop.step == step
        loop.train(data, ahead)
        assert_same(loop.end(), expected)
    return expected


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_that_stops_after_any_step_goes_on_as_if_it_had_not(tmp_path, size, ahead) -> None:
    """Bitwise: tables, optimizers, dense part, losses, dropout; and saving changes nothing."""
    ranks(stopped, str(tmp_path), ahead, size=size)


@job
def part_of_it(rank: int, size: int, folder: str, begin: bool) -> dict:
    """Two steps and a checkpoint, or what comes after it."""
    lines, loop = list[str](), Loop(size, seed=0 if begin else 9)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("distcache").addHandler(handler)
    if begin:
        loop.train(mine(rank, size, 2))
        loop.save(Path(folder), mine=rank)
    else:
        extra = loop.load(Path(folder))
        assert ("mine" in extra) == (size == 2)  # one rank has no other that differs
    loop.train(mine(rank, size, STEPS))
    return {"lines": lines, "all": {k: v for k, v in loop.end().items() if k != "losses"}}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_the_same_global_batches(
    tmp_path, before, after
) -> None:
    begun = ranks(part_of_it, str(tmp_path / "one"), True, size=before)
    found = ranks(part_of_it, str(tmp_path / "one"), False, size=after)
    for one in found:
        torch.testing.assert_close(one["all"], begun[0]["all"], rtol=1e-10, atol=1e-10)
    told = [line for one in found for line in one["lines"]]
    (line,) = told
    assert f"saved on {before} ranks, loaded on {after}: random states stay" in line
    assert ("mine" in line) == (before == 2)


@job
def alone(rank: int, size: int, folder: str) -> dict:
    embedding_step.ALONE_S = 0.5
    loop = Loop(size)
    if rank == 0:
        with pytest.raises(PeerError, match=r"rank 1 did not within 0.5 s.*outside `if rank"):
            distcache.save(folder, loop.model, step=1)
        assert not Path(folder).exists()
    torch.distributed.barrier()
    loop.train(mine(rank, size, 1))
    loop.save(Path(folder))  # together: goes as if nothing had been
    time.sleep(1.5 * rank)
    loop.load(Path(folder))  # ranks may start apart, for the collection's timeout_s
    loop.end()
    return {}


@job
def by_groups(rank: int, size: int, folder: str) -> dict:
    """Each rank trains for itself, beside the other."""
    group = dist.new_group([rank], use_local_synchronization=True)
    path, data = Path(folder) / f"{rank}", batches(3)
    whole, begun = Loop(process_group=group), Loop(process_group=group)
    whole.train(data)
    begun.train(data[: 1 + rank])  # the step of one rank is not that of the other
    begun.save(path)
    begun.end()
    after = Loop(seed=9, process_group=group)
    assert after.load(path) == {} and after.step == 1 + rank
    after.train(data)
    assert_same(after.end(), whole.end())
    return {}


def test_a_process_group_saves_and_loads_for_itself(tmp_path) -> None:
    ranks(by_groups, str(tmp_path), size=2)


def test_rank_0_alone_is_told_who_is_missing(tmp_path) -> None:
    ranks(alone, str(tmp_path / "one"))


@pytest.fixture
def saved(tmp_path) -> Path:
    """A checkpoint after two steps, with values in `extra`."""
    loop = Loop()
    loop.train(batches(2))
    loop.save(tmp_path / "step_2", position=torch.arange(3), name="clicks")
    loop.end()
    return tmp_path / "step_2"


def test_what_is_in_extra_comes_back_and_the_newest_whole_is_taken(saved) -> None:
    shutil.copytree(saved, unfinished := saved.with_name("step_3"))
    (unfinished / "manifest.json").unlink()
    loop = Loop(seed=9)
    mark = loop.model.first.mark()
    extra = loop.load(saved.parent)
    changed = loop.model.first.changed_since(mark)  # whatever was there before
    assert {name: len(ids) for name, ids in changed.items()} == {
        c.name: c.num_embeddings for c in configs()
    }
    loop.save(saved.with_name("marked"), changed=changed)
    kept = distcache.load(saved.with_name("marked"), loop.model, loop.all)[1]["changed"]
    assert_same(
        {name: torch.from_numpy(ids) for name, ids in changed.items()},
        {
            name: torch.from_numpy(ids)
            for name, ids in loop.model.first.changed_since(loop.model.first.mark(kept)).items()
        },
    )
    assert loop.step == 2 and extra["position"].tolist() == [0, 1, 2] and extra["name"] == "clicks"
    nothing = saved.parent / "nothing"
    assert distcache.load(nothing, loop.model, loop.all, missing_ok=True) == (0, {})
    with pytest.raises(ConfigError, match=r"nothing holds no complete checkpoint.*missing_ok"):
        loop.load(nothing)
    saved.rename(saved.with_name("epoch_2"))
    with pytest.raises(ConfigError, match=r"as step_<number>, but epoch_2, marked: give what"):
        distcache.load(saved.parent, loop.model, loop.all, missing_ok=True)
    loop.end()


def test_nothing_is_written_where_it_could_not_be_read_again(saved, monkeypatch) -> None:
    loop = Loop()
    before = {own: own.read_bytes() for own in saved.iterdir()}
    with pytest.raises(ConfigError, match="a checkpoint already, and nothing is overwritten"):
        loop.save(saved)
    assert {own: own.read_bytes() for own in saved.iterdir()} == before
    with pytest.raises(ConfigError, match=r"extra\['of'\] is nothing.*it asks for posix.mkdir"):
        loop.save(saved.with_name("new"), of=Payload(saved / "ran"))
    (saved.parent / "notes").mkdir()
    (saved.parent / "notes/mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="no empty folder"):
        loop.save(saved.with_name("notes"))
    torchs = saved.with_name("torch's")
    torch.distributed.checkpoint.save({"w": torch.ones(2)}, checkpoint_id=torchs)
    with pytest.raises(ConfigError, match="no empty folder"):
        loop.save(torchs)
    assert (torchs / ".metadata").exists()
    (
        logits := loop.model(batches(1)[0].dense_features, batches(1)[0].sparse_features)
    ).sum().backward()
    with pytest.raises(PlanError, match="row gradients wait"):
        loop.save(saved.with_name("new"))
    assert logits.requires_grad and not (saved / "ran").exists()
    assert not saved.with_name("new").exists()
    for one in loop.all:
        one.zero_grad()
    monkeypatch.setattr(type(loop.model.second.tables), "saved", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.save(saved.with_name("new"))
    usage = shutil.disk_usage(saved)._replace(free=100)
    monkeypatch.undo()
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(DistcacheError, match="make room there, or keep fewer checkpoints"):
        loop.save(saved.with_name("new"))
    generator = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    with pytest.raises(ConfigError, match=r"bit generator is PCG64, .*set_bit_generator"):
        loop.save(saved.with_name("new"))
    np.random.set_bit_generator(generator)
    assert not saved.with_name("new").exists()
    loop.end()


@pytest.mark.parametrize("other", ["dtype", "rows", "rates", "optimizer", "dense", "run"])
def test_another_loops_checkpoint_is_refused_by_name_and_changes_nothing(saved, other) -> None:
    loop = Loop(dtype=torch.float32) if other == "dtype" else Loop()
    match = r"table first.t0 was 400 x 8, torch.float64, Adagrad\(.*, is 400 x 8, torch.float32"
    if other == "rows":
        loop.model.second.close()
        loop.model.second = cached("adam", dtype=torch.float64)
        loop.all[2] = loop.model.second.optimizer
        match = r"table second.t0 was 400 x 8, .*, SGD\(.*, is 400 x 8, .*, Adam\("
    elif other == "rates":
        loop.model.second.close()
        rates = {table.name: distcache.optim.SGD(0.1 * at) for at, table in enumerate(configs())}
        loop.model.second = distcache.CachedEmbeddingBagCollection(
            configs(), optimizer=rates, rows=260, dtype=torch.float64, seed=0
        )
        loop.all[2] = loop.model.second.optimizer
        match = "second.optimizer was not there, is rates by table"
    elif other == "optimizer":
        loop.all[0] = torch.optim.SGD(loop.model.over.parameters(), lr=0.1)
        match = r"optimizers\[0\] was Adam, .* is SGD"
    elif other == "dense":
        loop.model.register_buffer("seen", torch.zeros(3))
        match = r"seen was not there, is \[3\], torch.float32"
    elif other == "run":
        manifest = Manifest.read(saved)
        del manifest.header["loop"]
        described = dict(mode="data", world_size=1, dtype="float32", optimizer="sgd", seed=0)
        described |= dict(global_batch_size=8, steps_per_epoch=None, tables=[], data=[], model={})
        manifest.header.update(run=described, loss_digest="", phase=None)
        (saved / "manifest.json").unlink()
        manifest.write(saved)
        match = "a checkpoint of a run, not of distcache.save: resume it with trainer.resume"
    before = weights_of(loop.model)
    with pytest.raises(ConfigError, match=match):
        distcache.load(saved, loop.model, loop.all)
    assert_same(weights_of(loop.model), before)
    loop.model.close()


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "payload"])
def test_damaged_files_are_refused_by_name_and_nothing_is_executed(saved, name, damage) -> None:
    file = saved / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(data[:-7])
    elif damage == "flipped":
        file.write_bytes(data)
    else:
        plant(saved, name)
    loop = Loop(seed=9)
    before = weights_of(loop.model)
    if name == "manifest.json" and damage == "missing":
        with pytest.raises((ConfigError, DataError), match=r"manifest.json|no complete"):
            loop.load(saved)
    else:
        with pytest.raises(DataError, match=name):
            loop.load(saved)
    assert not (saved / "ran").exists()
    if name != "__0_0.distcp" or damage in ("missing", "truncated"):
        assert_same(weights_of(loop.model), before)
    loop.model.close()


def plant(folder: Path, name: str) -> None:
    """A payload in place of a file's blocks, with checksums that fit."""
    manifest = Manifest.read(folder)
    if name == "manifest.json":
        (folder / name).write_bytes(pickle.dumps(Payload(folder / "ran")))
        return
    file, marks, crc, start = bytearray((folder / name).read_bytes()), [], 0, 0
    buffer = io.BytesIO()
    torch.save(Payload(folder / "ran"), buffer)
    harm = pickle.dumps(Payload(folder / "ran")) if name == ".metadata" else buffer.getvalue()
    for end, _ in manifest.files[name]:
        if end - start >= len(harm):
            file[start:end] = harm + b"\0" * (end - start - len(harm))
        crc = zlib.crc32(file[start:end], crc)
        marks.append((end, crc))
        start = end
    (folder / name).write_bytes(file)
    manifest.files[name] = marks
    (folder / "manifest.json").unlink()
    manifest.write(folder)


def test_a_scaler_and_a_scheduler_in_extra_go_on(tmp_path) -> None:
    """The scale grows every second step, halves after one that is not finite, and is saved in
    between."""

    def train(loop: Loop, scaler: torch.amp.GradScaler, steps: range) -> list[float]:
        scales = []
        for step, batch in zip(steps, batches(6)[steps.start : steps.stop], strict=True):
            for one in loop.all:
                one.zero_grad()
            logits = loop.model(batch.dense_features, batch.sparse_features)
            scaler.scale(logits.square().mean() * (torch.inf if step == 3 else 1.0)).backward()
            for one in loop.all:
                scaler.step(one)
            scaler.update()
            for one in loop.rates:
                one.step()
            scales.append(scaler.get_scale())
        return scales

    def make(seed: int = 0) -> tuple[Loop, torch.amp.GradScaler]:
        return Loop(seed=seed), torch.amp.GradScaler("cpu", 8.0, growth_interval=2)

    whole, begun, after = make(), make(), make(9)
    scales = train(*whole, range(6))
    assert scales == [8, 16, 16, 8, 8, 16]
    assert train(*begun, range(3)) == scales[:3]
    begun[0].save(tmp_path / "one", scaler=begun[1].state_dict())
    after[1].load_state_dict(after[0].load(tmp_path / "one")["scaler"])
    assert train(*after, range(3, 6)) == scales[3:]
    begun[0].end()
    assert_same(after[0].end(), whole[0].end())


def test_a_model_without_a_collection_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"no cached tables: torch\.save"):
        distcache.save(tmp_path / "one", nn.Linear(3, 3), step=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_frozen_tables_stay_as_they_are(tmp_path, dtype) -> None:
    def make() -> Loop:
        loop = Loop(seed=3, dtype=dtype)
        loop.model.first.freeze("t0")
        return loop

    whole, begun, after = make(), make(), make()
    whole.train(batches(4))
    begun.train(batches(2))
    begun.save(tmp_path / "one")
    after.load(tmp_path / "one")
    after.train(batches(4))
    assert after.model.first.tables.counts == [0, 4, 4, 4]
    begun.end()
    assert_same(after.end(), whole.end())


def test_a_loop_goes_on_from_a_checkpoint_after_gradients_that_are_not_finite(saved) -> None:
    loop, whole = Loop(on_nonfinite="stop"), Loop()
    whole.train(batches(4))
    loop.load(saved)
    batch = batches(1)[0]
    out = loop.model(batch.dense_features, batch.sparse_features)
    (out * torch.nan).sum().backward()
    with pytest.raises(NonFiniteLossError):
        loop.model.first.step()
    loop.model.second.optimizer.zero_grad()
    loop.load(saved)
    loop.train(batches(4))
    assert_same(loop.end(), whole.end())
