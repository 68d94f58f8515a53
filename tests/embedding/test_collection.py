"""One rank: a collection is TorchRec's, whatever the cache holds, and so are its checkpoints; what
sequences alone have; what is refused: bad ids, keys and sizes, wrong arguments.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from ebc_cases import (
    MORE,
    STEPS,
    UPDATES,
    Pooled,
    assert_close,
    assert_same,
    batches,
    cached,
    configs,
    counted,
    dense_optimizer,
    dlrm,
    draw,
    expected,
    key_of_tables,
    loss_of,
    made,
    mixed_configs,
    picked,
    plain_tables,
    train,
    train_plain,
    values_of,
    weights_of,
    written_back,
)
from pyarrow import parquet
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import distcache
from distcache import lookahead
from distcache.errors import ConfigError, DataError, PlanError, StepTooLargeError


@pytest.mark.parametrize("name", [*UPDATES, "of two widths", "weighted"])
def test_it_trains_as_torchrecs_own_tables(kind, name) -> None:
    pooled, mixed, weighted = kind == "bags", name not in UPDATES, name == "weighted"
    tables = mixed_configs() if mixed else configs()
    if pooled and weighted:  # a mean has no weights
        tables = [replace(t, pooling=configs()[0].pooling) for t in tables]
    how = {"is_weighted": weighted} if pooled else {}  # TorchRec's sequences ignore weights
    data, update = batches(tables=tables, weighted=weighted), "adagrad" if mixed else name
    ebc = cached(update, tables, rows=700 if mixed else 300, **how)
    make = Pooled if mixed else dlrm
    model = make(ebc)
    start = weights_of(model)
    losses = train(model, ebc, lookahead(data, ebc))

    def plain(own: torch.nn.Module) -> torch.nn.Module:
        if pooled:
            own._is_weighted = weighted
        return make(own)

    expected, final = train_plain(update, tables, start, plain, data)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(weights_of(model), final)
    assert written_back(ebc.tables) > 0
    assert all(not torch.equal(final[key], start[key]) for key in final if "over" in key)


@pytest.mark.parametrize(("steps", "weighted"), [(20, False), (19, True)])
def test_accumulated_micro_batches_are_one_step(kind, steps, weighted) -> None:
    how = {"tables": mixed_configs()}
    if kind == "bags":
        how["is_weighted"] = weighted
    data = batches(steps, tables=how["tables"], weighted=weighted)

    def run(**size):
        ebc = cached("adagrad", **size, **how)
        model = Pooled(ebc)
        dense = torch.optim.SGD(model.parameters(), 0.1)
        for i, batch in enumerate(lookahead(data, ebc, accumulate=4)):
            size = 4 if i < 16 or steps == 20 else 3
            (loss_of(model, batch) / size).backward()
            if i % 4 == 3 or i == steps - 1:
                ebc.step()
                dense.step()
                dense.zero_grad()
        assert ebc.tables.steps == 5
        return weights_of(model)

    small = run(rows=1000)
    assert_same(small, run(rows=None, ratio=1.0))
    big = cached("adagrad", rows=1000, **how)
    model = Pooled(big)
    train(model, big, lookahead([picked(data[at : at + 4]) for at in range(0, steps, 4)], big))
    assert_close(small, weights_of(model))


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("how", ["inline", "before the batch", "read ahead", "pulled ahead"])
def test_evaluation_in_the_middle_changes_nothing(how) -> None:
    plain = cached("adam", rows=170)
    twin = dlrm(plain)
    losses = train(twin, plain, lookahead(batches(), plain))
    ebc = cached("adam", rows=170)
    model = dlrm(ebc)
    held_out = [draw(1000 + step) for step in range(3)]

    def evaluate() -> list[torch.Tensor]:
        model.eval()
        stream = lookahead(held_out, ebc) if how == "read ahead" else held_out
        with torch.no_grad():
            out = [model(b.dense_features, b.sparse_features) for b in stream]
        model.train()
        return out

    def loop(stream):
        pulled = None
        for number, batch in enumerate(stream):
            if how == "before the batch" and number % 4 == 1:
                evaluate()
            if how == "pulled ahead":  # as a loop that copies the next batch meanwhile
                pulled, batch = batch, pulled
                if batch is None:
                    continue
            yield batch
            if how != "before the batch" and number % 4 == 1:
                first = evaluate()
                assert all(torch.equal(a, b) for a, b in zip(first, evaluate(), strict=True))
        if pulled is not None:
            yield pulled

    assert train(model, ebc, loop(lookahead(batches(), ebc))) == losses
    assert_same(weights_of(model), weights_of(twin))
    assert ebc.tables.steps == STEPS


def test_keys_names_and_dtypes_are_torchrecs(kind) -> None:
    tables = mixed_configs()
    ebc, own = cached("sgd", tables, rows=800), plain_tables(tables)
    own.load_state_dict(ebc.state_dict())
    ids = draw(4, tables=tables).sparse_features
    more = draw(5, tables=[replace(configs()[0], feature_names=["other"])])
    parts = ids.to_dict() | more.sparse_features.to_dict()
    order = ["other", *reversed(ids.keys())]
    lengths = torch.cat([parts[key].lengths() for key in order])
    shuffled = KeyedJaggedTensor(
        order,
        torch.cat([parts[key].values() for key in order]).int(),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths]).cumsum(0),
    )
    for given in (ids, shuffled):
        mine, theirs = ebc(given), own(given)
        assert list(mine.keys()) == ["f0@t0", "f1", "g", "f2", "f0@t2", "f3"]
        if kind == "bags":
            assert mine.keys() == theirs.keys() == ebc.embedding_names
            assert mine.length_per_key() == theirs.length_per_key()
            assert mine.values().dtype == torch.float32
            torch.testing.assert_close(mine.values(), theirs.values())
        else:
            assert_same_sequences(mine, theirs)
    if kind == "bags":
        assert ebc.embedding_bag_configs() == tables and not ebc.is_weighted()
    else:
        assert ebc.embedding_configs() == tables and not ebc.need_indices()
        assert [len(names) for names in ebc.embedding_names_by_table()] == [1, 2, 2, 1]
        with pytest.raises(ConfigError, match=r"several widths, \[4, 8\]"):
            ebc.embedding_dim()
    assert ebc.device == torch.device("cpu")
    assert [p.numel() for p in ebc.parameters()] == [0] and list(ebc.buffers()) == []


def assert_same_sequences(mine, theirs) -> None:
    """Values, lengths, offsets and weights have the same bits and types, key by key."""
    assert list(mine) == list(theirs)
    for name, one in mine.items():
        for part in ("values", "lengths", "offsets", "weights_or_none"):
            found, wanted = getattr(one, part)(), getattr(theirs[name], part)()
            assert (found is None) == (wanted is None)
            if found is not None:
                torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=f"{name} {part}")


@pytest.mark.usefixtures("kind")
def test_the_dense_part_may_be_compiled() -> None:
    ebc, other = cached("adagrad", rows=170), cached("adagrad", rows=170)
    model, plain = dlrm(ebc), dlrm(other)
    compiled = torch.compile(model, backend="eager")
    dense = torch.optim.SGD(model.parameters(), 0.1)
    losses = train(compiled, ebc, lookahead(batches(4), ebc), dense)
    assert losses == pytest.approx(train(plain, other, batches(4)), rel=1e-6)


@pytest.mark.usefixtures("sequences")
def test_indices_come_along_where_they_are_wanted() -> None:
    ebc = cached(need_indices=True)
    assert ebc.need_indices() and ebc.embedding_dim() == 8
    ids = draw(3).sparse_features
    found = ebc(ids)
    for name, one in ids.to_dict().items():
        assert torch.equal(found[name].weights(), one.values())
        assert torch.equal(found[name].lengths(), one.lengths())


@pytest.mark.usefixtures("sequences")
def test_ids_of_one_occurrence_train_with_torchrecs_bits() -> None:
    """No row is named twice, so there is no order of summation: SGD gives the very same bits."""
    tables = configs()[:1]
    ebc, own = cached("sgd", tables, rows=60), plain_tables(tables)
    own.load_state_dict(weights_of(ebc))
    rows = torch.optim.SGD(own.parameters(), lr=0.1)
    data = []
    for step in range(12):
        torch.manual_seed(step)
        lengths = torch.tensor([3, 0, 7, 1])
        data.append(KeyedJaggedTensor(["f0"], torch.randperm(400)[:11], lengths=lengths))
    for ids in lookahead(data, ebc):
        for found in (ebc(ids), own(ids)):
            found["f0"].values().square().sum().backward()
        ebc.step()
        rows.step()
        rows.zero_grad()
    assert_same(weights_of(ebc), own.state_dict())


@pytest.mark.usefixtures("sequences")
def test_values_may_be_changed_in_place_and_some_left_out() -> None:
    """As those of torchrec.EmbeddingCollection; rows that a loss does not need stay as they are."""
    for features in (["f0@t0", "f1", "g", "f2", "f0@t2", "f3"], ["f1"]):
        tables = mixed_configs()
        ebc, own = cached("sgd", tables, rows=800), plain_tables(tables)
        own.load_state_dict(weights_of(ebc))
        for collection in (ebc, own):
            found = collection(draw(2, tables=tables).sparse_features)
            parts = [found[name].values().mul_(2).relu_().square().sum() for name in features]
            sum(parts).backward()
        ebc.step()
        before, found = weights_of(own), weights_of(ebc)
        torch.optim.SGD(own.parameters(), lr=0.1).step()
        assert_close(found, own.state_dict())
        for name, gradient in ((n, p.grad) for n, p in own.named_parameters()):
            unchanged = gradient is None or not gradient.any()
            assert torch.equal(found[name], before[name]) == unchanged, name


@pytest.mark.usefixtures("sequences")
@pytest.mark.parametrize("size", [0, 1])
def test_batches_without_any_id(size) -> None:
    keys = list(draw(0).sparse_features.keys())
    lengths = torch.zeros(len(keys) * size, dtype=torch.int32)
    ebc = cached("adam")
    before = weights_of(ebc)
    found = ebc(KeyedJaggedTensor(keys, torch.zeros(0, dtype=torch.int64), lengths=lengths))
    for one in found.values():
        assert one.values().shape == (0, 8) and one.lengths().shape == (size,)
        assert one.lengths().dtype == torch.int32
    sum(one.values().sum() for one in found.values()).backward()
    ebc.step()
    assert_same(weights_of(ebc), before)
    assert ebc.tables.steps == 1


@pytest.mark.usefixtures("one_thread")
def test_bad_ids_keys_and_sizes_are_named(kind) -> None:
    ebc, model = made()
    ids = draw(0).sparse_features
    wrong = KeyedJaggedTensor(["f0", "f1", "h", "f2", "f3"], ids.values(), lengths=ids.lengths())
    with pytest.raises(DataError, match=r"feature 'g' of table 't1' is not among .*'h'"):
        ebc(wrong)
    with pytest.raises(DataError, match="feature 'g' of table 't1'"):
        next(lookahead([wrong], ebc))
    values = ids.values().clone()
    values[0] = 400
    beyond = KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths())
    with pytest.raises(DataError, match=r"feature 'f0'.*id 400 is not in table 't0'.*on_bad_id=h"):
        ebc(beyond)
    assert torch.isfinite(values_of(made(on_bad_id="hash")[0](beyond))).all()
    tight, other = made(rows=40)
    with pytest.raises(StepTooLargeError, match=r"set rows=(\d+)") as refusal:
        train(other, tight, lookahead(batches(), tight))
    enough = int(str(refusal.value).split("rows=")[1].split()[0])
    tight, other = made(rows=enough)
    train(other, tight, [draw(0)])
    if kind == "bags":
        with pytest.raises(DataError, match="is_weighted=True, but"):
            cached(is_weighted=True)(ids)
    else:
        with pytest.raises(ConfigError, match="Collection: is_weighted=True: no such setting"):
            cached(is_weighted=True)
    with pytest.raises(DataError, match="no KeyedJaggedTensor"):
        ebc(ids.values())
    train(model, ebc, lookahead(batches(), ebc))  # none of it has done harm
    assert_same(weights_of(model), expected())


@pytest.mark.usefixtures("one_thread")
def test_wrong_arguments_are_named(kind) -> None:
    ebc, model = made()
    with pytest.raises(ConfigError, match=r"give one of distcache.optim"):
        type(ebc)(configs(), optimizer="sgd")
    other = EmbeddingConfig if kind == "bags" else EmbeddingBagConfig
    with pytest.raises(ConfigError, match=rf"^tables: {other.__name__}\(.* is no torchrec\.Embed"):
        cached(tables=[other(4, 8, "t")])
    few, found = replace(counted(), tables=counted().tables[:2]), "fingerprint [0-9a-f]{16}"
    for settings, message in (
        ({"rows": 10, "ratio": 0.5}, "at most one of rows, ratio, bytes"),
        ({"policy": "belady"}, "^policy=belady is unknown: choose lookahead, lfu"),
        ({"store_access": "direct"}, "store_access=direct is unknown: choose staged or zero_copy"),
        ({"dtype": torch.float16}, "dtype=torch.float16"),
        ({"window": 3}, "window=3: no such setting: there are rows, ratio, bytes, lookahead"),
        ({"cache_row": 3}, "cache_row=3: no such setting: did you mean rows"),
        ({"tables": configs()[0]}, "give a list of Embedding.*Config, not Embedding.*Config"),
        ({"rows": "1000"}, "rows='1000' must be a whole number of at least 1"),
        ({"rows": True}, "rows=True must be a whole number"),
        ({"batch_size": -1}, "batch_size=-1 must be a whole number of at least 1"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"prefetch": None}, "prefetch=None must be a whole number of at least 0"),
        ({"prefetch": True}, "prefetch=True must be a whole number of at least 0"),
        ({"statistics": 5}, "statistics=5 is neither a folder nor"),
        ({"placement": "mixed"}, "needs to know how often rows are looked up"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite=ignore"),
        ({"timeout_s": 0}, "timeout_s=0: give seconds above 0"),
        ({"timeout_s": "x"}, "timeout_s='x': give seconds above 0"),
        ({"device": "mps"}, "device=mps"),
        ({"objective": "time"}, "objective='time': no such setting"),
        ({"split": "by_curve"}, r"split=by_curve needs .* give statistics="),
        ({"split": {"t9": 3}}, r"^split: t9=3 names no table: choose from t0, t1, t2"),
        ({"statistics": "/nowhere"}, "/nowhere holds neither.* -m distcache.analyze or dist"),
        ({"statistics": few, "split": "by_curve"}, r"split='by_curve' needs .* give batch_size="),
        ({"statistics": few}, rf"^the given statistics are .*\({found}\).* {found}\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            cached(**settings)
    with pytest.raises(ConfigError, match=r"CachedEmbeddingCollection, .*, got list"):
        lookahead([], [ebc, model])
    with pytest.raises(ConfigError, match="accumulate=0"):
        lookahead([], ebc, accumulate=0)
    with pytest.raises(ConfigError, match="cannot read another look-ahead"):
        lookahead(lookahead(batches(), ebc), ebc)
    with pytest.raises(PlanError, match=r"cannot be pickled.*state_dict\(\)"):
        pickle.dumps(model)
    with pytest.raises(ConfigError, match=r"cannot become cpu, torch.float64"):
        model.double()
    assert model.to("cpu") is model
    with pytest.raises(ConfigError, match="no other group"):
        ebc.optimizer.add_param_group({"params": [torch.zeros(1)]})
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = distcache.nothing


def saved(state):
    """`state` after a trip through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.usefixtures("kind")
def test_state_goes_to_torchrec_and_back() -> None:
    ebc = cached(rows=200)
    model = dlrm(ebc)
    views = ebc.state_dict(prefix="a.")  # of the store, which change as training goes on
    assert list(views) == [f"a.{key_of_tables()}.t{i}.weight" for i in range(4)]
    for view in views.values():  # or libraries would take one for the other
        assert view.untyped_storage().nbytes() == view.nbytes
    before = {name: value.clone() for name, value in views.items()}
    train(model, ebc, lookahead(batches(), ebc))
    ebc.flush()
    assert any(not torch.equal(views[name], before[name]) for name in views)
    own = dlrm(plain_tables())
    state = saved(model.state_dict())
    assert list(state) == list(own.state_dict())
    own.load_state_dict(state)
    batch = draw(9)
    given = (batch.dense_features, batch.sparse_features)
    model.eval()
    assert torch.allclose(model(*given), own(*given))
    fresh = dlrm(plain_tables())
    model.load_state_dict(saved(fresh.state_dict()))
    assert_same(weights_of(model), fresh.state_dict())
    assert torch.allclose(model(*given), fresh(*given))


def test_tables_go_to_files_and_start_from_them(kind, tmp_path, caplog) -> None:
    caplog.set_level("INFO", "distcache")
    ebc = cached(rows=200)
    model = dlrm(ebc)
    train(model, ebc, lookahead(batches(3), ebc))  # changed rows are in the cache alone
    ebc.export(tmp_path / "tables")
    ebc.export(tmp_path, "parquet", {"t0": np.array([3, 399])})
    want = {name.split(".")[-2]: value for name, value in weights_of(ebc).items()}
    rows = parquet.read_table(tmp_path / "t0.parquet")
    assert rows["id"].to_pylist() == [3, 399]
    assert rows["vector"].to_pylist() == want["t0"][[3, 399]].tolist()
    assert [path.name for path in tmp_path.glob("*.parquet")] == ["t0.parquet"]

    more = [*configs()[1:], replace(configs()[0], num_embeddings=500, feature_names=["f8"])]
    more.append(replace(configs()[2], name="t9", feature_names=["f9"]))
    grown = cached(tables=more, rows=400)
    drawn, stream = weights_of(grown), iter(lookahead(batches(3, tables=more), grown))
    grown(next(stream).sparse_features)  # its rows are cached
    grown.init_from(tmp_path / "tables", {"t3": "t3.weight"})
    found = {name.split(".")[-2]: value for name, value in weights_of(grown).items()}
    want["t0"] = torch.cat([want["t0"], drawn[f"{key_of_tables()}.t0.weight"][400:]])
    want["t9"] = drawn[f"{key_of_tables()}.t9.weight"]
    assert_same(found, {name: want[name] for name in found})
    assert "4 of 5 tables; grown: t0 (the first 400 of 500 rows); not stored: t9" in caplog.text
    batch = next(stream)
    ids, rows = batch.sparse_features["f2"].values(), grown(batch.sparse_features)["f2"]
    if kind == "sequences":  # the cache has the new rows
        assert torch.equal(rows.values(), want["t2"][ids])
    with pytest.raises(ConfigError, match="no table is named 't8'"):
        ebc.export(tmp_path, "parquet", {"t8": np.array([3])})
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        ebc.init_from(tmp_path)


def test_missing_unexpected_and_misshapen_tables_are_reported(kind) -> None:
    ebc = cached(rows=200)
    model = dlrm(ebc)
    train(model, ebc, lookahead(batches(3), ebc))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    where = "sparse_arch.embedding_bag_collection" if kind == "bags" else "ebc"
    prefix = f"{where}.{key_of_tables()}."
    part = dict(state)
    part[f"{prefix}t0.weight"] = torch.full((400, 8), 0.5)
    del part[f"{prefix}t1.weight"]
    part[f"{prefix}t9.weight"] = torch.zeros(1, 8)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*t1\.weight.*Unexpected.*t9\.weight"):
        model.load_state_dict(part)
    result = model.load_state_dict(part, strict=False)
    assert result.missing_keys == [f"{prefix}t1.weight"]
    assert result.unexpected_keys == [f"{prefix}t9.weight"]
    now = model.state_dict()
    assert torch.equal(now[f"{prefix}t1.weight"], state[f"{prefix}t1.weight"])
    assert (now[f"{prefix}t0.weight"] == 0.5).all()
    with pytest.raises(RuntimeError, match=r"size mismatch for .*t2\.weight"):
        model.load_state_dict({**state, f"{prefix}t2.weight": torch.zeros(8, 8)})


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("name", [*UPDATES, *MORE])
def test_stop_and_resume_is_exact(name) -> None:
    data = batches()

    def parts(rows: int):
        ebc = cached(name, rows=rows)
        return dlrm(ebc), ebc, torch.optim.lr_scheduler.ExponentialLR(ebc.optimizer, 0.9)

    def run(model, ebc, scheduler, chosen) -> None:
        dense = dense_optimizer(model)
        for batch in lookahead(chosen, ebc):
            train(model, ebc, [batch], dense)
            scheduler.step()

    def stateful(model, ebc, scheduler) -> tuple:
        return model, ebc.optimizer, scheduler

    whole = parts(200)
    run(*whole, data)
    first = parts(200)
    run(*first, data[:9])
    state = saved([part.state_dict() for part in stateful(*first)])
    second = parts(300)
    train(*second[:2], lookahead(batches(2), second[1]))  # to be overwritten
    for part, own in zip(stateful(*second), state, strict=True):
        part.load_state_dict(own)
    run(*second, data[9:])
    assert_same(weights_of(second[0]), weights_of(whole[0]))
    ends = [ebc.optimizer.state_dict() for _, ebc, _ in (second, whole)]
    assert ends[0]["param_groups"] == ends[1]["param_groups"]
    for table in ends[0]["state"]:
        assert_same(ends[0]["state"][table], ends[1]["state"][table])


@pytest.mark.usefixtures("kind")
def test_loading_in_the_middle_of_a_look_ahead() -> None:
    ebc = cached(rows=200)
    model = dlrm(ebc)
    start = weights_of(model)
    stream = iter(lookahead(batches(), ebc))
    dense = dense_optimizer(model)
    for _ in range(7):
        train(model, ebc, [next(stream)], dense)
    model.load_state_dict(start)
    ebc.optimizer.load_state_dict(cached(rows=200).optimizer.state_dict())
    train(model, ebc, stream, dense)
    other = cached(rows=200)
    plain = dlrm(other)
    train(plain, other, batches()[7:])
    assert_same(weights_of(model), weights_of(plain))
    batch = draw(1)
    plain(batch.dense_features, batch.sparse_features).sum().backward()
    with pytest.raises(PlanError, match="before loading"):
        plain.load_state_dict(start)


@pytest.mark.usefixtures("kind")
def test_optimizer_state_that_does_not_fit_is_refused() -> None:
    adam, adagrad = cached("adam", rows=200), cached("adagrad", rows=200)
    state = adam.optimizer.state_dict()
    assert set(state["state"]["t0"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["param_groups"][0]["params"] == ["t0", "t1", "t2", "t3"]
    with pytest.raises(ConfigError, match=r"t0.*exp_avg.*Adagrad keeps \{'sum': .*`step`"):
        adagrad.optimizer.load_state_dict(state)
    by_table = cached("by table", rows=200)
    with pytest.raises(ConfigError, match=r"1 param_groups, but this .* has 4: one for each"):
        by_table.optimizer.load_state_dict(state)
    own = saved(adagrad.optimizer.state_dict())
    own["state"]["t1"]["sum"] = torch.zeros(3, 8)
    with pytest.raises(ConfigError, match=r"'t1': .*\(3, 8\).* keeps .*\(60, 8\)"):
        adagrad.optimizer.load_state_dict(own)
    with pytest.raises(ConfigError, match=r"'t0': .* but Adagrad keeps .*, and `step`"):
        del own["state"]["t0"]["step"]
        adagrad.optimizer.load_state_dict(own)
    del own["state"]["t1"]
    with pytest.raises(ConfigError, match="optimizer state of tables"):
        adagrad.optimizer.load_state_dict(own)


@pytest.mark.usefixtures("kind")
def test_initial_rows_are_what_the_configs_ask_for() -> None:
    plain = weights_of(cached(seed=3))
    assert_same(weights_of(cached(seed=3)), plain)
    key = f"{key_of_tables()}.t0.weight"
    assert not torch.equal(weights_of(cached(seed=4))[key], plain[key])
    bound = 400**-0.5
    assert plain[key].min() >= -bound and plain[key].max() <= bound
    assert plain[key].std() == pytest.approx(bound / 3**0.5, rel=0.05)
    ranged = weights_of(cached(tables=configs(weight_init_min=1.0, weight_init_max=3.0)))[key]
    assert 1 <= ranged.min() < 1.1 and 2.9 < ranged.max() <= 3
    torch.manual_seed(1)
    before = torch.get_rng_state()
    normal = partial(torch.nn.init.normal_, mean=5.0)
    told = [weights_of(cached(tables=configs(init_fn=normal), seed=s)) for s in (1, 1, 2)]
    assert torch.equal(before, torch.get_rng_state())
    assert_same(told[0], told[1])
    assert not torch.equal(told[0][key], told[2][key])
    assert told[0][key].mean() == pytest.approx(5.0, abs=0.1)
