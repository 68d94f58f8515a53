"""The bits of 24 training runs as digests, made from one or two checkouts and compared.

    python tests/reference_digests.py OLD_CHECKOUT NEW_CHECKOUT
    python tests/reference_digests.py CHECKOUT --cases '*-adam'

A change that only moves code changes no digest: compare a checkout of the commit before it (`git
worktree add /tmp/old main`) with the working tree. Exit code 1 where a digest differs, a case
fails, or cases of one checkout differ that are one training: resident, in any placement, through
the trainer or the collection. The repository stores no digest, for they depend on processor and
libraries. Those of a checkout without changes are kept in the temporary folder by commit, until
this file changes.

A digest has three parts: the losses of all steps; tables and dense parameters at the end; these
with the optimizers' state. Caches are so small that rows come and go in every step. Only what users
call is used: `distcache.fit`, the collections with `lookahead`, `python -m distcache.train`, and
files as they leave them. One process of each checkout imports the package and forks the ranks.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import hashlib
import json
import logging
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.functional import binary_cross_entropy_with_logits

STEPS, SAMPLES, DENSE = 40, 50, 4  # 3 ranks do not share 50 samples evenly
CACHE = {"rows": 480, "lookahead": 4, "prefetch": 1}
LIMIT_S = 900  # for a checkout

# Tables by name: rows, width, pooling, features, the most ids of a bag (1: always one).
ONE_WIDTH = {
    "a": (3000, 8, "sum", ("a",), 3),
    "b": (1200, 8, "mean", ("b",), 2),
    "c": (400, 8, "sum", ("c", "d"), 1),
}
WEIGHTED = {
    "a": (3000, 8, "sum", ("a",), 3),
    "b": (1200, 4, "sum", ("b",), 2),
    "c": (400, 8, "sum", ("c",), 1),
}
RATES = {"sgd": 0.5, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.01}
ROWS = {"sgd": "SGD", "adagrad": "Adagrad", "rowwise_adagrad": "RowWiseAdagrad", "adam": "Adam"}


@dataclass(frozen=True)
class Case:
    """A run: `door(case, rank, folder)` gives its digest on rank 0 of `ranks`.

    `settings`: of the door, beside `CACHE`; `tables`: those named WEIGHTED have weights of ids;
    `counted`: there are statistics of the batches, so that the cache starts warm; `stop`: the run
    ends after so many steps, and another one goes on from what it left.
    """

    door: Callable[[Case, int, Path], str]
    ranks: int
    optimizer: str
    settings: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, tuple] = field(default_factory=lambda: ONE_WIDTH)
    counted: bool = False
    stop: int = 0

    @property
    def runs(self) -> list[tuple[int, int]]:
        """First and last step of each run."""
        return list(pairwise(sorted({0, self.stop, STEPS})))

    @property
    def features(self) -> dict[str, tuple]:
        """The table of each feature."""
        return {feature: table for table in self.tables.values() for feature in table[3]}


class Net(nn.Module):
    """Dense features and pooled rows `[b, sum of widths]` -> logits `[b]`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = sum(width for _, width, *_ in case.features.values())
        self.layers = nn.Sequential(nn.Linear(DENSE + width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.layers(torch.cat((dense, pooled), dim=1)).squeeze(1)


def batch_of(case: Case, rank: int, step: int) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """A rank's samples of a step: dense, (values, offsets[, weights]) by feature, labels."""
    draw = np.random.default_rng((7, step))
    own = np.array_split(np.arange(SAMPLES), case.ranks)[rank]
    dense = draw.standard_normal((SAMPLES, DENSE), np.float32)
    score, lengths, values, weights = dense[:, 0].copy(), [], [], []
    for rows, *_, most in case.features.values():
        bags = draw.integers(most == 1, most + 1, SAMPLES)
        # Some rows are named often and most seldom; the prime scatters them over the table.
        ids = (draw.random(bags.sum()) ** 3 * rows).astype(np.int64) * 7919 % rows
        weight, sample = draw.random(len(ids), np.float32), np.repeat(np.arange(SAMPLES), bags)
        np.add.at(score, sample, (ids % 7 - 3) / np.float32(3))
        mine = np.isin(sample, own)
        lengths.append(bags[own])
        values.append(ids[mine])
        weights.append(weight[mine])
    labels = (score + draw.standard_normal(SAMPLES) > 0).astype(np.float32)
    ids = [np.concatenate(values), np.cumsum(np.concatenate(([0], *lengths)))]
    ids += [np.concatenate(weights)] if case.tables is WEIGHTED else []
    return torch.tensor(dense[own]), tuple(map(torch.tensor, ids)), torch.tensor(labels[own])


def write_counts(case: Case, folder: Path) -> str:
    """How often each row is looked up, as `distcache.analyze` leaves it; tables of one feature."""
    (folder / "counts").mkdir(parents=True)
    counts = {name: np.zeros(rows, np.int64) for name, (rows, *_) in case.tables.items()}
    for rank in range(case.ranks):
        for step in range(STEPS):
            _, (values, offsets, *_), labels = batch_of(case, rank, step)
            ends = pairwise(offsets[:: len(labels)].tolist())
            for count, (start, end) in zip(counts.values(), ends, strict=True):
                np.add.at(count, values[start:end].numpy(), 1)
    tables = []
    for index, (name, count) in enumerate(counts.items()):
        np.save(folder / f"counts/{index}.npy", count)
        seen = {"lookups": int(count.sum()), "distinct": int((count > 0).sum())}
        tables.append({"feature": name, "rows": len(count), "error": 0, "sparse": False, **seen})
    about = {"format": 1, "vocabulary": "ids", "samples": STEPS * SAMPLES, "share": 1.0}
    (folder / "statistics.json").write_text(json.dumps({**about, "tables": tables}))
    return str(folder)


def in_parts(losses: str, weights: str, state: dict[str, Any]) -> str:
    """The three parts; of `state` all tensors but numbers, which only count steps."""
    sha = hashlib.sha256()
    for name, value in sorted(state.items()):
        if isinstance(value, Tensor) and value.dim():
            sha.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            sha.update(value.contiguous().numpy().data)
    return " ".join(part[:10] for part in (losses, weights, sha.hexdigest()))


def of_run(folder: Path) -> str:
    """The digest of a run folder with `summary.json` and a checkpoint at its end."""
    summary = json.loads((folder / "summary.json").read_text())
    saved = max(folder.glob("checkpoints/step_*"), default=folder / "model")
    dcp_to_torch_save(saved, folder / "model.pt")
    state = torch.load(folder / "model.pt", weights_only=False)
    state = {name: value for name, value in state.items() if name.startswith(("tables", "dense"))}
    return in_parts(summary["loss_digest"], summary["state_digest"], state)


def of_loop(case: Case, losses: list[float], rows: dict, kept: dict, net: dict, dense: dict) -> str:
    """The same of a loop: this rank's losses, and the states of collection, its optimizer, dense
    part, its optimizer."""
    ranks: list[Any] = [losses] * case.ranks
    if case.ranks > 1:
        dist.all_gather_object(ranks, losses)
    chain, sha = b"", hashlib.sha256()
    for own in zip(*ranks, strict=True):
        chain = hashlib.sha256(chain + struct.pack("<d", sum(own))).digest()
    for value in (*rows.values(), *net.values()):
        sha.update(value.contiguous().numpy().data)
    state = {f"tables.{name.partition('.')[2]}": value for name, value in rows.items()}
    state |= {f"dense.{name}": value for name, value in net.items()}
    optimized = {f"tables.{table}": parts for table, parts in kept["state"].items()}
    optimized |= {f"dense_optim.{n}": dense["state"].get(i, {}) for i, n in enumerate(net)}
    for owner, parts in optimized.items():
        state |= {f"{owner}.{name}": value for name, value in parts.items()}
    return in_parts(chain.hex(), sha.hexdigest(), state)


def trainer(case: Case, rank: int, folder: Path) -> str:
    """`distcache.fit`; of the settings, `parallel` is its argument."""
    import distcache

    specs = [
        distcache.TableSpec(name, rows=rows, dim=dim, features=features, pooling=pooling)
        for name, (rows, dim, pooling, features, _) in case.tables.items()
    ]
    given = {f"cache.{key}": value for key, value in CACHE.items()} | case.settings
    parallel, rate = given.pop("parallel", "data"), RATES[case.optimizer]
    given |= {"optim.dense_lr": rate, "optim.embedding_lr": rate, "run.digest": "true"}
    given |= {"trainer.device": "cpu", "trainer.timeout_s": 60}
    if case.counted:
        given["cache.statistics"] = write_counts(case, folder / f"{rank}")
    batches = [batch_of(case, rank, step) for step in range(STEPS)]
    for first, last in case.runs:
        given |= {"trainer.steps": last, "run.dir": str(folder / f"to-{last}")}
        given |= {"trainer.resume": str(folder / f"to-{first}")} if first else {}
        how = {"parallel": parallel, "optimizer": case.optimizer, "settings": given}
        distcache.fit(batches, specs, Net(case), **how)
    return of_run(folder / f"to-{STEPS}") if rank == 0 else ""


def command(case: Case, rank: int, folder: Path) -> str:
    """`distcache.train` under torchrun on its own click stream, started by one process."""
    keys = {f"cache.{key}": value for key, value in CACHE.items()} | case.settings
    keys |= {"optim": case.optimizer, "optim.embedding_lr": RATES[case.optimizer]}
    keys |= {"trainer.steps": STEPS, "trainer.device": "cpu", "run.dir": folder / "run"}
    line = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    line += ["-m", "distcache.train", *(f"{key}={value}" for key, value in keys.items())]
    job = subprocess.run([sys.executable, *line], capture_output=True, text=True, timeout=120)
    if job.returncode:
        raise RuntimeError(job.stdout[-300:] + job.stderr[-300:])
    return of_run(folder / "run")


class Model(nn.Module):
    """A collection and the network behind it; of sequences, a bag is the sum of its rows."""

    def __init__(self, tables: nn.Module, net: Net) -> None:
        super().__init__()
        self.tables, self.net = tables, net

    def forward(self, dense: Tensor, ids: Any) -> Tensor:
        found = self.tables(ids)
        if not isinstance(found, dict):
            return self.net(dense, found.values())
        found = [(rows.values(), rows.lengths()) for rows in found.values()]
        bags = [torch.segment_reduce(rows, "sum", lengths=lengths) for rows, lengths in found]
        return self.net(dense, torch.cat(bags, dim=1))


def collection(case: Case, rank: int, folder: Path, kind: str = "bags") -> str:
    """A user's loop: `bags` and the dense gradients summed over ranks, or their means with `ddp`;
    `sequences` with two batches a step."""
    losses, state = [], []
    for first, last in case.runs:
        net, tables = Net(case), make_tables(case, rank, folder, kind)
        name = ROWS[case.optimizer].removeprefix("RowWise")
        eps = {"eps": 1e-8} if name == "Adagrad" else {}
        rate = RATES[case.optimizer]
        dense = getattr(torch.optim, name)(net.parameters(), lr=rate, foreach=False, **eps)
        parts = (tables, tables.optimizer, net, dense)
        for part, values in zip(parts, state, strict=False):
            part.load_state_dict(values)
        losses += train(case, rank, kind, parts, range(first, last))
        state = copy.deepcopy([part.state_dict() for part in parts])
        tables.close()
    return of_loop(case, losses, *state)


def make_tables(case: Case, rank: int, folder: Path, kind: str) -> Any:
    """The case's tables as a cached collection."""
    from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType

    import distcache

    how = CACHE | {"timeout_s": 60, "seed": 0} | case.settings
    how["optimizer"] = getattr(distcache.optim, ROWS[case.optimizer])(lr=RATES[case.optimizer])
    if case.counted:
        how["statistics"] = write_counts(case, folder / f"{rank}")
    configs = []
    for name, (rows, dim, pooling, features, _) in case.tables.items():
        of_bags = {} if kind == "sequences" else {"pooling": PoolingType[pooling.upper()]}
        make = EmbeddingConfig if kind == "sequences" else EmbeddingBagConfig
        about = {"num_embeddings": rows, "embedding_dim": dim, "feature_names": list(features)}
        configs.append(make(name=name, **about, **of_bags))
    if kind == "sequences":
        return distcache.CachedEmbeddingCollection(configs, "cpu", **how)
    weighted = case.tables is WEIGHTED
    return distcache.CachedEmbeddingBagCollection(configs, weighted, "cpu", **how)


def train(case: Case, rank: int, kind: str, parts: tuple, steps: range) -> list[float]:
    """Some batches of a loop over a collection, its optimizer, a network and that one's; this
    rank's losses."""
    from torchrec import KeyedJaggedTensor

    import distcache

    tables, _, net, dense = parts

    def batches() -> Iterator[tuple]:
        for step in steps:
            floats, (values, offsets, *weights), labels = batch_of(case, rank, step)
            ids = KeyedJaggedTensor(list(case.features), values, *weights, offsets=offsets)
            yield floats, ids, labels

    model: nn.Module = Model(tables, net)
    model = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
    losses, accumulate = [], 2 if kind == "sequences" else 1
    ahead = distcache.lookahead(batches(), tables, accumulate=accumulate)
    for number, (floats, ids, labels) in enumerate(ahead, start=1):
        total = binary_cross_entropy_with_logits(model(floats, ids), labels, reduction="sum")
        loss = total / (len(labels) if kind == "ddp" else SAMPLES) / accumulate
        loss.backward()
        losses.append(loss.item())
        if number % accumulate:
            continue
        if kind != "ddp" and case.ranks > 1:  # as the trainer: one buffer for all gradients
            flat = nn.utils.parameters_to_vector(p.grad for p in net.parameters())
            dist.all_reduce(flat)
            sums = flat.split([parameter.numel() for parameter in net.parameters()])
            for parameter, own in zip(net.parameters(), sums, strict=True):
                parameter.grad.copy_(own.view_as(parameter))
        tables.step()
        dense.step()
        dense.zero_grad()
    return losses


SUM = {"gradient_reduction": "sum"}
HOT = {"cache.placement": "mixed", "cache.replicated_rows": {"a": 60, "b": 30, "c": 40}}
TRAINER = {
    "resident": {"parallel": "resident"},
    "replicated": {"cache.placement": "replicated"},
    "sharded": {"cache.placement": "sharded"},
}
COLLECTION = {"collection": SUM}  # in other placements: SUM | {"placement": "sharded"}
CASES = {
    f"{kind}-{name}": Case(trainer if kind in TRAINER else collection, 2, name, settings)
    for name in RATES
    for kind, settings in (TRAINER | COLLECTION).items()
}
ONE_TRAINING = set(CASES)
"""Those of one optimizer have one digest; a case that an older checkout cannot run is new."""
CASES |= {
    f"mixed-home-{name}": Case(trainer, 3, name, HOT | {"cache.state": "home"}, WEIGHTED, True)
    for name in ("adagrad", "adam")
}
CASES |= {
    "warm": Case(
        trainer, 2, "adam", {"cache.placement": "sharded", "cache.warm_start": 1.0}, WEIGHTED, True
    ),
    "collection-warm": Case(
        collection, 1, "rowwise_adagrad", SUM | {"warm_start": 1.0}, WEIGHTED, True
    ),
    "resumed": Case(trainer, 2, "adagrad", {}, WEIGHTED, stop=17),
    "collection-resumed": Case(partial(collection, kind="ddp"), 2, "adam", {}, WEIGHTED, stop=17),
    "sequences": Case(partial(collection, kind="sequences"), 2, "adagrad", SUM),
    "command": Case(
        command, 2, "adagrad", {"cache.placement": "sharded", "data.global_batch_size": SAMPLES}
        | {"data.table_rows": [3000, 1200, 400], "data.bag_size": [3, 1.5, 1]}
        | {"model.embedding_dim": 8, "model.dense_arch": [16, 8], "model.over_arch": [16, 1]}
        | {"trainer.eval_steps": 3, "trainer.eval_every": 15},
    ),
}  # fmt: skip


def run_cases(rank: int, names: list[str], ranks: int, folder: Path) -> None:
    """Cases of one number of ranks, in order; rank 0 leaves a file for each."""
    torch.set_num_threads(1)
    if ranks > 1:
        meet = (folder / f"ranks-{ranks}").as_uri()
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        try:
            found = CASES[name].door(CASES[name], rank, folder / name)
        except Exception as error:  # raised by all ranks together, so the next case can run
            found = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if rank == 0:
            (folder / f"{name}.txt").write_text(found)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def make(names: list[str]) -> None:
    """In a checkout's own process and folder: print the digests as JSON."""
    import distcache

    if not Path(distcache.__file__).is_relative_to(Path.cwd()):
        raise SystemExit(f"{distcache.__file__} is not of the checkout {Path.cwd()}")
    _ = distcache.fit, distcache.CachedEmbeddingBagCollection  # imported before the ranks fork
    logging.disable(logging.WARNING)
    jobs: dict[int, list[str]] = {}
    for name in names:
        jobs.setdefault(1 if CASES[name].door is command else CASES[name].ranks, []).append(name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for ranks, own in jobs.items():
            try:
                mp.start_processes(run_cases, (own, ranks, folder), ranks, start_method="fork")
            except Exception as error:
                print(error, file=sys.stderr)
        print(json.dumps({file.stem: file.read_text() for file in folder.glob("*.txt")}))


def digests(checkout: Path, names: list[str]) -> dict[str, str]:
    """Digests of a checkout, made or kept; what went wrong in place of one has a colon."""

    def git(*words: str) -> str:
        line = ["git", "-C", str(checkout), *words]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()

    versions = f"{sys.version} {torch.__version__} {np.__version__}"
    maker = hashlib.sha256(Path(__file__).read_bytes() + versions.encode()).hexdigest()[:12]
    kept = Path(tempfile.gettempdir()) / f"distcache-digests-{git('rev-parse', 'HEAD')}-{maker}"
    clean = not git("status", "--porcelain")
    known = json.loads(kept.read_text()) if clean and kept.exists() else {}
    missing = [name for name in names if name not in known]
    if missing:
        line = [sys.executable, "-P", str(Path(__file__).resolve()), "--make", *missing]
        own = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        how = {"cwd": checkout, "env": own, "timeout": LIMIT_S, "check": True}
        made = subprocess.run(line, stdout=subprocess.PIPE, **how).stdout
        known |= json.loads(made.splitlines()[-1])
        if clean:
            good = {name: digest for name, digest in known.items() if ":" not in digest}
            kept.write_text(json.dumps(good))
    return {name: known.get(name, "none: its ranks died") for name in names}


def main() -> int:
    """Print a table; 1 where something is not as it must be."""
    if sys.argv[1:2] == ["--make"]:
        make(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--cases", default="*", help="a pattern of names")
    chosen = parser.parse_args()
    names = fnmatch.filter(CASES, chosen.cases)
    found = [digests(path.resolve(), names) for path in chosen.checkouts]
    wrong = []
    for name in names:
        several = [own[name] for own in found]
        word = "same" if len(set(several)) == 1 else "NO"
        if name in ONE_TRAINING and ":" in several[0] and ":" not in several[-1]:
            word = "new"
        word = "NO" if ":" in several[-1] else word
        wrong += [name] if word == "NO" else []
        print(f"{name:27}", *(f"{digest:34}" for digest in several), word)
    for own, path in zip(found, chosen.checkouts, strict=True):
        for optimizer in RATES:
            alike = [n for n in ONE_TRAINING & set(names) if CASES[n].optimizer == optimizer]
            if len({own[name] for name in alike if ":" not in own[name]}) > 1:
                wrong += alike
                print(f"{path}: {', '.join(sorted(alike))} are one training and differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
