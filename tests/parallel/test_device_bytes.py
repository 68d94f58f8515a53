"""What the embeddings take on the device: slots, buffers of the batch, nothing of the tables."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from distcache.cli.compose import checked_config, compose_overrides
from distcache.comm.rendezvous import Place
from distcache.comm.world import close_world, open_world
from distcache.layout import RowLayout
from distcache.optim import row_update
from distcache.trainer.build import build_dense, build_parallel, build_source, build_tables

DIM, SLOTS, STEPS, BATCH = 8, 900, 12, 64


def train(growth, optimizer, device):
    """Train on the same ids over tables `growth` times as large; the measured bytes, and the
    distinct rows of the largest step."""
    text = compose_overrides(
        (
            "experiment=quickstart",
            "data.table_rows=[20000,5000,1000,200,10,3]",
            "cache.lookahead=8",
            "cache.prefetch=1",
            f"optim={optimizer}",
            f"model.embedding_dim={DIM}",
            f"model.dense_arch=[8,{DIM}]",
            "model.over_arch=[8,1]",
            f"data.global_batch_size={BATCH}",
            "cache.ratio=null",
            f"cache.rows={SLOTS}",
            f"trainer.device={device}",
        )
    )
    config = checked_config(text, Place())
    source = build_source(config)
    batches = [source.train_batch(step, 0, 1) for step in range(STEPS)]
    tables = [
        dataclasses.replace(table, rows=table.rows * growth)
        for table in build_tables(config, source)
    ]
    rows = RowLayout(build_tables(config, source), 1).offsets[:-1]
    most = max(len(np.unique(b.ids.values.numpy() + np.repeat(rows, BATCH))) for b in batches)
    world = open_world(device)
    try:
        model = build_dense(config, tables, source.dense_features)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        mode = build_parallel(config, world, tables, model, source)
        mode.set_lr(0.01, 0.01)
        for step in mode.stream(batches):
            mode.train_step(step)
        summary = mode.summary()
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        mode.close()
        return summary, most, peak
    finally:
        close_world(world)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_device_bytes_are_bounded_whatever_the_table_rows(optimizer):
    state = row_update(optimizer, 0.0).state_width(DIM)
    summary, most, _ = train(1, optimizer, "cpu")
    larger, most_of_larger, _ = train(20, optimizer, "cpu")
    assert most == most_of_larger
    assert summary["rows_written_back"] > 0
    row, item = DIM + state, 4
    staging = 2 * most * row * item  # at most every row comes in, and one goes out for each
    bound = SLOTS * row * item + 3 * most * DIM * item + staging
    assert SLOTS * row * item < summary["embedding_device_bytes"] <= bound
    assert larger["embedding_device_bytes"] == summary["embedding_device_bytes"]
    assert larger["table_rows"] == 20 * summary["table_rows"]


@pytest.mark.gpu
def test_the_allocators_peak_does_not_grow_with_the_tables():
    peaks = [train(growth, "sgd", "cuda")[2] for growth in (1, 1, 50)]
    assert peaks[2] <= peaks[1] * 1.01
