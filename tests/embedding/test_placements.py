"""Every placement and place of the state: the bits of rows on every rank, in loops of all kinds."""

from __future__ import annotations

import pytest
import torch
from ebc_cases import (
    Pooled,
    assert_same,
    cached,
    counted,
    job,
    loss_of,
    mine,
    ranks,
    train,
    two_widths,
    unwrapped,
    values_of,
    wrapped,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distcache
from distcache import lookahead
from distcache.errors import NonFiniteLossError, PlanError

pytestmark = pytest.mark.usefixtures("kind")

STEPS = 8


def placements() -> dict[str, dict]:
    """Settings by name; the first is what the others are compared with."""
    known = {"statistics": counted(), "batch_size": 24}
    return {
        "all": {"ratio": 1.0, "rows": None},
        "home": {"state": "home"},
        "sharded": {"placement": "sharded", "rows": 200},
        "mixed": {"placement": "mixed", "replicated_share": 0.05, "state": "home", **known},
        "auto": {"placement": "auto", **known},
        "serial": {"placement": "sharded", "schedule": "serial", "rows": 200},
        "inline": {"placement": "sharded", "rows": 200},
    }


class Checkpointed(nn.Module):
    """A model whose forward runs once more in backward."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.model = Pooled(ebc)

    def forward(self, dense: Tensor, ids: object) -> Tensor:
        return checkpoint(self.model, dense, ids, use_reentrant=False)


def one_run(rank: int, size: int, name: str, kind: str, settings: dict, model=Pooled) -> dict:
    """Epochs, then steps of k = 2 weighted micro-batches (sequences read no weights) with clipping
    and a schedule of rates, and an evaluation; weights, norms, bytes that were exchanged."""
    tables = two_widths()
    data = mine(rank, size, STEPS, tables=tables, weighted=True)
    weighted = {"is_weighted": True} if hasattr(tables[0], "pooling") else {}
    settings = {"rows": 500, "lookahead": 4, **weighted, **settings}
    ebc, ddp, dense = wrapped(name, model, tables=tables, **settings)
    rates = torch.optim.lr_scheduler.StepLR(ebc.optimizer, 2, 0.5)
    found = {}
    train(ddp, ebc, data, dense)
    train(ddp, ebc, data if kind == "inline" else lookahead(data, ebc), dense)
    for number, batch in enumerate(lookahead(data, ebc, accumulate=2)):
        loss_of(ddp, batch).backward()
        if number % 2:
            norm = distcache.clip_grad_norm_(ddp.parameters(), ebc, 0.1)
            found[f"norm {number}"] = norm.reshape(1)
            ebc.step()
            dense.step()
            dense.zero_grad()
            rates.step()
    with torch.no_grad():
        loss_of(ddp, data[0])
    found |= {key.replace("model.", ""): value for key, value in unwrapped(ddp).items()}
    summary = ebc.summary()
    assert summary["steps"] == 2 * STEPS + STEPS // 2 and summary["stage_ms"]["sync"] > 0
    found["bytes"] = torch.tensor([summary["collective_bytes"]])
    ebc.close()
    return found


@job
def in_placements(rank: int, size: int, name: str) -> dict:
    runs = {
        kind: one_run(rank, size, name, kind, settings) for kind, settings in placements().items()
    }
    for kind in ("sharded", "mixed"):  # what runs twice exchanges nothing twice
        again = one_run(rank, size, name, kind, placements()[kind], Checkpointed)
        assert_same(again, runs[kind])
    for kind, found in runs.items():
        del found["bytes"]
        same = {name: torch.equal(value, runs["all"][name]) for name, value in found.items()}
        assert found.keys() == runs["all"].keys() and all(same.values()), (kind, same)
    return runs["all"]


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_all_placements_have_the_same_bits(name: str) -> None:
    assert_same(*ranks(in_placements, name))


@job
def non_finite(rank: int, size: int) -> dict:
    """An infinite gradient of a row at one home: every rank leaves the step out, or stops."""
    found = {}
    for placement in ("replicated", "sharded"):
        for on in ("skip", "stop"):
            ebc = cached("adam", placement=placement, on_nonfinite=on, timeout_s=60)
            data = mine(rank, size, 3)
            for number, batch in enumerate(data):
                factor = float("inf") if rank and number == 1 else 1.0
                (values_of(ebc(batch.sparse_features)) * factor).sum().backward()
                if number and on == "stop":  # from there on for good
                    with pytest.raises(NonFiniteLossError, match=r"step 1.*nothing was applied"):
                        ebc.step()
                    ebc.optimizer.zero_grad()
                else:
                    ebc.step()
            counts = (ebc.tables.steps, ebc.tables.skipped)
            assert counts == ((2, 1) if on == "skip" else (1, 0))
            weights = {f"{placement} {key}": v.clone() for key, v in ebc.state_dict().items()}
            ebc.close()
            if on == "skip":
                found |= weights
                continue
            once = cached("adam", placement=placement, timeout_s=60)
            values_of(once(data[0].sparse_features)).sum().backward()
            once.step()
            assert_same(weights, {f"{placement} {k}": v for k, v in once.state_dict().items()})
            once.close()
    for key in [key for key in found if key.startswith("replicated")]:
        assert torch.equal(found[key], found[key.replace("replicated", "sharded")])
    return found


def test_a_sum_that_is_not_finite_at_one_home_is_left_out_by_all() -> None:
    assert_same(*ranks(non_finite))


@job
def scaled(rank: int, size: int) -> dict:
    """An infinite gradient of rows of one home alone: the scalers of all ranks decide alike."""
    data = mine(rank, size, 3)
    ebc, ddp, dense = wrapped("adam", placement="sharded")
    loss_of(ddp, data[0]).backward()
    with pytest.raises(PlanError, match=r"distcache.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(ebc.optimizer.param_groups[0]["params"], 1.0)
    ebc.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = {}
    for batch, bad in ((data[1], True), (data[2], False)):
        dense.zero_grad()
        loss = loss_of(ddp, batch)
        if bad:  # DDP's gradients stay finite: only this row's, at its one home, does not
            row = torch.zeros_like(ebc.tables.current.leaves[0])
            row[:1] = float("inf") if rank else 0.0
            ebc.tables.current.leaves[0].register_hook(lambda g, row=row: g + row)
        scaler.scale(loss).backward()
        if bad:
            homes = [part.rows.grad for part in ebc.tables.current.view.parts]
            found["finite"] = torch.stack([one.isfinite().all() for one in homes]).all()
        scaler.unscale_(ebc.optimizer)
        scaler.step(ebc.optimizer)
        scaler.update()
        ebc.optimizer.zero_grad()
    assert ebc.tables.steps == 2
    found["scale"] = torch.tensor([scaler.get_scale()])
    ebc.close()
    return found


def test_grad_scalers_agree_and_torchs_clipping_is_refused() -> None:
    found = ranks(scaled)
    assert [float(own["scale"]) for own in found] == [512.0, 512.0]
    assert sorted(bool(own["finite"]) for own in found) == [False, True], "one home alone has it"
