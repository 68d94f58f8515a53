"""Graphs that others make of a model: torch.compile with a break, torch.export with an operator
that holds no tables, and TorchRec's IR."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import types
from typing import ClassVar

import pytest
import torch
from ebc_cases import (
    assert_close,
    assert_same,
    batches,
    cached,
    configs,
    dense_optimizer,
    draw,
    expected,
    made,
    plain_tables,
    train,
    weights_of,
)
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from distcache import CachedEmbeddingBagCollection, lookahead
from distcache.errors import ConfigError, PlanError

pytestmark = pytest.mark.usefixtures("one_thread")


class Head(nn.Module):
    """Dense layers over all values of a pooled collection, as torch.export can follow."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        torch.manual_seed(3)
        self.over = nn.Linear(5 * 8, 1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(ids).values()).sigmoid()


def exported(model: nn.Module, ids: KeyedJaggedTensor) -> torch.export.ExportedProgram:
    """The program of a model whose collection is `ebc`."""
    return torch.export.export(model, (ids,), preserve_module_call_signature=("ebc",))


LOADED = """
    import sys
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    import distcache.embedding  # which knows the operator

    folder = sys.argv[1]
    weights, ids, wanted = torch.load(f"{folder}/rest.pt", weights_only=False)
    model = torch.export.unflatten(torch.export.load(f"{folder}/model.pt2"))
    tables = [
        EmbeddingBagConfig(name=k, num_embeddings=len(w), embedding_dim=8, feature_names=f)
        for k, (w, f) in weights.items()
    ]
    model.ebc = EmbeddingBagCollection(tables)
    for name, (weight, _) in weights.items():
        model.ebc.embedding_bags[name].weight.data.copy_(weight)
    torch.testing.assert_close(model(ids), wanted)
    print("same")
"""


def test_a_program_is_saved_and_loads_elsewhere_with_torchrecs_collection(tmp_path) -> None:
    ebc = cached("sgd", rows=200)
    model, ids = Head(ebc), draw(3).sparse_features
    for batch in batches(3):
        model(batch.sparse_features).sum().backward()
        ebc.step()
    program = exported(model, ids)
    assert [str(n.target) for n in program.graph.nodes].count("distcache.lookup.default") == 1
    memory = {
        table.whole_tables.local(at)[0].data_ptr()
        for table in [ebc.tables.engine]
        for at in (0, 1, 2, 3)
    }
    held = [*program.state_dict.values(), *program.constants.values()]
    assert not memory & {value.data_ptr() for value in held if isinstance(value, Tensor)}
    assert sum(value.numel() for value in held) == 5 * 8 + 1
    with pytest.raises(PlanError, match="an exported program has no tables"):
        program.module()(ids)
    torch.export.save(program, tmp_path / "model.pt2")
    weights = {
        table.name: (
            ebc.state_dict()[f"embedding_bags.{table.name}.weight"].clone(),
            table.feature_names,
        )
        for table in configs()
    }
    with torch.no_grad():
        torch.save((weights, ids, model(ids)), tmp_path / "rest.pt")
    ebc.close()
    run = [sys.executable, "-c", textwrap.dedent(LOADED), str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip().endswith("same"), done.stderr


@pytest.mark.usefixtures("sequences")
def test_sequences_are_exported() -> None:
    class Means(nn.Module):
        def __init__(self, ec: nn.Module) -> None:
            super().__init__()
            self.ebc = ec

        def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
            return {name: rows.values() for name, rows in self.ebc(ids).items()}

    ec, ids = cached("sgd"), draw(3).sparse_features
    model = torch.export.unflatten(exported(Means(ec), ids))
    plain = plain_tables()
    plain.load_state_dict(weights_of(ec))
    model.ebc = plain
    with torch.no_grad():
        found, wanted = model(ids), ec(ids)
    assert list(found) == list(wanted)
    for name, rows in found.items():
        torch.testing.assert_close(rows, wanted[name].values())
    with pytest.raises(ConfigError, match="need_indices=True cannot be exported"):
        exported(Means(cached("sgd", need_indices=True)), ids)


def qualname(of) -> str:
    kind = of if isinstance(of, type) else type(of)
    return f"{kind.__module__}.{kind.__qualname__}"


class Theirs:
    """TorchRec's serializer of bags, as far as it is used."""

    _module_cls: type[nn.Module] = EmbeddingBagCollection
    module_to_serializer_cls: ClassVar[dict] = {}

    @classmethod
    def serialize_to_dict(cls, module: nn.Module) -> dict:
        tables = [
            {"name": own.name, "num_embeddings": own.num_embeddings, "embedding_dim": 8}
            | {"feature_names": own.feature_names}
            for own in module.embedding_bag_configs()
        ]
        weighted = module.is_weighted()
        return {"tables": tables, "is_weighted": weighted, "device": str(module.device)}

    @classmethod
    def swap_meta_forward(cls, module: nn.Module) -> None:
        assert isinstance(module, cls._module_cls)
        names, widths = module._embedding_names, module._lengths_per_embedding
        module.forward = lambda features: (features, names, widths)

    @classmethod
    def deserialize_from_dict(
        cls, metadata_dict: dict, device=None, unflatten_ep: nn.Module | None = None
    ) -> nn.Module:
        tables = [EmbeddingBagConfig(**own) for own in metadata_dict["tables"]]
        device = device or torch.device(metadata_dict["device"])
        return EmbeddingBagCollection(tables, metadata_dict["is_weighted"], device)

    @classmethod
    def encapsulate(cls, module: nn.Module) -> None:
        """What is in a program of `module`."""
        own = cls.module_to_serializer_cls[qualname(module)]
        raw = {"typename": qualname(module), "metadata_dict": own.serialize_to_dict(module)}
        data = torch.frombuffer(json.dumps(raw).encode(), dtype=torch.uint8)
        module.register_buffer("ir_metadata", data, persistent=False)
        own.swap_meta_forward(module)

    @classmethod
    def decapsulate(cls, data: Tensor, device=None, within: nn.Module | None = None) -> nn.Module:
        """The module of which `data` is in a program."""
        raw = json.loads(bytes(data.tolist()))
        own = cls.module_to_serializer_cls[raw["typename"]]
        made = own.deserialize_from_dict(raw["metadata_dict"], device, within)
        assert isinstance(made, own._module_cls)
        return made


class Processed(Theirs):
    """TorchRec's serializer of bags behind feature processors."""

    _module_cls = FeatureProcessedEmbeddingBagCollection

    @classmethod
    def serialize_to_dict(cls, module: nn.Module) -> dict:
        return {}

    @classmethod
    def swap_meta_forward(cls, module: nn.Module) -> None:
        pass

    @classmethod
    def deserialize_from_dict(
        cls, metadata_dict: dict, device=None, unflatten_ep: nn.Module | None = None
    ) -> nn.Module:
        assert isinstance(unflatten_ep._embedding_bag_collection, EmbeddingBagCollection)
        parts = unflatten_ep._embedding_bag_collection, unflatten_ep._feature_processors
        return FeatureProcessedEmbeddingBagCollection(*parts)


STOCK = {qualname(EmbeddingBagCollection): Theirs}
STOCK[qualname(FeatureProcessedEmbeddingBagCollection)] = Processed


@pytest.fixture
def serializer(monkeypatch) -> type[Theirs]:
    """TorchRec's, which knows its own classes."""
    ir = types.ModuleType("torchrec.ir.serializer")
    ir.EBCJsonSerializer = ir.JsonSerializer = Theirs
    ir.FPEBCJsonSerializer, ir.qualname = Processed, qualname
    ir.get_deserialized_device = lambda of_config, device: device or torch.device(of_config)
    monkeypatch.setattr(Theirs, "module_to_serializer_cls", STOCK.copy())
    monkeypatch.setitem(sys.modules, "torchrec.ir", types.ModuleType("torchrec.ir"))
    monkeypatch.setitem(sys.modules, "torchrec.ir.serializer", ir)
    return Theirs


class Ours(CachedEmbeddingBagCollection):
    """A class of somebody's own."""


def test_torchrecs_ir_gives_back_what_a_program_was_made_of(serializer, monkeypatch) -> None:
    ebc, batch = cached("sgd"), draw(3).sparse_features
    own = serializer.module_to_serializer_cls[qualname(ebc)]
    assert issubclass(own, Theirs) and isinstance(ebc, own._module_cls)
    train_weights, names = weights_of(ebc), ["f0", "f1", "g", "f2", "f3"]
    with torch.no_grad():
        wanted = ebc(batch).values()
    other, stock = Ours(configs(), rows=64), plain_tables()
    for collection in (ebc, other, stock):
        serializer.encapsulate(collection)
    said = json.loads(bytes(ebc.ir_metadata.tolist()))
    assert said["typename"] == qualname(EmbeddingBagCollection)
    assert [own["name"] for own in said["metadata_dict"]["tables"]] == ["t0", "t1", "t2", "t3"]
    assert ebc(0) == (0, names, [8] * 5)
    for before in (ebc, other, stock):
        after = serializer.decapsulate(before.ir_metadata)
        assert type(after) is type(before) and after.device.type == "cpu"
        after.load_state_dict(train_weights)
        with torch.no_grad():
            torch.testing.assert_close(after(batch).values(), wanted)
    on_meta = serializer.decapsulate(ebc.ir_metadata, torch.device("meta"))
    assert type(on_meta) is type(ebc) and on_meta.device.type == "meta"
    with pytest.raises(ConfigError, match="no optimizer was given"):
        serializer.decapsulate(ebc.ir_metadata)(batch).values().sum().backward()
    monkeypatch.setattr(Theirs, "module_to_serializer_cls", STOCK)  # as without distcache
    for before in (ebc, other, stock):
        after = serializer.decapsulate(before.ir_metadata)
        assert type(after) is EmbeddingBagCollection and after._embedding_names == names
        after.load_state_dict(train_weights)
        torch.testing.assert_close(after(batch).values(), wanted)


def test_torchrecs_ir_gives_it_back_behind_feature_processors(serializer) -> None:
    processors = PositionWeightedModuleCollection({key: 9 for key in ("f0", "f1", "g", "f2", "f3")})
    for ebc in (cached("sgd", is_weighted=True), EmbeddingBagCollection(configs(), True)):
        model = FeatureProcessedEmbeddingBagCollection(ebc, processors)
        with torch.no_grad():
            wanted = model(draw(3).sparse_features).values()
        for part in (ebc, model):
            serializer.encapsulate(part)
        program = nn.Module()
        program._feature_processors = processors
        program._embedding_bag_collection = serializer.decapsulate(ebc.ir_metadata)
        found = serializer.decapsulate(model.ir_metadata, within=program)
        assert type(found._embedding_bag_collection) is type(ebc)
        found.load_state_dict(model.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(found(draw(3).sparse_features).values(), wanted)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_whole_model_is_compiled_with_a_break(backend: str) -> None:
    torch._dynamo.reset()
    ebc, model = made()
    compiled = torch.compile(model, backend=backend)
    train(compiled, ebc, lookahead(batches(), ebc), dense_optimizer(model))
    if backend == "eager":
        assert_same(weights_of(model), expected())
    else:
        assert_close(weights_of(model), expected())
    batch = draw(900)
    with torch.no_grad():
        wanted = model(batch.dense_features, batch.sparse_features)
        found = compiled(batch.dense_features, batch.sparse_features)
        model.eval()
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(compiled(batch.dense_features, batch.sparse_features), wanted)
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch._dynamo.explain(model)(batch.dense_features, batch.sparse_features)
    lookups = [reason for reason in found.break_reasons if "disable" in reason.reason]
    assert found.break_reasons == lookups and len(lookups) <= 1
    torch._dynamo.reset()
