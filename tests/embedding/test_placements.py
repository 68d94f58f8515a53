"""Every placement and place of the state: the bits of rows on every rank, in loops of all kinds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ebc_cases import batches
from ebc_counts import counted, two_widths
from ebc_models import Pooled, cached
from ebc_ranks import in_job, mine, ranks, unwrapped, wrapped
from ebc_training import assert_same, loss_of, train

import distcache
from distcache import lookahead
from distcache.errors import ConfigError, PlanError

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


def one_run(rank: int, size: int, name: str, kind: str, settings: dict) -> dict:
    """A few steps of k = 2 micro-batches with clipping and a schedule of rates; weights, norms."""
    tables, data = two_widths(), mine(rank, size, STEPS, tables=two_widths())
    ebc, ddp, dense = wrapped(name, Pooled, tables=tables, **{"rows": 500, **settings})
    rates = torch.optim.lr_scheduler.StepLR(ebc.optimizer, 2, 0.5)
    found = {}
    if kind == "inline":
        train(ddp, ebc, data, dense)
        for batch in lookahead(data, ebc):
            train(ddp, ebc, [batch], dense)
    else:
        train(ddp, ebc, data, dense)
        stream = lookahead(data, ebc)
        for batch in stream:
            train(ddp, ebc, [batch], dense)
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
    found |= unwrapped(ddp)
    summary = ebc.summary()
    assert summary["steps"] == 2 * STEPS + STEPS // 2 and summary["stage_ms"]["sync"] > 0
    ebc.close()
    return found


def in_placements(rank: int, size: int, name: str) -> dict:
    runs = {
        kind: one_run(rank, size, name, kind, settings) for kind, settings in placements().items()
    }
    for kind, found in runs.items():
        try:
            assert_same(found, runs["all"])
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error
    return runs["all"]


def placed(rank: int, size: int, name: str) -> dict:
    return in_job(in_placements)(rank, size, name)


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_all_placements_have_the_same_bits(name: str) -> None:
    first, second = ranks(placed, name)
    assert_same(first, second)


def non_finite(rank: int, size: int) -> dict:
    """An infinite gradient of a row at one home: every rank leaves the step out."""
    found = {}
    for placement in ("replicated", "sharded"):
        ebc = cached("adam", placement=placement, on_nonfinite="skip", timeout_s=60)
        batch = mine(rank, size, 1)[0]
        for factor in (1.0, float("inf") if rank else 1.0, 1.0):
            values = ebc(batch.sparse_features)
            flat = (
                values.values()
                if not isinstance(values, dict)
                else torch.cat([one.values().flatten() for one in values.values()])
            )
            (flat * factor).sum().backward()
            ebc.step()
        assert (ebc.tables.steps, ebc.tables.skipped) == (2, 1)
        found |= {f"{placement} {k}": v.clone() for k, v in ebc.state_dict().items()}
        ebc.close()
    for key in [key for key in found if key.startswith("replicated")]:
        assert torch.equal(found[key], found[key.replace("replicated", "sharded")])
    return found


def homes_in_job(rank: int, size: int) -> dict:
    def work(rank: int, size: int) -> dict:
        return non_finite(rank, size)

    return in_job(work)(rank, size)


def test_a_sum_that_is_not_finite_at_one_home_is_skipped_by_all() -> None:
    first, second = ranks(homes_in_job)
    assert_same(first, second)


def refused_in_job(rank: int, size: int) -> dict:
    def work(rank: int, size: int) -> dict:
        data = mine(rank, size, 3)
        ebc, ddp, dense = wrapped("adam", placement="sharded")
        loss_of(ddp, data[0]).backward()
        with pytest.raises(PlanError, match=r"distcache.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(ebc.optimizer.param_groups[0]["params"], 1.0)
        ebc.step()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for batch, bad in ((data[1], True), (data[2], False)):
            dense.zero_grad()
            loss = loss_of(ddp, batch)
            if bad and rank:  # DDP's gradients stay finite: only rows of this rank's ids do not
                ebc.tables.current.leaves[0].register_hook(lambda g: g * float("inf"))
            scaler.scale(loss).backward()
            scaler.unscale_(ebc.optimizer)
            scaler.step(ebc.optimizer)
            scaler.update()
            ebc.optimizer.zero_grad()
        assert ebc.tables.steps == 2
        found = {"scale": torch.tensor([scaler.get_scale()])}
        ebc.close()
        return found

    return in_job(work)(rank, size)


def test_grad_scalers_agree_and_torchs_clipping_is_refused() -> None:
    first, second = ranks(refused_in_job)
    assert_same(first, second)
    assert float(first["scale"]) == 512.0


def test_wrong_settings() -> None:
    for wrong, words in (
        ({"placement": "spread"}, "placement='spread'"),
        ({"placement": "mixed"}, "needs to know how often rows are looked up"),
        ({"replicated_share": 0.5}, "is for placement='mixed'"),
        ({"state": "home", "reduction": "native"}, "keeps sums at home"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore'"),
    ):
        with pytest.raises(ConfigError, match=words):
            cached("sgd", **wrong)
    assert batches(1) and dist.is_available()
