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
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from distcache import lookahead
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


class Theirs:
    """TorchRec's serializer of bags, as far as it is used."""

    _module_cls = EmbeddingBagCollection
    module_to_serializer_cls: ClassVar[dict] = {}

    @classmethod
    def serialize_to_dict(cls, module: nn.Module) -> dict:
        return {"tables": [table.name for table in module.embedding_bag_configs()]}

    @classmethod
    def swap_meta_forward(cls, module: nn.Module) -> None:
        assert isinstance(module, cls._module_cls)
        names, widths = module._embedding_names, module._lengths_per_embedding
        module.forward = lambda features: (features, names, widths)


def test_torchrecs_ir_serializer_takes_a_collection_for_its_own(monkeypatch) -> None:
    def qualname(of) -> str:
        kind = of if isinstance(of, type) else type(of)
        return f"{kind.__module__}.{kind.__qualname__}"

    ir = types.ModuleType("torchrec.ir.serializer")
    ir.EBCJsonSerializer = ir.JsonSerializer = Theirs
    ir.qualname = qualname
    monkeypatch.setitem(sys.modules, "torchrec.ir", types.ModuleType("torchrec.ir"))
    monkeypatch.setitem(sys.modules, "torchrec.ir.serializer", ir)
    ebc = cached("sgd")
    own = Theirs.module_to_serializer_cls[qualname(ebc)]
    assert issubclass(own, Theirs) and isinstance(ebc, own._module_cls)
    ebc.register_buffer("ir_metadata", torch.zeros(3, dtype=torch.uint8), persistent=False)
    own.swap_meta_forward(ebc)
    said = json.loads(bytes(ebc.ir_metadata.tolist()))
    assert said["typename"] == qualname(EmbeddingBagCollection)
    assert said["metadata_dict"] == {"tables": ["t0", "t1", "t2", "t3"]}
    assert ebc(0) == (0, ["f0", "f1", "g", "f2", "f3"], [8] * 5)


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
