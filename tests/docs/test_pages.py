"""The code in docs/drop_in.md runs as it stands, and docs/plan.md shows what the program says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ebc_cases import (
    DENSE,
    UPDATES,
    assert_close,
    batches,
    cached,
    configs,
    dlrm,
    draw,
    part,
    plain_optimizer,
    plain_tables,
    using,
    weights_of,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.inference.modules import quantize_inference_model

import distcache
from distcache.embedding.settings import CacheSettings
from distcache.plan import main

DOCS = Path(__file__).parents[2] / "docs"
DROP_IN = (DOCS / "drop_in.md").read_text()


def ran(heading: str, changes: dict[str, str], loss: Callable, **names: Any) -> list[float]:
    """Run the first block of Python under a heading, with small numbers; its losses."""
    under = DROP_IN.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    code = re.findall(r"```python\n(.*?)```", under, re.DOTALL)[0]
    losses: list[float] = []

    def noted(*values: Tensor) -> Tensor:
        found = loss(*values)
        losses.append(found.item())
        return found

    for before, after in changes.items():
        code = code.replace(before, after)
    names |= {"distcache": distcache, "device": torch.device("cpu"), "loss": noted}
    exec(code, names)
    names["ebc" if "ebc" in names else "ec"].close()
    return losses


class Model(nn.Module):
    """Linear over the features of a sharded and a cached collection, by name."""

    def __init__(self, small: nn.Module, ebc: nn.Module) -> None:
        super().__init__()
        self.small, self.ebc = small, ebc
        self.over = nn.Linear(DENSE + 5 * 8, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        found = self.small(ids).to_dict() | self.ebc(ids).to_dict()
        return self.over(torch.cat([dense, *(found[name] for name in sorted(found))], dim=1))


def beside(rank: int, size: int) -> list[float]:
    dist.init_process_group("gloo")
    using("bags")
    losses = ran(
        "Beside TorchRec's sharded tables",
        {"ratio=0.05": "ratio=0.5"},
        nn.functional.binary_cross_entropy_with_logits,
        torch=torch,
        EmbeddingBagCollection=EmbeddingBagCollection,
        DistributedModelParallel=DistributedModelParallel,
        apply_optimizer_in_backward=_apply_optimizer_in_backward,
        Model=Model,
        small_tables=configs()[1:],
        big_tables=configs()[:1],
        batches=[part(batch, rank, size) for batch in batches(30, 48)],
    )
    dist.barrier()
    dist.destroy_process_group()
    return losses


def test_beside_torchrec() -> None:
    for losses in run_ranks(beside, 2):
        assert len(losses) == 30 and sum(losses[20:]) < sum(losses[:10])


def test_to_and_from_torchrec(world) -> None:
    under = DROP_IN.split("\n## To and from TorchRec\n")[1].split("\n## ")[0]
    to_ours, back = re.findall(r"```python\n(.*?)```", under, re.DOTALL)
    using("bags")
    plain, start = plain_tables(), weights_of(plain_tables())
    rows = plain_optimizer("adagrad", plain)
    fused = EmbeddingBagCollection(tables=configs(), device=torch.device("meta"))
    options = {"lr": UPDATES["adagrad"].lr, "eps": UPDATES["adagrad"].eps}
    _apply_optimizer_in_backward(torch.optim.Adagrad, fused.parameters(), options)
    ways = {table.name: table_wise(0) for table in configs()}
    sharder = EmbeddingBagCollectionSharder()
    own = construct_module_sharding_plan(
        fused, ways, sharder, local_size=1, world_size=1, device_type="cpu"
    )
    how = {"plan": ShardingPlan({"": own}), "sharders": [sharder]}
    model = DistributedModelParallel(fused, device=torch.device("cpu"), **how)
    ebc = cached(rows=200)
    # From the sums of torch's own optimizer, too.
    plain.load_state_dict(start)
    pooled_steps(plain, rows, 0)
    state = ebc.optimizer.state_dict()
    for name, bag in plain.embedding_bags.items():
        state["state"][name]["sum"] = rows.state[bag.weight]["sum"].clone()
    ebc.load_state_dict(plain.state_dict())
    ebc.optimizer.load_state_dict(state)
    pooled_steps(ebc, ebc, 4)
    exec(back, {"model": model, "ebc": ebc})
    pooled_steps(model, None, 8)
    pooled_steps(ebc, ebc, 0)  # to be overwritten
    exec(to_ours, {"model": model, "ebc": ebc})
    pooled_steps(ebc, ebc, 12)
    for first in (4, 8, 12):
        pooled_steps(plain, rows, first)
    assert_close(ebc.state_dict(), plain.state_dict())
    sums = {name: rows.state[bag.weight]["sum"] for name, bag in plain.embedding_bags.items()}
    state = ebc.optimizer.state_dict()["state"]
    assert_close({name: own["sum"] for name, own in state.items()}, sums)
    ebc.close()


def pooled_steps(model: nn.Module, rows: Any, first: int) -> None:
    """Four steps on the batches from `first` on; `rows`: whose `step` updates the tables."""
    for step in range(first, first + 4):
        pooled = model(draw(step).sparse_features)
        getattr(rows, "zero_grad", bool)()
        pooled = pooled.wait() if hasattr(pooled, "wait") else pooled
        pooled.values().square().sum().backward()
        if rows is not None:
            rows.step()


def test_sequences() -> None:
    draw, data = torch.Generator().manual_seed(0), []
    for _ in range(40):
        ids = torch.randint(0, 40, (4 * 3 + 4,), generator=draw)
        lengths = torch.tensor([3, 2, 4, 3, 1, 1, 1, 1])
        jagged = KeyedJaggedTensor(["history", "next"], ids, lengths=lengths)
        data.append(type("Batch", (), {"ids": jagged, "sparse_features": jagged})())
    losses = ran(
        "Sequences",
        {"10_000_000": "400", "rows=100_000": "rows=100", "lr=0.01": "lr=0.003"},
        lambda history, following: (history.mean(1) - following).square().sum(),
        EmbeddingConfig=EmbeddingConfig,
        batches=data,
    )
    assert len(losses) == 40 and sum(losses[30:]) < sum(losses[:10])


def test_export_quantization_and_serving(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    using("bags")
    ebc = cached(rows=200)
    model, batch = dlrm(ebc), draw(3)
    under = DROP_IN.split("\n## Export, quantization and serving\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", under, re.DOTALL)
    names: dict[str, Any] = {"distcache": distcache, "torch": torch, "model": model, "batch": batch}
    exec(code, names | {"quantize_inference_model": quantize_inference_model}, names)
    inputs = (batch.dense_features, batch.sparse_features)
    with torch.no_grad():
        logits = model(*inputs)
        assert torch.equal(names["program"].module()(*inputs), logits)
        torch.testing.assert_close(names["quantized"](*inputs), logits, rtol=0.02, atol=0.02)
    assert_close(torch.load("weights.pt"), weights_of(model))
    assert (tmp_path / "model.pt2").exists()
    ebc.close()


def test_the_table_of_settings_is_complete() -> None:
    told = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", DROP_IN, re.MULTILINE)
    usual = CacheSettings()
    shown = {f.name: getattr(usual, f.name) for f in fields(CacheSettings)}
    del shown["objective"]  # of the command line alone
    assert {name: eval(value, {"torch": torch}) for name, value in told} == shown


def test_the_example_of_a_plan_is_what_the_program_says(tmp_path, capsys) -> None:
    text = (DOCS / "plan.md").read_text()
    shown = text.partition("<!-- plan -->")[2].partition("<!-- /plan -->")[0]
    lines = text.split("```")[1].replace("\\\n", " ").strip().splitlines()
    command = shlex.split(lines[1])  # "the second command above says"
    assert command[:3] == ["python", "-m", "distcache.plan"]
    # The sweep, which the page does not show, is as long as another key says.
    assert main([*command[3:], "most_ranks=1", f"output={tmp_path}"]) == 0
    said = capsys.readouterr().out.partition("By number of ranks")[0]
    assert said.strip() and shown.strip().strip("`").strip() == said.strip()


def test_every_optimizer_is_named() -> None:
    kinds = vars(distcache.optim).values()
    update = distcache.optim.RowUpdate
    names = [k.__name__ for k in kinds if isinstance(k, type) and issubclass(k, update)]
    names.remove("RowUpdate")
    missing = [name for name in names if f"{name}`" not in DROP_IN]
    assert len(names) == 9 and not missing, (names, missing)
