"""What a bench cannot measure ends it at once, with the option named."""

from __future__ import annotations

import pytest
import torch

from benchmarks import kernels, links, planner, preprocess, rows, step

SMALL = "size=small batch=64"
REFUSED = (
    (kernels, "contenders=tf", "contenders=tf"),
    (kernels, "optimizers=lamb", "optimizers=lamb"),
    (kernels, "device=tpu", "device=tpu"),
    (kernels, "cache.rows=3", "cache.rows=3: no such key"),
    (links, "rate=0gbit", "rate=0gbit"),
    (links, "size=small", "give rate=none"),
    (links, "rate=none rate=1gbit", "once"),
    (planner, "size=small placements=sharded,spread", "placements=sharded,spread: choose from"),
    (planner, "size=small placements=mixed share=1.5", "share=1.5"),
    (planner, "size=small batch=5000 cache.ratio=0.01 repetitions=1", "slots"),
    (planner, "size=big", "size=big"),
    (planner, "size=small placements=mixed against=.", "against= takes replicated and sharded"),
    (preprocess, "jobs=other", "jobs=other"),
    (rows, "device=cpu repetitions=0", "repetitions=0"),
    (rows, "device=cpu widths=0", "widths=0"),
    (rows, "device=cpu state_width=-1", "state_width=-1"),
    (rows, "device=cpu parts=disk", "parts=disk"),
    (rows, "parts=memory table_rows=900000000000 widths=64", "900000000000 rows of 64"),
    (rows, "device=cuda parts=device", "cuda"),
    (step, f"{SMALL} modes=bag optimizer=rowwise_adagrad", "rowwise_adagrad"),
    (step, f"{SMALL} modes=fused optimizer=adam", "adam"),
    (step, f"{SMALL} modes=fused optimizer=adagrad optim.initial_accumulator=0.1", "accumulator"),
    (step, f"{SMALL} modes=bag trainer.dtype=float64", "float32"),
    (step, f"{SMALL} modes=data,uvm", "modes=uvm is FBGEMM's cache on a GPU: set device=cuda"),
    (step, f"{SMALL} modes=data ratio=0.001", "cache.rows="),
    (step, f"{SMALL} modes=data,resident width=40000000", "modes=data,resident"),
    (step, f"{SMALL} modes=data,data", "names one twice"),
    (step, f"{SMALL} warmup=50 warmup_most=10", "warmup_most=10"),
    (step, f"{SMALL} against=/nowhere modes=data", "against=/nowhere has no package distcache"),
    (step, f"{SMALL} against=. modes=mixed,fused", "modes=mixed,fused: against= takes data"),
)


@pytest.mark.parametrize(("bench", "words", "says"), REFUSED)
def test_what_cannot_be_measured_is_refused(capfd, bench, words, says):
    if says == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert bench.main(words.split()) == 1
    assert says in capfd.readouterr().err
    assert not torch.distributed.is_initialized()
