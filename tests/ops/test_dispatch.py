"""Who runs an operation: the device, the dtype, `DISTCACHE_OPS` and what is installed decide."""

from __future__ import annotations

import pytest
import torch

from distcache import ops
from distcache.errors import ConfigError
from distcache.ops import reference


@pytest.fixture
def choose(monkeypatch):
    """Set `DISTCACHE_OPS` for one test."""

    def choose(value):
        monkeypatch.setenv(ops.VARIABLE, value)
        ops.choice.cache_clear()

    yield choose
    ops.choice.cache_clear()


class OnGpu:
    """What the dispatch looks at of a tensor on a GPU."""

    is_cuda, dtype, device = True, torch.float32, torch.device("cuda")


def test_cpu_tensors_go_to_the_reference(choose):
    segments = torch.tensor([0, 40])
    for value in ("", "reference"):
        choose(value)
        for operation in ops.ON_GPU:
            assert ops.body(operation, torch.ones(2, 2)) is reference
        assert ops.chunks_for(segments, torch.device("cpu")) is None


def test_triton_takes_float32_only(choose):
    pytest.importorskip("triton", reason="Triton is not installed")
    choose("triton")
    device = torch.device("cpu" if ops.triton_bodies().INTERPRETED else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU, and Triton was imported without TRITON_INTERPRET=1")
    floats = torch.ones(2, 2, device=device)
    assert ops.body("pooled_lookup", floats) is ops.triton_bodies()
    assert ops.body("pooled_lookup", floats.double()) is reference
    assert ops.body("update_rows", floats, None, floats) is ops.triton_bodies()
    assert ops.body("update_rows", floats, floats.double(), floats) is reference
    chunks = ops.chunks_for(torch.tensor([0, 40]), device)
    assert chunks is not None and chunks.sizes == (2, 1) and chunks.table.device.type == device.type


def test_what_gpu_tensors_run_is_one_table(choose, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    kernels = ops.triton_bodies()
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    choose("")
    assert ops.body("row_gradients", OnGpu()) is kernels
    monkeypatch.setitem(ops.ON_GPU, "row_gradients", "reference")
    assert ops.body("row_gradients", OnGpu()) is reference
    assert ops.chunks_for(torch.tensor([0, 40]), torch.device("cuda")) is None
    assert ops.body("update_rows", OnGpu()) is kernels
    choose("reference")
    assert ops.body("update_rows", OnGpu()) is reference


def test_without_triton_gpu_tensors_go_to_the_reference(choose, monkeypatch):
    monkeypatch.setattr(ops, "triton_bodies", lambda: None)
    choose("")
    assert ops.body("update_rows", OnGpu()) is reference
    choose("triton")
    with pytest.raises(ConfigError, match="DISTCACHE_OPS=triton, but Triton is not installed"):
        ops.body("update_rows", OnGpu())


def test_unknown_choices_are_refused(choose):
    choose("cuda")
    with pytest.raises(ConfigError, match="DISTCACHE_OPS='cuda' is not 'reference' or 'triton'"):
        ops.pooled_lookup(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64), torch.arange(2))


@pytest.mark.gpu
def test_a_gpu_runs_the_kernels(choose):
    pytest.importorskip("triton", reason="Triton is not installed")
    choose("")
    assert ops.body("pooled_lookup", torch.ones(2, 2, device="cuda")) is ops.triton_bodies()
