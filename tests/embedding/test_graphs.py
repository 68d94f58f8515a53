"""Tests of torch.compile, whose graph breaks at a collection."""

from __future__ import annotations

import pytest
import torch
from ebc_cases import (
    assert_close,
    assert_same,
    batches,
    dense_optimizer,
    draw,
    expected,
    made,
    train,
    weights_of,
)

from distcache import lookahead

pytestmark = pytest.mark.usefixtures("one_thread")


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
