"""Tables in half precision (`data_type` of TorchRec's configs): stored, cached and moved in it,
updated in float32.

The trainer that they are held against has whole tables in half precision, and one process. The
gradients of the loop's loss are multiples of 2^-8, whose sums are the same in every order; all else
about an update is one row's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ebc_cases import (
    BATCH,
    UPDATES,
    Clicks,
    assert_same,
    batches,
    cached,
    configs,
    job,
    key_of_tables,
    mine,
    ranks,
    weights_of,
    written_back,
)
from scenarios import count_ids
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.modules.embedding_configs import DataType
from torchrec.quant.embedding_modules import EmbeddingBagCollection as Quantised

import distcache
from distcache import lookahead
from distcache.data.batch import JaggedIds
from distcache.errors import ConfigError
from distcache.store.table_files import read_safetensors

TYPES = (DataType.FP16, DataType.INT8, DataType.BF16, DataType.FP32)
STORED = (torch.float16, torch.float16, torch.bfloat16, torch.float32)
STEPS = 12


def halves() -> list[Any]:
    """Tables of one width and three dtypes."""
    tables = [replace(own, data_type=kind) for own, kind in zip(configs(), TYPES, strict=True)]
    tables[2] = replace(tables[2], num_embeddings=400)
    return tables


def given(steps: int = STEPS) -> list[Clicks]:
    """Their batches."""
    return batches(steps, tables=halves())


def names_of(tables: list[Any]) -> list[tuple[str, str]]:
    """Table and feature of every output, in order."""
    return [(own.name, key) for own in tables for key in own.feature_names]


def gradient(step: int, at: int, shape: Iterable[int]) -> Tensor:
    """That of the loss, by output number `at` of the global batch."""
    rng = torch.Generator().manual_seed(100 * step + at)
    return torch.randint(-31, 32, tuple(shape), generator=rng) / 256


def outputs_of(ebc: nn.Module, batch: Clicks) -> list[Tensor]:
    """What a collection gives out, one tensor for each output."""
    found = ebc(batch.sparse_features)
    if isinstance(found, dict):
        return [own.values() for own in found.values()]
    return [found[name] for name in found.keys()]  # noqa: SIM118


def train(
    ebc: nn.Module, stream: Iterable[Clicks], rank: int = 0, size: int = 1, after: int = 0
) -> list[Tensor]:
    """A loop from step `after` on; the outputs of every step, `[n]`. Of sequences on one rank."""
    seen, own = [], slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    for step, batch in enumerate(stream, after):
        found = outputs_of(ebc, batch)
        assert {out.dtype for out in found} == {torch.float32}
        shapes = [out.shape if size == 1 else (BATCH, 8) for out in found]
        grads = [gradient(step, at, shape) for at, shape in enumerate(shapes)]
        grads = grads if size == 1 else [one[own] for one in grads]
        sum((out * one).sum() for out, one in zip(found, grads, strict=True)).backward()
        leaves = [leaf for group in ebc.optimizer.param_groups for leaf in group["params"]]
        assert {leaf.grad.dtype for leaf in leaves if leaf.grad is not None} <= {torch.float32}
        ebc.step()
        seen.append(torch.cat([out.detach().reshape(-1) for out in found]))
    return seen


# -----------------------------------------------------------------------------
# The trainer: whole tables in their dtypes, one process, the global batch.


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values rounded to nearest, ties to even, by NumPy and by hand."""
    array = values.numpy()
    if dtype == torch.float16:
        return torch.from_numpy(array.astype(np.float16))
    if dtype == torch.bfloat16:
        bits = array.view(np.uint32)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(dtype)
    return values


class WholeTable:
    """A table with float32 state."""

    def __init__(self, weight: Tensor, name: str) -> None:
        self.weight, self._name, self._update, self._steps = weight, name, UPDATES[name], 0
        start = getattr(self._update, "initial_accumulator", 0.0)
        shape = (len(weight), 1) if name == "rowwise_adagrad" else tuple(weight.shape)
        self._state = [torch.full(shape, start), torch.full(shape, start)]

    def apply(self, rows: Tensor, g: Tensor) -> None:
        """Update distinct `rows` by their gradients."""
        own, (first, second) = self._update, self._state
        self._steps += 1
        w, one, two = self.weight[rows].float(), first[rows], second[rows]
        if self._name == "sgd":
            w = w - g * own.lr
        elif self._name == "adagrad":
            one = one + g * g
            w = w - g / (one.sqrt() + own.eps) * own.lr
        elif self._name == "rowwise_adagrad":
            squares = g * g
            while squares.shape[1] > 1:  # added by halves
                left, right = squares.chunk(2, 1)
                squares = left + right
            one = one + squares / g.shape[1]
            w = w - g * (1.0 / (one.sqrt() + own.eps) * own.lr)
        else:
            beta1, beta2 = own.betas
            one, two = one + (g - one) * (1 - beta1), two + (g * g - two) * (1 - beta2)
            rate = own.lr * (1 - beta2**self._steps) ** 0.5 / (1 - beta1**self._steps)
            w = w - one / (two.sqrt() + own.eps) * rate
        self.weight[rows] = rounded(w, self.weight.dtype)
        first[rows], second[rows] = one, two


def train_whole(name: str, start: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of each step, `[n]`, and final weights."""
    tables = {key: WholeTable(weight.clone(), name) for key, weight in start.items()}
    prefix, seen = key_of_tables(), []
    for step, batch in enumerate(given()):
        ids, found, of_table = batch.sparse_features, [], dict[str, list]()
        for at, (table, key) in enumerate(names_of(halves())):
            weight = tables[f"{prefix}.{table}.weight"].weight.float()
            values, offsets = ids[key].values(), ids[key].offsets()
            how = {"mode": "sum", "include_last_offset": True}
            bags = nn.functional.embedding_bag(values, weight, offsets, **how)
            found.append(bags if prefix == "embedding_bags" else weight[values])
            own = gradient(step, at, found[-1].shape)
            if prefix == "embedding_bags":
                own = own.repeat_interleave(ids[key].lengths(), 0)
            of_table.setdefault(table, []).append((values, own))
        for table, parts in of_table.items():
            values, own = (torch.cat(of) for of in zip(*parts, strict=True))
            rows, back = values.unique(return_inverse=True)
            sums = torch.zeros(len(rows), 8).index_add(0, back, own)
            tables[f"{prefix}.{table}.weight"].apply(rows, sums)
        seen.append(torch.cat([out.reshape(-1) for out in found]))
    return seen, {key: table.weight for key, table in tables.items()}


@pytest.mark.parametrize("name", UPDATES)
def test_rows_are_updated_in_float32_and_rounded_to_nearest(kind: str, name: str) -> None:
    for ahead, settings in (
        (True, {}),
        (False, {"policy": "lru"}),
        (True, {"store_access": "zero_copy", "schedule": "serial"}),
        (True, {"rows": None, "ratio": 1.0}),
    ):
        ebc = cached(name, halves(), **settings)
        start = weights_of(ebc)
        assert [weight.dtype for weight in start.values()] == list(STORED)
        seen = train(ebc, lookahead(given(), ebc) if ahead else given())
        expected, tables = train_whole(name, start)
        for one, other in zip(seen, expected, strict=True):
            assert torch.equal(one, other)
        assert_same(weights_of(ebc), tables)
        assert "ratio" in settings or written_back(ebc.tables) > 100
        assert not any(torch.equal(tables[key], start[key]) for key in start)
        ebc.close()


PLACES = {
    "replicated": {},
    "home": {"state": "home"},
    "sharded": {"placement": "sharded"},
    "mixed": {"placement": "mixed", "replicated_rows": {"t0": 20, "t2": 5}, "state": "home"},
}


@job
def placed(rank: int, size: int, name: str, folder: str) -> dict[str, Any]:
    """Final weights in every placement; with a save and a load by another collection midway."""
    rows = {key: own.num_embeddings for own in halves() for key in own.feature_names}
    ids = (one.sparse_features for one in given())
    jagged = (JaggedIds(tuple(one.keys()), one.values(), one.offsets()) for one in ids)
    counted, found = count_ids(rows, jagged), {}
    for place, how in PLACES.items():
        how = {"gradient_reduction": "sum", **how}
        if place == "mixed":
            how |= {"statistics": counted, "batch_size": BATCH}
        stream, path = mine(rank, size, STEPS, tables=halves()), Path(folder) / place
        first = cached(name, halves(), **how)
        train(first, lookahead(stream[:5], first), rank, size)
        distcache.save(path, first, step=5)
        first.close()
        second = cached(name, halves(), seed=1, **how)
        assert distcache.load(path, second)[0] == 5
        train(second, lookahead(stream[5:], second), rank, size, after=5)
        found[place] = {key: own.float() for key, own in weights_of(second).items()}
        second.close()
    return found


@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "adam"])
def test_ranks_have_the_bits_of_whole_tables_in_every_placement(name: str, tmp_path: Path) -> None:
    _, tables = train_whole(name, weights_of(cached(name, halves())))
    for found in ranks(placed, name, str(tmp_path)):
        for place in PLACES:
            for key, weight in tables.items():
                assert torch.equal(found[place][key], weight.float()), (place, key)


# -----------------------------------------------------------------------------
# Weights, whole tables and files.


def test_a_table_is_read_and_written_in_its_dtype(kind: str) -> None:
    ebc = cached("sgd", halves())
    tables = getattr(ebc, key_of_tables())
    train(ebc, given(2))
    for number, dtype in enumerate(STORED):
        weight = tables[f"t{number}"].weight
        assert weight.dtype == dtype and isinstance(weight, nn.Parameter)
        values = torch.linspace(-1, 1, weight.numel()).view(weight.shape)
        with torch.no_grad():
            weight.copy_(values)
            weight[:1] = 1 / 3
        values[:1] = 1 / 3
        expected = values.to(dtype)
        assert torch.equal(weight.detach(), expected)
        state = ebc.state_dict()
        assert torch.equal(state[f"{key_of_tables()}.t{number}.weight"], expected)
        out = outputs_of(ebc.eval(), given(3)[2])
        assert torch.isfinite(torch.cat([own.reshape(-1) for own in out])).all()
    ids = given(3)[2].sparse_features
    weight = tables["t0"].weight.detach().float()
    if kind == "sequences":
        assert torch.equal(outputs_of(ebc, given(3)[2])[0], weight[ids["f0"].values()])
    # Of another dtype they are converted, as torch.nn.Module does.
    before = {key: value.float() for key, value in weights_of(ebc).items()}
    other = cached("sgd", halves(), seed=1)
    other.load_state_dict(before)
    assert_same(weights_of(other), weights_of(ebc))
    wide = cached("sgd", [replace(own, data_type=DataType.FP32) for own in halves()])
    wide.load_state_dict(ebc.state_dict())
    assert_same(weights_of(wide), before)


def test_initial_rows_and_the_generator_are_those_of_the_stock_class(kind: str) -> None:
    tables = [replace(own, data_type=DataType.FP16) for own in halves()]
    make = EmbeddingBagCollection if kind == "bags" else EmbeddingCollection
    for ours in (tables, [replace(own, data_type=DataType.BF16) for own in tables]):
        torch.manual_seed(3)
        stock = make(tables).state_dict()
        after = torch.rand(3)
        torch.manual_seed(3)
        own = weights_of(cached("sgd", ours, init="torch"))
        assert torch.equal(torch.rand(3), after)
        if ours is tables:
            assert_same(own, dict(stock))
        for key, value in own.items():
            spread = stock[key].float().abs().mean().item()
            assert value.float().abs().mean().item() == pytest.approx(spread, rel=0.2)


def test_rows_by_seed_are_those_of_float32_rounded(kind: str) -> None:
    one = weights_of(cached("sgd", halves()))
    other = weights_of(cached("sgd", [replace(own, data_type=DataType.FP32) for own in halves()]))
    assert_same(one, {k: v.to(own) for (k, v), own in zip(other.items(), STORED, strict=True)})


def test_a_checkpoint_of_another_dtype_is_refused_by_name(tmp_path: Path) -> None:
    ebc = cached("sgd", halves())
    distcache.save(tmp_path / "one", ebc, step=1)
    tables = [replace(own, data_type=DataType.FP32) for own in halves()]
    said = r"table t0 was 400 x 8, torch.float16 updated in torch.float32, .* is 400 x 8, torch.fl"
    with pytest.raises(ConfigError, match=said):
        distcache.load(tmp_path / "one", cached("sgd", tables))


def test_files_and_changed_rows_carry_every_bit(tmp_path: Path) -> None:
    ebc = cached("adagrad", halves())
    mark = ebc.mark()
    before = weights_of(ebc)
    train(ebc, given(3))
    after, changed = weights_of(ebc), ebc.changed_since(mark)
    for number in range(4):
        key = f"embedding_bags.t{number}.weight"
        different = (before[key] != after[key]).any(1).nonzero().flatten().numpy()
        assert np.isin(different, changed[f"t{number}"]).all()
    ebc.export(tmp_path / "files")
    stored = read_safetensors(tmp_path / "files")
    other = cached("sgd", halves(), seed=1)
    other.init_from(tmp_path / "files")
    assert_same(weights_of(other), after)
    for number, dtype in enumerate(STORED):
        own = stored[f"t{number}.weight"]
        assert own.dtype == dtype
        key = f"embedding_bags.t{number}.weight"
        assert torch.equal(own.block(0, own.shape[0]), after[key])
    parquet = pytest.importorskip("pyarrow.parquet")
    ebc.export(tmp_path / "rows", "parquet", changed)
    found = parquet.read_table(tmp_path / "rows" / "t2.parquet")
    vectors = np.stack(found["vector"].to_numpy())
    assert np.array_equal(vectors, after["embedding_bags.t2.weight"][changed["t2"]].float().numpy())


def test_a_quantised_collection_is_made_of_the_weights() -> None:
    tables = [replace(own, data_type=DataType.FP16) for own in halves()]
    ours, stock = cached("sgd", tables, init="torch"), EmbeddingBagCollection(tables)
    train(ours, given(2))
    stock.load_state_dict(ours.state_dict())
    observer, ids = torch.ao.quantization.PlaceholderObserver, given(3)[2].sparse_features
    for dtype in (torch.qint8, torch.quint4x2, torch.half):
        found = []
        for own in (ours, stock):
            how = observer.with_args(dtype=torch.float), observer.with_args(dtype=dtype)
            own.qconfig = torch.ao.quantization.QConfig(*how)
            found.append(Quantised.from_float(own)(ids).values())
        assert torch.equal(*found)


def test_halves_take_half_of_the_memory() -> None:
    dtypes = (DataType.FP16, DataType.FP32)
    table = EmbeddingBagConfig(name="t", num_embeddings=1000, embedding_dim=8, feature_names=["f"])
    bytes_of = []
    for data_type in dtypes:
        how = {"rows": None, "bytes": 100 * 8 * 4}
        ebc = cached("sgd", [replace(table, data_type=data_type)], **how)
        (rows,) = ebc.tables.engine.rows
        bytes_of.append((rows.cache.slots, rows.cache.device_bytes, rows.store.nbytes))
    assert bytes_of == [(200, 3200, 16000), (100, 3200, 32000)]


def test_rows_may_be_updated_in_float64(kind: str) -> None:
    ebc = cached("adagrad", halves(), dtype=torch.float64)
    out = torch.cat([own.reshape(-1) for own in outputs_of(ebc, given(1)[0])])
    assert out.dtype == torch.float64
    out.sum().backward()
    ebc.step()
    assert [value.dtype for value in weights_of(ebc).values()][:3] == list(STORED[:3])


def test_a_scaler_and_clipping_see_float32_gradients() -> None:
    ebc, scaler = cached("sgd", halves()), torch.amp.GradScaler("cpu", init_scale=4.0)
    start = weights_of(ebc)
    out = torch.cat([own.reshape(-1) for own in outputs_of(ebc, given(1)[0])])
    scaler.scale(out.sum()).backward()
    scaler.unscale_(ebc.optimizer)
    norm = distcache.clip_grad_norm_([], ebc, 1e9)
    scaler.step(ebc.optimizer)
    scaler.update()
    assert norm > 1 and scaler.get_scale() == 4.0
    plain = cached("sgd", halves())
    torch.cat([own.reshape(-1) for own in outputs_of(plain, given(1)[0])]).sum().backward()
    plain.step()
    assert_same(weights_of(ebc), weights_of(plain))
    assert not torch.equal(*(one["embedding_bags.t0.weight"] for one in (start, weights_of(ebc))))
