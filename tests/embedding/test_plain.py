"""`CachedEmbeddingBag` and `CachedEmbedding` are torch.nn's modules over cached rows: the same
values, and after training the same weights as with sparse gradients; also without TorchRec.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from ebc_cases import job, ranks
from launching import environment
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import distcache
from distcache import CachedEmbedding, CachedEmbeddingBag, lookahead
from distcache.errors import ConfigError, DataError, PlanError

ROWS, DIM, PAD, STEPS, SIZE = 200, 8, 5, 12, 16
OPTIMIZERS: dict[str, tuple] = {
    "sgd": (partial(torch.optim.SGD, lr=0.3), distcache.optim.SGD(lr=0.3)),
    "adagrad": (partial(torch.optim.Adagrad, lr=0.3), distcache.optim.Adagrad(lr=0.3, eps=1e-10)),
    "adam": (partial(torch.optim.SparseAdam, lr=0.1), distcache.optim.Adam(lr=0.1)),
}
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
PAIRS = [(nn.EmbeddingBag, CachedEmbeddingBag), (nn.Embedding, CachedEmbedding)]


def ids(seed: int, *shape: int) -> Tensor:
    """Skewed ids, among them padding."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.rand(shape, generator=generator) ** 3 * ROWS).long()
    return drawn.masked_fill(torch.rand(shape, generator=generator) < 0.1, PAD)


def bags(seed: int, size: int, to_end: bool = False, weighted: bool = False) -> tuple[Tensor, ...]:
    """Ids `[n]` in bags of 0 to 4, where they begin, and weights."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    ends = torch.cat(
        [torch.zeros(1).long(), torch.randint(0, 5, (size,), generator=generator).cumsum(0)]
    )
    own = ids(seed, int(ends[-1]))
    weights = torch.rand(len(own), generator=generator, dtype=torch.float64)
    return (own, ends if to_end else ends[:-1], *([weights] if weighted else []))


# Module, its arguments, and a batch of what it is called with.
CASES: dict[str, tuple[type, dict, Callable]] = {
    "rows": (nn.Embedding, {}, lambda seed, size: (ids(seed, size),)),
    "rows, padded": (nn.Embedding, {"padding_idx": PAD}, lambda s, size: (ids(s, size, 3, 2),)),
    "mean": (nn.EmbeddingBag, {}, bags),
    "mean, padded": (nn.EmbeddingBag, {"padding_idx": PAD - ROWS}, bags),
    "mean, one length": (nn.EmbeddingBag, {}, lambda seed, size: (ids(seed, size, 4),)),
    "sum, padded": (
        nn.EmbeddingBag,
        {"mode": "sum", "padding_idx": PAD},
        lambda seed, size: (ids(seed, size, 4).int(),),
    ),
    "to the end": (nn.EmbeddingBag, {"include_last_offset": True}, partial(bags, to_end=True)),
    "weights": (
        nn.EmbeddingBag,
        {"mode": "sum", "padding_idx": PAD},
        partial(bags, weighted=True),
    ),
}


class Model(nn.Module):
    """What is looked up, and a dense part."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        torch.manual_seed(1)
        self.out = nn.Linear(DIM, 1, dtype=torch.float64)

    def forward(self, *given: Tensor) -> Tensor:
        return self.out(self.table(*given)).tanh()


def stock(theirs: type, how: dict) -> nn.Module:
    torch.manual_seed(0)
    return theirs(ROWS, DIM, sparse=True, dtype=torch.float64, **how)


def ours(theirs: type, name: str = "sgd", how: dict | None = None, **settings) -> nn.Module:
    torch.manual_seed(0)
    settings = {"rows": 120, "optimizer": OPTIMIZERS[name][1], "device": "cpu"} | settings
    return dict(PAIRS)[theirs](ROWS, DIM, dtype=torch.float64, **(how or {}), **settings)


def train(model, batches, step: Callable[[], object], accumulate: int = 1) -> list[Tensor]:
    """Outputs of every batch; the mean over the batch is minimised."""
    dense = torch.optim.SGD(getattr(model, "module", model).out.parameters(), lr=0.1)
    found = []
    for at, given in enumerate(batches, start=1):
        found.append(model(*given))
        (found[-1].mean() / accumulate).backward()
        if at % accumulate == 0:
            step()
            dense.step()
            dense.zero_grad()
    return [own.detach() for own in found]


def expected(case: str, name: str, batches: list, accumulate: int = 1) -> tuple[list, Tensor]:
    theirs, how, _ = CASES[case]
    model = Model(stock(theirs, how))
    rows = OPTIMIZERS[name][0](model.table.parameters())

    def step() -> None:
        rows.step()
        rows.zero_grad()

    return train(model, batches, step, accumulate), model.table.weight.detach()


# -----------------------------------------------------------------------------
# Arguments and weights.


@pytest.mark.parametrize("theirs, own", PAIRS)
@pytest.mark.parametrize("method", ["__init__", "from_pretrained", "forward"])
def test_arguments_are_torchs(theirs, own, method) -> None:
    there, here = (
        list(inspect.signature(getattr(kind, method)).parameters.values()) for kind in (theirs, own)
    )
    for one, other in zip(there, here, strict=False):
        assert (one.name, one.default, one.kind) == (other.name, other.default, other.kind)
    assert all(rest.kind is not rest.POSITIONAL_OR_KEYWORD for rest in here[len(there) :])


@pytest.mark.parametrize("theirs, own", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_initial_weights_and_the_generator_are_torchs(one_thread, theirs, own, dtype) -> None:
    torch.manual_seed(7)
    one, after = theirs(ROWS, DIM, padding_idx=3, dtype=dtype), torch.rand(1)
    torch.manual_seed(7)
    other = own(ROWS, DIM, padding_idx=3, dtype=dtype)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(one.weight, other.weight)
    torch.manual_seed(8)
    one.reset_parameters()
    torch.manual_seed(8)
    other.reset_parameters()
    assert torch.equal(one.weight, other.weight) and not other.weight[3].any()
    by_seed = own(ROWS, DIM, padding_idx=3, dtype=dtype, seed=1)
    assert not by_seed.weight[3].any() and 0.9 < by_seed.weight.std() < 1.1
    for module in (other, by_seed):
        module.close()


@pytest.mark.parametrize("theirs, own", PAIRS)
def test_weights_come_in_and_go_out(one_thread, theirs, own) -> None:
    given, batch = torch.randn(ROWS, DIM), torch.tensor([[1, 2]])
    module = own.from_pretrained(given, padding_idx=1, rows=100, device="cpu")
    stock = theirs.from_pretrained(given.clone(), padding_idx=1)
    assert torch.equal(module.weight, given) and module.frozen == ("embedding",)
    assert "weight" not in dict(module.named_parameters())
    assert torch.equal(module(batch), stock(batch))
    with torch.no_grad():
        for one in (module, stock):
            one.weight[1:3] = 4.0
    assert torch.equal(module(batch), stock(batch))
    fresh = theirs(ROWS, DIM)
    module.load_state_dict(fresh.state_dict())
    stock.load_state_dict(module.state_dict())
    assert torch.equal(stock.weight, fresh.weight)
    module.close()


@pytest.mark.parametrize("theirs, own", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_stored_and_updated_in_float32(one_thread, theirs, own, dtype) -> None:
    how = {"padding_idx": PAD, "dtype": dtype} | ({"mode": "sum"} if own is not PAIRS[1][1] else {})
    torch.manual_seed(7)
    stock = theirs(ROWS, DIM, **how)
    torch.manual_seed(7)
    module = own(ROWS, DIM, rows=60, optimizer=distcache.optim.SGD(lr=0.5), device="cpu", **how)
    assert module.weight.dtype == dtype and torch.equal(module.weight, stock.weight)
    wide = theirs(ROWS, DIM, **how | {"dtype": torch.float32})
    rate = torch.optim.SGD(wide.parameters(), lr=0.5)
    for step in range(4):
        wide.load_state_dict(module.state_dict())
        batch = ids(step, 6, 3)
        found, wanted = module(batch), wide(batch)
        assert found.dtype == dtype and torch.equal(found, wanted.to(dtype))
        slopes = torch.randint(-8, 9, found.shape) / 16  # whose sums have no rounding
        for one in (found, wanted):
            (one * slopes).sum().backward()
        module.step()
        rate.step()
        rate.zero_grad()
        assert torch.equal(module.weight, wide.weight.to(dtype))
    nn.Sequential(module).to(dtype)
    with pytest.raises(ConfigError, match=f"in {dtype} and cannot become cpu, torch.float32"):
        nn.Sequential(module).float()
    if own is CachedEmbeddingBag:
        wide.load_state_dict(module.state_dict())
        weights = (torch.randint(0, 9, batch.shape) / 8).to(dtype)
        found, wanted = module(batch, None, weights), wide(batch, None, weights.float())
        assert torch.equal(found, wanted.to(dtype))
    module.close()


REFUSED = {
    "dtype": (CachedEmbedding, {"dtype": torch.int8}, "float32"),
    "max_norm": (CachedEmbedding, {"max_norm": 1.0}, "torch.renorm"),
    "scale_grad_by_freq": (CachedEmbeddingBag, {"scale_grad_by_freq": True}, "leave it out"),
    "mode": (CachedEmbeddingBag, {"mode": "max"}, "amax"),
    "padding_idx": (CachedEmbedding, {"padding_idx": ROWS}, "not within num_embeddings"),
    "_weight": (CachedEmbedding, {"_weight": torch.zeros(3, DIM)}, "shape"),
    "row": (CachedEmbedding, {"row": 3}, "did you mean rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_with_the_way_out(name) -> None:
    kind, how, way = REFUSED[name]
    with pytest.raises(ConfigError, match=f"(?s){name}.*{way}"):
        kind(ROWS, DIM, **how)


@pytest.mark.parametrize(
    "given, said",
    [
        ((torch.tensor([1, 2]),), "give ids \\[n\\] with offsets"),
        ((torch.tensor([[1, 2]]), torch.tensor([0])), "give ids \\[n\\] with offsets"),
        ((torch.tensor([1, 2]), torch.tensor([1])), "begin with 0"),
        ((torch.tensor([1, 2]), torch.tensor([0, 3])), "never decrease"),
        ((torch.tensor([1, 2]), torch.tensor([0, 2, 1])), "never decrease"),
        ((torch.tensor([1.0, 2.0]), torch.tensor([0])), "int64 or int32"),
        ((torch.tensor([1, ROWS]), torch.tensor([0])), f"id {ROWS} is not in table 'embedding'"),
        ((torch.tensor([1]), torch.tensor([0]), torch.tensor([1.0])), "mode='sum'"),
    ],
)
def test_malformed_ids_are_refused(one_thread, given, said) -> None:
    module = ours(nn.EmbeddingBag)
    with pytest.raises(DataError, match=said):
        module(*given)
    module.close()


def test_weights_have_the_shape_of_their_ids(one_thread) -> None:
    module = ours(nn.EmbeddingBag, how={"mode": "sum"})
    with pytest.raises(DataError, match=r"per_sample_weights of shape \[4\] .* \[2, 2\]"):
        module(torch.ones(2, 2).long(), None, torch.ones(4))
    module.close()


def test_given_weights_are_not_kept_beside_the_table(one_thread) -> None:
    given = torch.randn(ROWS, DIM, dtype=torch.float64)
    module, kept = CachedEmbedding.from_pretrained(given, device="cpu"), weakref.ref(given)
    close(module.weight.detach(), given)
    del given
    assert kept() is None
    module.close()


# -----------------------------------------------------------------------------
# Training.


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.rows = ours(nn.EmbeddingBag, how={"mode": "sum"}), ours(nn.Embedding)

    def forward(self, own: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
        return self.bag(own, starts, weights).sum(0) * self.rows(own)


def test_they_are_nodes_of_a_traced_model(one_thread) -> None:
    model, given = Both(), bags(0, SIZE, weighted=True)
    traced = torch.fx.symbolic_trace(model)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert calls == ["bag", "rows"]
    assert torch.equal(traced(*given), model(*given))
    model.bag.close()
    model.rows.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_training_gives_torchs_weights(one_thread, case, name) -> None:
    theirs, how, draw = CASES[case]
    batches = [draw(seed, SIZE) for seed in range(STEPS)]
    outputs, weight = expected(case, name, batches)
    bits = []
    for ahead in (True, False):
        model = Model(ours(theirs, name, how))
        stream = lookahead(batches, model, ids=lambda given: given) if ahead else batches
        close(train(model, stream, model.table.step), outputs)
        close(model.table.weight.detach(), weight)
        bits.append(model.table.weight.detach().clone())
        model.table.close()
    assert torch.equal(*bits)


def test_gradients_of_weights_are_torchs(one_thread) -> None:
    found = []
    for module in (
        stock(nn.EmbeddingBag, CASES["weights"][1]),
        ours(nn.EmbeddingBag, how=CASES["weights"][1]),
    ):
        *given, weights = bags(0, SIZE, weighted=True)
        weights.requires_grad_()
        module(*given, weights).tanh().sum().backward()
        found.append(weights.grad)
    close(*found)
    module.close()


def test_accumulation_and_an_evaluation_within_a_look_ahead(one_thread) -> None:
    case = "sum, padded"
    theirs, how, draw = CASES[case]
    batches = [draw(seed, SIZE) for seed in range(STEPS)]
    outputs, weight = expected(case, "adam", batches, accumulate=3)
    model = Model(ours(theirs, "adam", how))

    def evaluating():
        for at, given in enumerate(lookahead(batches, model, accumulate=3)):  # the ids are found
            yield given
            if at % 3 == 2:
                model.eval()
                with torch.no_grad():
                    model(*batches[0])
                model.train()

    close(train(model, ([own] for (own,) in evaluating()), model.table.step, 3), outputs)
    close(model.table.weight.detach(), weight)
    model.table.close()


class Two(nn.Module):
    """Users and items, as a model of one's own reads them from a batch."""

    def __init__(self, users: nn.Module, items: nn.Module) -> None:
        super().__init__()
        self.users, self.items = users, items

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        user, item = self.users(batch["ids"][:, 0]), self.items(batch["ids"][:, 1:])
        return (user * item).sum(1)


def test_two_modules_of_a_model_read_slices_of_a_batch(one_thread) -> None:
    batches = [{"ids": ids(seed, SIZE, 5), "label": torch.zeros(1)} for seed in range(STEPS)]
    plain = Two(stock(nn.Embedding, {}), stock(nn.EmbeddingBag, {}))
    rows = torch.optim.SGD(plain.parameters(), lr=0.3)
    for batch in batches:
        rows.zero_grad()
        plain(batch).tanh().mean().backward()
        rows.step()
    model = Two(ours(nn.Embedding), ours(nn.EmbeddingBag))
    users, items = model.users, model.items
    where = {users: lambda batch: batch["ids"][:, 0], items: lambda batch: batch["ids"][:, 1:]}
    stream = lookahead(batches, model, ids=where)
    assert len(stream) == STEPS
    for batch in stream:
        model(batch).tanh().mean().backward()
        users.step()
        items.step()
    for name, weight in plain.state_dict().items():
        close(model.state_dict()[name], weight)
    for module in (users, items):
        module.close()


def test_a_look_ahead_says_where_ids_are_missing_or_out_of_turn(one_thread) -> None:
    module = ours(nn.Embedding)
    batch = {"user": ids(0, 4), "item": ids(1, 4)}
    with pytest.raises(ConfigError, match=r"2 tensors of whole numbers.*ids=lambda batch"):
        next(lookahead([batch], module))
    with pytest.raises(DataError, match="ids=lambda batch"):
        next(lookahead([batch], module, ids=lambda batch: "user"))
    batches = [ids(seed, 4) for seed in range(4)]
    stream = iter(lookahead(batches, module))
    next(stream)
    with pytest.raises(PlanError, match="not those of batch 0"):
        module(batches[1] + 1)
    module(batches[0].clone())  # the same ids, made anew
    next(stream)
    batches[1].add_(1)
    with pytest.raises(PlanError, match="not those of batch 1"):
        module(batches[1])
    stream.close()
    module.close()


def test_a_buffer_that_is_filled_again_is_another_batch(one_thread) -> None:
    module, buffer = ours(nn.Embedding), torch.zeros(4, dtype=torch.int64)
    behind = buffer.numpy()  # writes that torch does not count
    for first in (0, 4):
        behind[:] = range(first, first + 4)
        assert torch.equal(module(buffer), module.weight[buffer])
    stream = iter(lookahead([buffer], module))
    next(stream)
    behind[:] = 0
    with pytest.raises(PlanError, match="not those of batch 0"):
        module(buffer)
    stream.close()
    module.close()


def test_padding_that_moves_is_another_batch(one_thread) -> None:
    module = ours(nn.Embedding, how={"padding_idx": PAD})
    stream = iter(lookahead([torch.tensor([1, PAD])], module))
    next(stream)
    with pytest.raises(PlanError, match="not those of batch 0"):
        module(torch.tensor([PAD, 1]))
    assert not module(torch.tensor([1, PAD]))[1].any()
    module.close()


@job
def trained(rank: int, size: int, case: str, ahead: bool, placement: str) -> dict:
    theirs, how, draw = CASES[case]
    table = ours(theirs, "adam", how, timeout_s=60, placement=placement)
    model = DistributedDataParallel(Model(table))
    batches = [tuple(own[rank * 8 : rank * 8 + 8] for own in draw(s, SIZE)) for s in range(STEPS)]
    train(
        model, lookahead(batches, model, ids=lambda given: given) if ahead else batches, table.step
    )
    found = {name.removeprefix("module."): own.clone() for name, own in model.state_dict().items()}
    table.close()
    return found


@pytest.mark.parametrize("ahead, placement", [(True, "sharded"), (False, "replicated")])
@pytest.mark.parametrize("case", ["rows, padded", "mean, one length"])
def test_two_ranks_under_ddp_give_the_weights_of_one(case, ahead, placement) -> None:
    batches = [CASES[case][2](seed, SIZE) for seed in range(STEPS)]
    weight = expected(case, "adam", batches)[1]
    for found in ranks(trained, case, ahead, placement):
        close(found["table.weight"], weight)


# -----------------------------------------------------------------------------
# Inside a model that `distcache.fit` trains.


class Fitted(nn.Module):
    """A model of `distcache.fit` that looks up rows of its own."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        torch.manual_seed(1)
        self.out = nn.Linear(2 * DIM, 1)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.out(torch.cat([pooled, self.table(dense.long())], 1)).squeeze(1)


def fit(table: nn.Module, rank: int, folder: str) -> dict:
    """What comes out of a run over this rank's batches."""
    batches = [
        (ids(10 * s + rank, 8, 3).float(), (ids(s, 8), torch.arange(9)), torch.arange(8) % 2.0)
        for s in range(5)
    ]
    tables = [distcache.TableSpec("t", ROWS, DIM, ("t",))]
    settings = {"cache.rows": 64, "run.dir": folder, "run.overwrite": True, "trainer.device": "cpu"}
    model = Fitted(table)
    how = {"eval_loader": batches[:2], "settings": settings}
    result = distcache.fit(batches, tables, model, **how)
    return {"out": model.out.weight.detach(), "loss": result.summary["final_loss"]}


@job
def fitted(rank: int, size: int, folder: str) -> dict:
    given = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(3))
    found = {}
    for kind in (nn.EmbeddingBag, CachedEmbeddingBag):
        table = kind.from_pretrained(given.clone(), mode="sum")
        found[kind.__name__] = fit(table, rank, folder)
        assert torch.equal(table.weight, given)
    table.requires_grad_(True)
    for other in (table, CachedEmbedding(ROWS, DIM, optimizer=distcache.optim.SGD(lr=0.1))):
        with pytest.raises(ConfigError, match=r"model.table is a Cached.* in tables=.* freeze it"):
            fit(other, rank, folder)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_fit_reads_frozen_tables_of_a_model_and_refuses_others(tmp_path, size) -> None:
    for found in ranks(fitted, str(tmp_path / "run"), size=size):
        stock, own = found.values()
        assert torch.equal(stock["out"], own["out"]) and stock["loss"] == own["loss"]


# -----------------------------------------------------------------------------
# Without TorchRec.

ALONE = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchrec", "fbgemm_gpu"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
import torch
import distcache

torch.set_num_threads(1)
torch.manual_seed(0)
own = distcache.CachedEmbeddingBag(
    100, 8, mode="sum", rows=60, optimizer=distcache.optim.Adagrad(lr=0.1, eps=1e-10), device="cpu"
)
torch.manual_seed(0)
theirs = torch.nn.EmbeddingBag(100, 8, mode="sum", sparse=True)
rows = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
batches = [torch.randint(100, (10, 3)) for _ in range(8)]
for batch in distcache.lookahead(batches, own):
    for module in (own, theirs):
        rows.zero_grad()
        module(batch).square().sum().backward()
    own.step()
    rows.step()
torch.testing.assert_close(own.weight.detach(), theirs.weight.detach())
distcache.save(sys.argv[1], own, step=8)
assert distcache.load(sys.argv[1], own)[0] == 8
stock = distcache.to_torchrec(own)
assert type(stock) is torch.nn.EmbeddingBag and torch.equal(stock(batch), own(batch))
own.close()
try:
    distcache.CachedEmbeddingBagCollection
except ImportError as error:
    print(error)
assert not {"torchrec", "fbgemm_gpu"} & set(sys.modules)
"""


def test_it_trains_where_torchrec_is_not_installed(checkout, tmp_path) -> None:
    command = [sys.executable, "-c", ALONE, str(tmp_path / "saved")]
    env = environment(PYTHONPATH=str(checkout))
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "needs torchrec, which is not installed" in done.stdout
