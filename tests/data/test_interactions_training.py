"""Training on real users and items: better than chance, and as the independent trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference_trainer as reference
import torch
from source_runs import digests, summaries

from distcache.cli.compose import compose_overrides, to_config
from distcache.store.rows import initial_rows
from distcache.trainer import build
from distcache.trainer.record import auc

pytestmark = pytest.mark.usefixtures("one_thread")


def amazon(shared_data: Path, *more: str) -> list[str]:
    path = shared_data / "amazon_book_interactions.txt"
    return ["experiment=interactions", f"data.path={path}", *more]


def independent(overrides: list[str], reverse: bool = False) -> tuple[float, float]:
    """The last loss and the held-out AUC of the tests' own trainer over the same batches."""
    config = to_config(compose_overrides(overrides))
    stream = build.build_source(config)
    tables = build.build_tables(config, stream)
    seed, optim = config.trainer.seed, config.optim
    weights = {
        table.name: initial_rows(seed, index, table.rows, table.dim, 0, table.rows)
        for index, table in enumerate(tables)
    }
    model = build.build_dense(config, tables, stream.dense_features)
    settings = reference.Settings(
        optim.name,
        tuple(table.name for table in tables),
        dense_lr=optim.dense_lr,
        embedding_lr=optim.embedding_lr,
        eps=optim.eps,
        initial_accumulator=optim.initial_accumulator,
        reverse=reverse,
    )
    steps = config.trainer.steps or stream.steps_per_epoch
    batches = (stream.train_batch(step, 0, 1) for step in range(steps))
    trained = reference.train(weights, model.state_dict(), model, settings, batches)
    model.load_state_dict(trained.dense)
    bags = {
        name: torch.nn.EmbeddingBag.from_pretrained(table, mode="sum", include_last_offset=True)
        for name, table in trained.tables.items()
    }
    with torch.no_grad():
        parts = [
            reference.logits_of(stream.eval_batch(index, 0, 1), settings, model, bags)
            for index in range(stream.eval_batches)
        ]
    logits, labels = (torch.cat(part).double().numpy() for part in zip(*parts, strict=True))
    return trained.losses[-1], auc(logits, labels)


POPULAR = (
    *("optim=adam", "optim.dense_lr=0.005", "optim.embedding_lr=0.005"),
    *("data.negative_sampling=popularity", "trainer.steps=1076"),
)


@pytest.mark.parametrize(
    ("world_size", "more", "steps", "least"),
    [
        (1, (), 269, 0.75),
        # Negatives as popular as positives: what is learnt is who likes what. Four epochs of Adam.
        pytest.param(1, POPULAR, 1076, 0.72, marks=pytest.mark.slow),
        pytest.param(2, POPULAR, 1076, 0.72, marks=pytest.mark.slow),
    ],
)
def test_real_interactions_are_learnt(shared_data, tmp_path, world_size, more, steps, least):
    """Chance is 0.5, the bits are the same in two modes.

    The bar is 1e-4, or for four epochs ten times what the independent trainer drifts with its
    samples reversed.
    """
    runs = [amazon(shared_data, *more, f"parallel={mode}") for mode in ("data", "resident")]
    found = summaries(runs, tmp_path, world_size, timeout=280)
    assert digests(found[0]) == digests(found[1])
    assert found[0]["steps"] == steps and 0 < found[0]["hit_rate"] < 1
    assert found[0]["eval_auc"] == found[1]["eval_auc"] > least
    loss, area = independent(runs[0])
    drift = abs(area - independent(runs[0], reverse=True)[1]) if more else 0.0
    assert abs(found[0]["eval_auc"] - area) < max(1e-4, 10 * drift)
    if not more:
        assert found[0]["final_loss"] == pytest.approx(loss, rel=5e-3)
