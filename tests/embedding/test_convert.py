"""Tests of `distcache.to_torchrec`: predictions and weights of the copy, what tools do with it."""

from __future__ import annotations

import copy
import io
import shutil
import socket
from dataclasses import replace
from typing import Any

import pytest
import torch
from ebc_cases import (
    Clicks,
    assert_same,
    batches,
    cached,
    configs,
    dense_optimizer,
    dlrm,
    draw,
    job,
    made,
    mine,
    mixed_configs,
    plain_tables,
    ranks,
    train,
    two_widths,
    using,
    values_of,
    weights_of,
    wrapped,
)
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model
from torchrec.modules.embedding_configs import DataType
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantizedBags
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantizedRows

from distcache import CachedEmbedding, CachedEmbeddingBag, lookahead, to_torchrec
from distcache.embedding import step as embedding_step
from distcache.errors import ConfigError, MemoryTooSmallError, PeerError
from distcache.store import memory

pytestmark = pytest.mark.usefixtures("one_thread")

STOCK = {"bags": EmbeddingBagCollection, "sequences": EmbeddingCollection}


def predict(model: nn.Module, batch: Clicks) -> Tensor:
    """Return the logits of a batch."""
    with torch.no_grad():
        return model(batch.dense_features, batch.sparse_features)


def lookup(collection: nn.Module, ids: KeyedJaggedTensor) -> Tensor:
    """Return all embeddings of a batch, one after the other."""
    with torch.no_grad():
        return values_of(collection(ids))


class Means(nn.Module):
    """A linear layer over pooled embeddings, or over the mean of the rows of each feature."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        torch.manual_seed(3)
        self.over = nn.Linear(5 * 8, 1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        embeddings = self.ebc(ids)
        if isinstance(embeddings, dict):
            means = [rows.values().mean(0) for rows in embeddings.values()]
            return self.over(torch.cat(means)).sigmoid()
        return self.over(embeddings.values()).sigmoid()


# -----------------------------------------------------------------------------
# Weights and predictions.


def test_predictions_and_weights_have_the_bits_of_the_model(kind: str) -> None:
    first, second = made(), made()
    for ebc, model in (first, second):
        train(model, ebc, lookahead(batches(6), ebc))
    model = first[1]
    generator_state = torch.random.get_rng_state()
    stock = to_torchrec(model)
    assert torch.equal(generator_state, torch.random.get_rng_state())
    assert not [module for module in stock.modules() if "distcache" in type(module).__module__]
    assert [type(module) for module in stock.modules()].count(STOCK[kind]) == 1
    assert_same(weights_of(model), weights_of(stock))
    assert {name for name, _ in stock.named_parameters()} == set(stock.state_dict())
    assert all(parameter.requires_grad for parameter in stock.parameters())
    before = [predict(stock, batch) for batch in batches(12)[6:]]
    for batch, logits in zip(batches(12)[6:], before, strict=True):
        assert torch.equal(predict(model, batch), logits)
    for ebc, model in (first, second):  # the argument goes on as if nothing had happened
        train(model, ebc, lookahead(batches(12)[6:], ebc))
    assert_same(weights_of(first[1]), weights_of(second[1]))
    assert torch.equal(predict(stock, batches(12)[6]), before[0])


def test_a_model_converts_inside_a_look_ahead_and_trains_as_a_stock_model() -> None:
    ebc, model = made("sgd")
    for batch in lookahead(batches(4), ebc):
        loss = predict(model, batch).sum()
        stock = to_torchrec(model)
        assert torch.equal(loss, predict(stock, batch).sum())
    loss = stock(batch.dense_features, batch.sparse_features).sum()
    loss.backward()
    table = stock.sparse_arch.embedding_bag_collection.embedding_bags["t0"]
    assert table.weight.grad.abs().sum() > 0


def test_widths_features_and_weights_of_ids_are_those_of_the_collection() -> None:
    for is_weighted in (False, True):
        # A table of each width has means; TorchRec takes weights for sums alone.
        tables = two_widths() if is_weighted else mixed_configs()
        tables[2] = replace(tables[2], feature_names=["f2", "f0"])
        if not is_weighted:
            tables[2] = replace(tables[2], pooling=PoolingType.MEAN)
        ebc = cached("sgd", tables, is_weighted=is_weighted, rows=800)
        stock = to_torchrec(ebc)
        assert type(stock) is EmbeddingBagCollection
        assert stock.is_weighted() is is_weighted
        assert stock.device == torch.device("cpu")
        assert stock._embedding_names == ebc.embedding_names
        assert stock.embedding_bag_configs() == ebc.embedding_bag_configs()
        assert all(config.init_fn is not None for config in stock.embedding_bag_configs())
        ids = draw(3, tables=tables, weighted=is_weighted).sparse_features
        assert torch.equal(lookup(ebc, ids), lookup(stock, ids))
        assert stock(ids).keys() == ebc(ids).keys()


@pytest.mark.usefixtures("sequences")
def test_ids_come_along_where_they_did() -> None:
    ids = draw(3).sparse_features
    for need_indices in (False, True):
        ec = cached("sgd", need_indices=need_indices)
        stock = to_torchrec(ec)
        assert stock.need_indices() is need_indices
        assert stock.embedding_names_by_table() == ec.embedding_names_by_table()
        for name, rows in stock(ids).items():
            weights = ec(ids)[name].weights_or_none()
            assert need_indices == (weights is not None)
            if weights is not None:
                assert torch.equal(rows.weights(), weights)


def halves() -> list[Any]:
    """Tables in float16, bfloat16 and float32."""
    types = (DataType.FP16, DataType.BF16, DataType.FP32, DataType.INT8)
    pairs = zip(configs(), types, strict=True)
    return [replace(table, data_type=data_type) for table, data_type in pairs]


def test_tables_in_half_precision_keep_their_dtype(kind: str) -> None:
    ebc = cached("sgd", halves(), rows=500)
    ids = draw(3).sparse_features
    stock = to_torchrec(ebc)
    dtypes = [weight.dtype for weight in stock.state_dict().values()]
    assert dtypes == [torch.float16, torch.bfloat16, torch.float32, torch.float16]
    assert_same(weights_of(ebc), weights_of(stock))
    if kind == "sequences":
        assert torch.equal(lookup(ebc, ids), lookup(stock, ids))
    else:  # TorchRec rounds pooled embeddings to the dtype of the table
        torch.testing.assert_close(lookup(ebc, ids), lookup(stock, ids), rtol=2e-2, atol=2e-2)


def test_and_give_the_same_bits_in_float32(kind: str) -> None:
    weighted = {"is_weighted": True} if kind == "bags" else {}
    ebc = cached("sgd", halves(), rows=500, **weighted)
    ids = draw(3, weighted=bool(weighted)).sparse_features
    if weighted:
        with pytest.raises(
            ConfigError, match=r"tables t0, t1, t3 are in half.*dtype=torch.float32"
        ):
            to_torchrec(ebc)
    stock = to_torchrec(ebc, dtype=torch.float32)
    configs_of = stock.embedding_bag_configs if kind == "bags" else stock.embedding_configs
    assert {config.data_type for config in configs_of()} == {DataType.FP32}
    assert all(weight.dtype == torch.float32 for weight in stock.state_dict().values())
    assert torch.equal(lookup(ebc, ids), lookup(stock, ids))


def bags(*dims: int, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Return ids `[n]`, offsets of 20 bags `[20]` and, with a dtype, weights of the ids."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(0, 5, (20,), generator=generator)
    ids = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
    inputs = (ids, lengths.cumsum(0) - lengths)
    if dtype is None:
        return inputs
    return (*inputs, torch.rand(len(ids), generator=generator, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_modules_of_torch_nn_become_torchs_own(dtype: torch.dtype) -> None:
    arguments: dict[str, Any] = {"rows": 40, "dtype": dtype, "device": "cpu"}
    ids = torch.randint(0, 50, (6, 3), generator=torch.Generator().manual_seed(5))
    cases: list[tuple[Any, tuple[Tensor, ...]]] = [
        (CachedEmbedding(50, 8, sparse=True, **arguments), (ids,)),
        (CachedEmbedding(50, 8, padding_idx=3, **arguments), (ids,)),
        (CachedEmbeddingBag(50, 8, mode="sum", padding_idx=-1, **arguments), (ids,)),
        (CachedEmbeddingBag(50, 8, mode="sum", include_last_offset=True, **arguments), bags()),
        (CachedEmbeddingBag(50, 8, mode="sum", **arguments), bags(dtype=dtype)),
        (CachedEmbeddingBag(50, 8, **arguments), bags()),
    ]
    for module, inputs in cases:
        if getattr(module, "include_last_offset", False):
            inputs = (inputs[0], torch.cat([inputs[1], torch.tensor([len(inputs[0])])]))
        stock = to_torchrec(module, dtype=torch.float32)
        assert type(stock) is (
            nn.Embedding if isinstance(module, CachedEmbedding) else nn.EmbeddingBag
        )
        assert stock.sparse == module.sparse and stock.padding_idx == module.padding_idx
        assert_same(weights_of(module), weights_of(stock))
        with torch.no_grad():
            predicted, wanted = stock(*inputs), module(*inputs)
        assert predicted.dtype == wanted.dtype == dtype
        # Torch sums rows in half precision, or rounds sums to it before it divides them.
        is_rounded = dtype in (torch.float16, torch.bfloat16) and len(inputs) > 1
        if is_rounded:
            torch.testing.assert_close(predicted, wanted)
        else:
            assert torch.equal(predicted, wanted), (module, dtype)


# -----------------------------------------------------------------------------
# Structure of the model.


class Towers(nn.Module):
    """One collection in two places, a deep copy of it, and another collection."""

    def __init__(self) -> None:
        super().__init__()
        ebc = cached("sgd")
        self.first = Means(ebc)
        self.second = Means(ebc)
        self.teacher = copy.deepcopy(self.first).requires_grad_(False).eval()
        self.other = cached("sgd", seed=1)
        self.listed = [ebc]

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        parts = (self.first, self.second, self.teacher)
        return torch.cat([part(ids).flatten() for part in parts] + [lookup(self.other, ids)])


def test_a_collection_in_several_places_is_converted_once() -> None:
    model, ids = Towers(), draw(3).sparse_features
    model.first.ebc.freeze("t2")
    stock = to_torchrec(model)
    assert stock.first.ebc is stock.second.ebc is stock.listed[0]
    assert stock.teacher.ebc is not stock.first.ebc
    assert stock.first.training and not stock.teacher.ebc.training
    for name in ("t0", "t1", "t2", "t3"):
        weight = stock.first.ebc.embedding_bags[name].weight
        assert stock.teacher.ebc.embedding_bags[name].weight is weight
        assert stock.other.embedding_bags[name].weight is not weight
        assert weight.requires_grad == (name != "t2")
    assert_same(weights_of(model), weights_of(stock))
    with torch.no_grad():
        assert torch.equal(model(ids), stock(ids))
    assert_same(weights_of(stock), weights_of(to_torchrec(stock)))


def test_a_collection_without_tables_and_one_before_its_first_use() -> None:
    assert type(to_torchrec(cached("sgd", []))) is EmbeddingBagCollection
    with torch.device("meta"):
        ebc = cached("sgd")
    with pytest.raises(ConfigError, match="lies on 'meta', without rows"):
        to_torchrec(ebc)
    ebc = ebc.to_empty(device="cpu")
    ids = draw(3).sparse_features
    assert torch.equal(lookup(to_torchrec(ebc, "cpu"), ids), lookup(ebc, ids))


def never(weight: Tensor) -> None:
    raise AssertionError("the tables of the copy are not initialised")


def test_init_fn_is_kept_and_not_called() -> None:
    ebc = cached("sgd")
    ebc.flush()  # the tables of the collection are initialised
    ebc.embedding_bag_configs()[0].init_fn = never
    stock = to_torchrec(ebc)
    assert stock.embedding_bag_configs()[0].init_fn is never


class Locked(nn.Module):
    """A module that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = cached("sgd")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        raise TypeError("no copies")


def test_what_cannot_be_converted_is_refused_with_a_remedy(tmp_path) -> None:
    using("sequences")
    widths = configs()
    widths[1] = replace(widths[1], embedding_dim=4)
    ec = cached("sgd", widths)
    using("bags")
    named = EmbeddingBagConfig(name="a.b", num_embeddings=9, embedding_dim=8, feature_names=["f"])
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (ec, {}, "same embedding dimension.*a collection for each width"),
        (cached("sgd", [named]), {}, "use other names"),
        (cached("sgd", dtype=torch.float64), {}, "dtype=torch.float64.*give dtype=torch.float32"),
        (cached("sgd"), {"dtype": torch.float16}, "dtype=torch.float16: give torch.float32"),
        (cached("sgd"), {"device": "meta"}, "device='meta' holds no tables"),
        (
            Locked(),
            {},
            r"cannot copy the rest .*\(TypeError: no copies\).*to_torchrec\(model.part\)",
        ),
        ([cached("sgd")], {}, "give an nn.Module, not a list"),
    ]
    for model, arguments, message in cases:
        with pytest.raises(ConfigError, match=message):
            to_torchrec(model, **arguments)


def test_ids_beyond_a_table_are_warned_of(caplog) -> None:
    to_torchrec(cached("sgd", on_bad_id="hash"))
    assert "modulo num_embeddings before" in caplog.text


def test_memory_is_checked_before_anything_is_allocated(monkeypatch) -> None:
    ebc, model = made()
    ebc.flush()  # the tables of the collection are made
    needed = sum(table.num_embeddings * 8 * 4 for table in configs())
    monkeypatch.setattr(memory, "available_memory", lambda: needed - 1)
    monkeypatch.setattr(copy, "deepcopy", never)
    with pytest.raises(MemoryTooSmallError) as caught:
        to_torchrec(model)
    message = str(caught.value)
    assert f"({needed} bytes)" in message and f"({needed - 1} bytes)" in message
    assert "in a single process" in message and "more memory" in message
    monkeypatch.undo()
    monkeypatch.setattr(memory, "available_memory", lambda: needed)
    assert torch.equal(predict(model, draw(1)), predict(to_torchrec(model), draw(1)))


# -----------------------------------------------------------------------------
# Several ranks.


@job
def on_ranks(rank: int, size: int) -> dict:
    """Train under DDP, convert on every rank, and refuse what cannot be converted on all ranks."""
    ebc, ddp, dense = wrapped()
    train(ddp, ebc, lookahead(mine(rank, size, 6), ebc), dense)
    with pytest.raises(ConfigError, match=r"model is a Distributed.*convert model.module"):
        to_torchrec(ddp)
    with pytest.raises(ConfigError, match=r"model.1 is a Distributed.*convert model.1.module"):
        to_torchrec(nn.Sequential(nn.Identity(), ddp))
    stock = to_torchrec(ddp.module)
    assert torch.equal(predict(ddp.module, draw(900)), predict(stock, draw(900)))
    result = weights_of(stock)
    assert_same(result, weights_of(ddp.module))
    available = memory.available_memory
    if rank == 0:
        memory.available_memory = lambda: 100
    with pytest.raises(MemoryTooSmallError) as caught:
        to_torchrec(ddp.module)
    message = str(caught.value)
    assert "on each of 2 ranks" in message and "single process" in message
    memory.available_memory = available
    train(ddp, ebc, lookahead(mine(rank, size, 10)[6:], ebc), dense)
    assert_same(result, weights_of(stock))
    result["trained on"] = weights_of(ebc)["embedding_bags.t0.weight"]
    if rank == 0:
        embedding_step.ALONE_S = 0.3
        with pytest.raises(PeerError, match=r"rank 0 asked for distcache.to_torchrec\(\)"):
            to_torchrec(ddp.module)
    return result


def test_every_rank_gets_whole_tables() -> None:
    first, second = ranks(on_ranks)
    assert_same(first, second)
    assert not torch.equal(
        first["trained on"], first["sparse_arch.embedding_bag_collection.embedding_bags.t0.weight"]
    )


@job
def on_nodes(rank: int, size: int) -> dict:
    """Convert where every node has a part of the rows."""
    socket.gethostname = lambda: f"node{rank}"
    ebc = cached("sgd", timeout_s=60)
    model = dlrm(ebc)
    train(model, ebc, mine(rank, size, 4), dense_optimizer(model))
    assert ebc.tables.world.nodes.count == 2
    stock = to_torchrec(ebc)
    assert torch.equal(lookup(ebc, draw(9).sparse_features), lookup(stock, draw(9).sparse_features))
    assert_same(weights_of(ebc), weights_of(stock))
    return weights_of(stock)


def test_and_so_it_is_on_several_nodes() -> None:
    first, second = ranks(on_nodes)
    assert_same(first, second)
    assert not torch.equal(
        first["embedding_bags.t0.weight"], weights_of(cached("sgd"))["embedding_bags.t0.weight"]
    )


# -----------------------------------------------------------------------------
# Tools that take stock modules.


def trained_means() -> nn.Module:
    """Return a trained model, converted."""
    ebc = cached("sgd")
    model = Means(ebc)
    for batch in batches(3):
        model(batch.sparse_features).sum().backward()
        ebc.step()
    return model


def test_the_copy_is_exported(kind: str, tmp_path) -> None:
    model, ids = trained_means(), draw(3).sparse_features
    program = torch.export.export(to_torchrec(model), (ids,))
    torch.export.save(program, tmp_path / "model.pt2")
    with torch.serialization.safe_globals([KeyedJaggedTensor]):  # an example of the input
        loaded = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        assert torch.equal(loaded(ids), model(ids))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
def test_the_copy_is_compiled_ahead_of_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, ids = trained_means(), draw(3).sparse_features
    program = torch.export.export(to_torchrec(model), (ids,))
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    compiled = torch._inductor.aoti_load_package(package)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids), model(ids))


def quantize_by_type(model: nn.Module) -> nn.Module:
    """Quantize collections of bags in a copy, one table to another dtype than the others."""
    arguments: dict[str, Any] = {"per_table_weight_dtype": {"t1": torch.half}}
    return quantize_embeddings(model, torch.int8, inplace=False, **arguments)


@pytest.mark.parametrize("quantize", [quantize_inference_model, quantize_by_type])
def test_the_copy_is_quantized_as_a_collection_of_torchrec(kind: str, quantize) -> None:
    if quantize is quantize_by_type and kind == "sequences":
        pytest.skip("TorchRec's quantize_embeddings takes collections of bags alone")
    model, ids = trained_means(), draw(3).sparse_features
    plain = Means(plain_tables())
    plain.load_state_dict(model.state_dict())
    quantized = quantize(to_torchrec(model))
    assert type(quantized.ebc) is {"bags": QuantizedBags, "sequences": QuantizedRows}[kind]
    with torch.no_grad():
        torch.testing.assert_close(quantized(ids), model(ids), rtol=0.05, atol=0.05)
        assert torch.equal(quantized(ids), quantize(plain)(ids))


def test_the_copy_is_quantized_by_torch() -> None:
    bag = CachedEmbeddingBag(50, 8, mode="sum", rows=40, device="cpu")
    model = nn.Sequential(bag, nn.Linear(8, 4))
    ids = torch.randint(0, 50, (6, 3), generator=torch.Generator().manual_seed(5))
    stock = to_torchrec(model)
    spec = {
        nn.EmbeddingBag: torch.ao.quantization.float_qparams_weight_only_qconfig,
        nn.Linear: torch.ao.quantization.default_dynamic_qconfig,
    }
    quantized = torch.ao.quantization.quantize_dynamic(stock, spec)
    assert type(quantized[0]) is torch.ao.nn.quantized.EmbeddingBag
    assert type(quantized[1]) is torch.ao.nn.quantized.dynamic.Linear
    with torch.no_grad():
        torch.testing.assert_close(quantized(ids), model(ids), rtol=0.1, atol=0.1)


def test_the_copy_is_saved_and_loaded(kind: str) -> None:
    model, ids = trained_means(), draw(3).sparse_features
    stock = to_torchrec(model)
    file = io.BytesIO()
    torch.save(stock.state_dict(), file)
    # The tables do not bring the memory along that other tables share with them.
    assert len(file.getvalue()) < sum(table.num_embeddings for table in configs()) * 32 + 8192
    file.seek(0)
    state = torch.load(file)
    fresh = Means(STOCK[kind](configs()))
    fresh.load_state_dict(state)
    again = Means(cached("sgd", seed=1))
    again.load_state_dict(state)
    whole = io.BytesIO()
    torch.save(stock, whole)
    whole.seek(0)
    for other in (fresh, again, torch.load(whole, weights_only=False)):
        with torch.no_grad():
            assert torch.equal(other(ids), model(ids))


# -----------------------------------------------------------------------------
# The same tools refuse cached modules, and name the remedy.

REMEDY = r"give it distcache.to_torchrec\(model\)"


def test_a_cached_module_is_not_exported(kind: str) -> None:
    ids = draw(3).sparse_features
    modules: list[tuple[nn.Module, Any]] = [(cached("sgd"), ids), (Means(cached("sgd")), ids)]
    modules.append((CachedEmbedding(50, 8, rows=40, device="cpu"), torch.arange(9)))
    modules.append((CachedEmbeddingBag(50, 8, rows=40, device="cpu"), torch.arange(9).view(3, 3)))
    for module, inputs in modules:
        with pytest.raises(ConfigError, match=f"torch.export does not take a Cached.*{REMEDY}"):
            torch.export.export(module, (inputs,))
        module(inputs)  # works as before
    with pytest.raises(Exception, match=r"export distcache.to_torchrec\(model\)"):
        torch.export.export(modules[2][0], (torch.arange(9),), strict=True)


def quantize_linear(model: nn.Module) -> nn.Module:
    """Quantize the linear layers of a copy."""
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)


@pytest.mark.parametrize("quantize", [quantize_inference_model, quantize_by_type, quantize_linear])
def test_a_model_with_a_cached_collection_is_not_quantized(kind: str, quantize) -> None:
    model, ids = trained_means(), draw(3).sparse_features
    before = model(ids)
    with pytest.raises(ConfigError, match=f"quantization of a whole model .* a Cached.*{REMEDY}"):
        quantize(model)
    assert torch.equal(model(ids), before)
