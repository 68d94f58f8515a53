"""DLRM and DCN v2: equal to TorchRec's modules, and what `initialise` promises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distcache.models import DLRM, DotInteraction, build_model, initialise

FEATURES, DIM, DENSE, BATCH = 5, 8, 7, 12


def make(name, dtype=torch.float64, seed=3):
    model = build_model(name, DENSE, [DIM] * FEATURES, [16, DIM], [20, 10, 1], 2, 6)
    return initialise(model, seed, dtype)


def inputs(batch=BATCH, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(batch, DENSE, generator=generator, dtype=dtype)
    return dense, torch.randn(batch, FEATURES * DIM, generator=generator, dtype=dtype)


def linear_layers(*parts: nn.Module) -> list[nn.Linear]:
    return [layer for part in parts for layer in part.modules() if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize("name", ["dlrm", "dcn_v2"])
def test_equal_to_torchrec(name):
    """One table per feature; row i of every table becomes sample i's pooled vector."""
    torchrec = pytest.importorskip("torchrec")
    dlrm = pytest.importorskip("torchrec.models.dlrm")
    model, keys = make(name), [f"f{f}" for f in range(FEATURES)]
    shape = {"embedding_dim": DIM, "num_embeddings": BATCH}
    tables = [torchrec.EmbeddingBagConfig(name=k, feature_names=[k], **shape) for k in keys]
    collection = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    sizes = (DENSE, [16, DIM], [20, 10, 1])
    if name == "dlrm":
        theirs = dlrm.DLRM(collection, *sizes).double()
    else:
        theirs = dlrm.DLRM_DCN(collection, *sizes, 2, 6).double()
        cross = theirs.inter_arch.crossnet
        for layer, (down, up) in enumerate(zip(model.cross.down, model.cross.up, strict=True)):
            cross.V_kernels[layer].data.copy_(down.weight)
            cross.W_kernels[layer].data.copy_(up.weight)
            cross.bias[layer].data.copy_(up.bias)
    ours = linear_layers(model.dense_arch, model.over_arch)
    for mine, other in zip(ours, linear_layers(theirs.dense_arch, theirs.over_arch), strict=True):
        other.load_state_dict(mine.state_dict())
    dense, pooled = inputs()
    pooled = pooled.float().double()  # TorchRec's collection pools in float32
    for feature, bag in enumerate(collection.embedding_bags.values()):
        bag.weight.data = pooled[:, feature * DIM : (feature + 1) * DIM].contiguous()
    ids = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=keys,
        values=torch.arange(BATCH).repeat(FEATURES),
        lengths=torch.ones(FEATURES * BATCH, dtype=torch.int32),
    )
    logits = model(dense, pooled)
    assert logits.shape == (BATCH,)
    torch.testing.assert_close(logits, theirs(dense, ids).squeeze(1), rtol=1e-12, atol=1e-12)
    assert logits.std() > 1e-3


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("batch", [0, 1, 4])
def test_gradients_of_the_interaction_are_those_of_its_products(count, batch):
    generator = torch.Generator().manual_seed(count)
    dense, sparse = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((batch, DIM), (batch, count, DIM))
    )
    interaction = DotInteraction(count)
    found = interaction(dense, sparse)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    vectors = torch.cat((dense.unsqueeze(1), sparse), dim=1)
    first, second = torch.triu_indices(count + 1, count + 1, offset=1)
    products = (vectors[:, first] * vectors[:, second]).sum(-1)
    expected = torch.cat((dense, products), dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad((found * weights).sum(), (dense, sparse))
    theirs = torch.autograd.grad((expected * weights).sum(), (dense, sparse))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_interaction_multiplies_in_bf16_under_autocast_in_both_directions():
    generator = torch.Generator().manual_seed(7)
    shapes = ((8, DIM), (8, FEATURES, DIM))
    dense, sparse = (torch.randn(s, generator=generator, requires_grad=True) for s in shapes)
    interaction = DotInteraction(FEATURES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = interaction(dense, sparse)
    found.sum().backward()
    assert found.dtype == dense.grad.dtype == sparse.grad.dtype == torch.float32
    rounded = sparse.detach().bfloat16().float()
    vectors = torch.cat((dense.detach().bfloat16().float().unsqueeze(1), rounded), dim=1)
    others = vectors.sum(dim=1, keepdim=True) - vectors
    assert torch.equal(sparse.grad, sparse.grad.bfloat16().float())
    torch.testing.assert_close(sparse.grad, others[:, 1:], rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("name", ["dlrm", "dcn_v2"])
def test_empty_slice_gives_zero_gradients(name):
    model = make(name, torch.float32)
    dense, pooled = inputs(0, torch.float32)
    pooled.requires_grad_()
    logits = model(dense, pooled)
    assert logits.shape == (0,)
    logits.sum().backward()
    assert pooled.grad.shape == pooled.shape
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), key


def test_initialise_is_a_function_of_the_seed_with_the_spread_of_dlrm():
    first, again, other = make("dlrm"), make("dlrm"), make("dlrm", seed=4)
    torch.randn(3)  # the global generator plays no part
    single = make("dlrm", torch.float32)
    for key, value in first.state_dict().items():
        assert value.dtype == torch.float64
        assert torch.equal(value, again.state_dict()[key])
        assert torch.equal(value, single.state_dict()[key].double())
        assert not torch.equal(value, other.state_dict()[key])
    layer = initialise(DLRM(400, 3, 300, [300], [8, 1]), 1).dense_arch[0]
    assert abs(layer.weight.std().item() / (2 / 700) ** 0.5 - 1) < 0.02
    assert abs(layer.bias.std().item() / (1 / 300) ** 0.5 - 1) < 0.15
