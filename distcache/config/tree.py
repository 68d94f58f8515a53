"""The typed config tree: one dataclass per Hydra group, a docstring and a unit per field.

Only the trainer and the entry points see these; everything below takes plain arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from distcache.config import choice, least, only_of, ruled
from distcache.planner.victims import POLICIES, RESIDENT, TAILS


@dataclass
class ModelConfig:
    """Group `model`: the dense network behind the embedding tables."""

    name: str = choice("dlrm", "dcn_v2", default=MISSING)
    embedding_dim: int = least(1, 16)
    """Width D of every embedding table, in elements; a multiple of 4 for `hybrid`."""
    table_dims: list[int] | None = only_of(None, "dcn_v2")
    """Width of each table, in elements; null: `embedding_dim` for all (`dcn_v2` only)."""
    pooling: str = choice("sum", "mean")
    """How a bag's rows become one vector."""
    dense_arch: list[int] = MISSING
    """Layer sizes of the bottom MLP over dense features; `dlrm` ends in `embedding_dim`."""
    over_arch: list[int] = MISSING
    """Layer sizes of the top MLP; ends in 1 (the logit)."""
    cross_layers: int = least(1, 3)
    """`dcn_v2`: number of cross layers."""
    cross_rank: int = least(1, 512)
    """`dcn_v2`: rank of each cross layer's factorised weight."""


@dataclass
class DataConfig:
    """Group `data`: where batches come from."""

    name: str = choice("synthetic", "criteo", "parquet", "interactions", default=MISSING)
    global_batch_size: int = least(1, 2048)
    """Samples of one step over all ranks (B)."""
    table_rows: list[int] = MISSING
    """Rows of each table; one categorical feature per table. Criteo: empty for what the folder
    says, or for Criteo Kaggle's where `path` is text. Interactions: may be empty."""
    dense_features: int = least(1, 13)
    """Synthetic, Criteo: number of dense (float) features of a sample."""
    batching: str = choice("as_is", "hot_cold")
    """`as_is`; `hot_cold`: samples of hot rows alone in batches of their own, which move no rows;
    needs `cache.statistics`."""
    hot_rows: Any = only_of("auto", "hot_cold", by="batching")
    """`hot_cold`: rows that stay cached, over all tables: a number, a share of all rows in
    (0, 1), or `auto`: as many of the most frequent as the slots hold beside a few cold batches."""
    phase_rate: Any = only_of(0.5, "hot_cold", by="batching", share="(0, 1]")
    """`hot_cold`: the share of an epoch's hot batches, then of its cold ones, that makes a phase at
    first, in (0, 1]; the held-out loss halves or doubles it."""
    on_bad_id: str = choice("error", "hash")
    """An id outside its table: `error`, or `hash` (taken modulo the table's rows)."""
    bag_size: Any = only_of(1, "synthetic")
    """Synthetic: ids per bag. An int is fixed, a float is a mean; a list gives one per table."""
    zipf: float = least(0, 1.05)
    """Synthetic: Zipf exponent of the ids (0 is uniform)."""
    weighted: bool = only_of(False, "synthetic")
    """Synthetic: draw a weight per id (sum pooling only)."""
    samples: int | None = only_of(None, "synthetic", least=1)
    """Synthetic: samples of an epoch; null: unlimited, never repeating."""
    path: str | None = only_of(None, "criteo", "parquet", "interactions")
    """Criteo, Parquet, interactions: a file, or a glob of files; Criteo lines may be gzip, and a
    folder that distcache.preprocess made takes their place."""
    on_bad_line: str = choice("error", "skip")
    """Criteo, interactions: a malformed line: `error`, or `skip` with a count."""
    shuffle: bool = only_of(True, "parquet", "criteo")
    """Criteo, Parquet: training samples in an order of (seed, epoch); false: in their own."""
    shuffle_block: int = only_of(4096, "criteo", least=1)
    """Criteo: consecutive samples that stay together when shuffled; 256 such blocks are mixed."""
    held_out: Any = only_of(None, "parquet", "interactions", share="[0, 1)")
    """Parquet, interactions by time: share of the samples, the last ones, for evaluation; null: a
    seventh."""
    label_column: str | None = only_of(None, "parquet")
    """Parquet: the column of labels, 0 or 1."""
    dense_columns: list[str] = only_of([], "parquet")
    """Parquet: columns of dense features; none: one feature, the constant 1."""
    id_columns: list[str] = only_of([], "parquet")
    """Parquet: columns of ids, one feature and table each; list columns are bags."""
    weight_columns: Any = only_of(None, "parquet")
    """Parquet: {id column: column with a weight for each of its ids}; sum pooling only."""
    held_out_path: str | None = only_of(None, "parquet")
    """Parquet: files for evaluation, instead of a share of `path`."""
    verify: bool = only_of(False, "parquet")
    """Parquet: read all files at the start and compare them with what they were when this key was
    first given for the run folder, or the one that is resumed (its `data_files.json`)."""
    string_ids: str = only_of("hash", "parquet", choice=("hash", "hex"))
    """Parquet: strings as ids: `hash` (BLAKE2b-64 modulo the table's rows) or `hex` (their
    hexadecimal value modulo the table's rows)."""
    nulls: str = only_of("error", "parquet", choice=("error", "zero", "empty"))
    """Parquet: a missing value: `error`; `zero` (dense value 0, id row 0, list an empty bag); or
    `empty` (the same, but a missing id leaves its bag)."""
    dense_transform: str = only_of("none", "parquet", choice=("none", "log1p"))
    """Parquet: dense values as they are (`none`) or as log(1 + max(x, 0)) (`log1p`)."""
    shuffle_rows: int = only_of(1 << 20, "parquet", least=1)
    """Parquet: samples shuffled together, in whole row groups, which a rank keeps decoded."""
    format: str = only_of("auto", "interactions", choice=("auto", "lines", "csv"))
    """Interactions: `lines` (user item item ...), `csv` (columns user, item, rating, time; the last
    two may be absent), or `auto`: csv for names ending in .csv, .tsv, .data or .inter."""
    delimiter: str = only_of("auto", "interactions")
    """Interactions: the text that separates columns, `tab`, `space`, or `auto` (that of line 1)."""
    min_rating: float | None = only_of(None, "interactions")
    """Interactions: lower ratings are left out; null: all are positives."""
    negatives: int = only_of(4, "interactions", least=1)
    """Interactions: sampled negatives per positive."""
    negative_sampling: str = only_of("uniform", "interactions", choice=("uniform", "popularity"))
    """Interactions: items as negatives: all alike (`uniform`), or by `popularity`."""
    held_out_by: str = only_of("last", "interactions", choice=("last", "time"))
    """Interactions: held out is each user's `last` one, or by `time` the latest share of all."""


@dataclass
class CacheConfig:
    """Group `cache`: slots on the device, and how far the planner looks ahead."""

    rows: int | None = least(1, None)
    """Slots per rank (C). At most one of rows, ratio, bytes; none means, for each width of
    table, 1.5 % of its rows, as many of them as take 32 MiB where that is more, or 1.2 times those
    that P + 2 steps are expected to name where that is known."""
    ratio: Any = ruled(None, share="(0, 1]")
    """Slots per rank as a share of each group's rows, in (0, 1] or such as 15%."""
    bytes: Any = ruled(None, size=1)
    """Device bytes per rank for rows and their optimizer state, such as 2GB or 512MiB."""
    lookahead: Any = ruled("auto", counted=0)
    """L: steps known beyond the step being decided; `auto`: the largest of 8, 16, 32 and 64 whose
    ids (8 bytes each, of L + P + 1 steps of a rank) take at most 64 MiB, or what memory holds."""
    prefetch: Any = ruled("auto", counted=0)
    """P: steps that movement may run ahead of training; `auto`: 1, or 0 where the slots are too
    few for the rows of two steps."""
    policy: str = choice(*POLICIES)
    """Which rows leave first: `lookahead` (window-Belady, then `tail`); or, whatever the window,
    by `lfu`, `lru`, `frequency` (in the statistics), `static` (the hottest stay)."""
    tail: str = choice(*TAILS, default="lfu")
    """`lookahead`: order of the rows without a use in the window: `lru`, `lfu` or `frequency`."""
    half_life: Any = "auto"
    """`lfu`: steps in which counts lose half of their weight; `auto`: from slots and rows used."""
    resident: str = choice(*RESIDENT)
    """Tables that stay on the device once their rows have come: `auto`, the smallest, as long as
    they take at most an eighth of the slots, or all where each row has a slot; or `none`."""
    statistics: str | None = None
    """Folder of distcache.analyze or distcache.preprocess: how often rows are looked up."""
    warm_start: Any = ruled("auto", share="[0, 1]")
    """Share of the slots, 0 to 1, filled with the most frequent rows before step 0; `auto`: half
    of them where there are statistics (all where rows are pinned), else none."""
    split: Any = "proportional"
    """Slots over groups of tables: `proportional` to their rows, `by_curve` for the fewest expected
    fetches (with statistics), or {table: rows}, the rows of each table to be cached first."""
    placement: str = choice("replicated", "sharded", "mixed", "auto")
    """How cached rows lie over ranks: `replicated` (all on every rank), `sharded` (each on its home
    alone), `mixed` (the most frequent replicated, the others sharded), or `auto`, by prediction."""
    replicated_rows: Any = only_of(None, "mixed", by="placement")
    """`mixed`: {table: K}, each table's K most frequent rows are replicated, none of the others."""
    replicated_share: Any = only_of(None, "mixed", by="placement", share="(0, 1)")
    """`mixed`: the share of all rows, in (0, 1), most frequent first, that is replicated."""
    objective: str = choice("time", "bytes")
    """`auto`: what the placement makes smallest: step `time`, or `bytes` that ranks exchange."""
    cluster: str | None = only_of(None, "auto", "mixed", by="placement")
    """`auto`: the `cluster.json` of distcache.plan, instead of links and row times measured at the
    start."""
    state: str = choice("auto", "home", "replicated")
    """Optimizer state of replicated rows: on every rank (`replicated`), or on each row's `home`,
    which then updates the row and returns it. `auto`: at home where it has a float or more for
    each element of a row (Adagrad, Adam), unless `reduction` is `native`."""
    reduction: str = choice("ordered", "native")
    """Row-gradient sum: `ordered` (same bits whatever the buffer) or `native` (the library's)."""


@dataclass
class StoreConfig:
    """Group `store`: where whole tables live."""

    name: str = choice("memory")
    """`memory`: anonymous shared host memory, one store per node."""
    access: str = choice("staged", "zero_copy")
    """How rows come to the device and back: `staged` (host threads gather them into pinned buffers,
    which are copied) or `zero_copy` (the device reads and writes them in host memory, which is
    locked for that; needs Triton on a GPU). For the modes `data` and `host`."""


@dataclass
class ParallelConfig:
    """Group `parallel`: the layout of tables and gradients over ranks."""

    mode: str = choice("data", "hybrid", "resident", "host", default=MISSING)
    sharding: str = choice("auto", "table_wise", "row_wise", "column_wise")
    """`hybrid`; `auto`: by TorchRec's planner."""


OPTIMIZERS = (
    *("sgd", "momentum_sgd", "adagrad", "rowwise_adagrad"),
    *("adam", "adamw", "partial_rowwise_adam", "counted_adam", "ftrl"),
)
"""The names in `distcache.optim`."""


@dataclass
class OptimConfig:
    """Group `optim`: the same values in every mode, whatever a library's default."""

    name: str = choice(*OPTIMIZERS, default=MISSING)
    dense_lr: float = least(0, 0.1)
    """Learning rate of the dense parameters."""
    embedding_lr: float = least(0, 0.1)
    """Learning rate of the embedding rows."""
    eps: float = least(0, 1e-8)
    """Added to the denominator (Adagrad, row-wise Adagrad, Adam)."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Adam's decay rates."""
    initial_accumulator: float | None = least(0, None)
    """Initial value of the sum of squares of Adagrad (null: 0) and FTRL (0.1)."""
    weight_decay: float | None = only_of(None, *OPTIMIZERS[:-1], least=0)
    """Decay of the dense weights, and of rows once in each step that names them; null: 0.01 for
    `adamw`, else 0."""
    decoupled_weight_decay: bool | None = only_of(None, *OPTIMIZERS[:-1])
    """Weights decay beside the gradient, by rate x `weight_decay`, instead of within it (L2); null:
    for `adamw`."""
    momentum: Any = only_of(0.9, "momentum_sgd", share="[0, 1)")
    """What is kept of a momentum in a step."""
    l1: float = only_of(0.0, "ftrl", least=0)
    """Sums of gradients (`linear`) below it give weights of 0."""
    l2: float = only_of(0.0, "ftrl", least=0)
    """Pulls weights to 0, in the denominator."""
    lr_power: float = only_of(-0.5, "ftrl")
    """Exponent of the fall of rates as squares add up, from -1 on, below 0."""
    warmup_steps: int = least(0, 0)
    """Steps of linear warm-up from 0 to the full rate."""
    decay_start: int = least(0, 0)
    """Step at which polynomial (quadratic) decay starts."""
    decay_steps: int = least(0, 0)
    """Steps of decay to 0; 0: no decay."""


@dataclass
class TrainerConfig:
    """Group `trainer`: how long, on what, and how it is watched."""

    steps: int | None = least(1, None)
    """Training steps; null: one epoch."""
    seed: int = least(0, 0)
    """Seed of initial weights and sample order."""
    backend: str = choice("auto", "gloo", "nccl")
    """torch.distributed backend of the device group."""
    device: str = choice("auto", "cpu", "cuda")
    dtype: str = choice("float32", "float64")
    """Weights, rows and optimizer state: `float32`; `float64` for checks."""
    amp: str = choice("off", "bf16")
    """`bf16`: the dense part computes in bfloat16 under torch.autocast; rows, gradients, optimizer
    state and the loss stay in `dtype`. `off`: all in `dtype`."""
    tf32: bool = False
    """CUDA: let float32 products of the dense part be taken in TF32 (10 bits of mantissa)."""
    cuda_graph: str = choice("auto", "true", "false")
    """CUDA: replay the dense part's forward and backward from a graph, which takes one launch, in
    steps of the shape that was recorded; `true`, `false`, or `auto`: the models of `model.name`,
    not one of your own, which may do in Python what a graph leaves out. All modes but `hybrid`."""
    eval_every: int | None = least(1, None)
    """Training steps between evaluations; null: only at the end."""
    eval_steps: Any = ruled(0, all_or=0)
    """Global batches of one evaluation: `all` held-out ones, or at most so many; 0: none."""
    log_every: int = least(1, 100)
    """Training steps between lines of `metrics.jsonl`, one of which may be a log line."""
    log_seconds: float = least(0, 10.0)
    """Least seconds between log lines of steps (0: a log line for each line of `metrics.jsonl`);
    the first and the last step always have one."""
    log_level: str = "INFO"
    """Level of the `distcache` logger; with `DEBUG` a line of stage times follows each log line."""
    threads: Any = ruled("auto", counted=1)
    """Threads of a rank's torch operations; `auto`: OMP_NUM_THREADS if set (not by torchrun, to 1),
    else 1 with GPUs and the rank's share of the cores without."""
    planner_threads: Any = ruled("auto", counted=1)
    """Threads of a rank that plan steps, whose plans are the same for any number; `auto`: with GPUs
    the rank's share of the cores, at most 8, else 1."""
    timeout_s: float = 300.0
    """Seconds that a wait on other ranks may last."""
    resume: str = "auto"
    """`auto`: go on from the newest whole checkpoint of `run.dir`, if it has one; `never`; or the
    run folder, or one of its `checkpoints/`, to go on from."""
    init_from: str | None = None
    """A run folder, a checkpoint, or a folder of `*.safetensors`: tables and dense parameters start
    from its values of the same names (docs/checkpoints.md). A run that resumes does not read it."""
    init_names: Any = None
    """What tables are called in `init_from`, `{table: name}`, where that is another name."""
    checkpoint_every: Any = "30min"
    """Steps (`1000`) or time (`90s`, `30min`, `2h`) from checkpoint to checkpoint; `end`: one at
    the end alone. None with `run.save=false`."""
    checkpoint_whole_every: int = least(1, 1)
    """Of so many checkpoints one is whole (1: each); the others have of tables the rows alone that
    changed since that one, and are read with it."""
    keep_checkpoints: int = least(1, 3)
    """How many of the newest checkpoints are kept, beside the whole ones on which these rest."""
    keep_best: str = choice("none", "eval_auc", "eval_logloss", "eval_ne")
    """The metric by which the best checkpoint is kept too; one is written at each evaluation that
    is better than all before."""
    schedule: str = choice("overlapped", "serial")
    """`overlapped`: rows move beside the steps before; `serial`: one stage after the other."""
    trace: bool = False
    """Write all ranks' stages on one clock to `trace.json` in the run folder, for Perfetto."""
    resume_data: str = choice("same", "any")
    """Data of a resumed run: the `same` as before, or `any` (at the same step of them)."""
    validate_plans: bool = False
    """Check every law on every plan (debug; slow)."""


@dataclass
class RunConfig:
    """Group-less section `run`: the run folder and what is left in it."""

    dir: str = "runs/${now:%Y-%m-%d_%H-%M-%S}-${parallel.mode}"
    """The run folder; a relative path starts at the working directory."""
    overwrite: bool = False
    """Remove the run that `run.dir` holds already, and begin anew."""
    save: bool = True
    """Write checkpoints (always on Ctrl-C and on a non-finite loss)."""
    digest: str = choice("auto", "true", "false")
    """SHA-256 over the final state: `true`, `false`, or `auto` (tables of at most 4 GiB)."""
    sweep_ranks: int = least(1, 1)
    """Ranks of each job of a `--multirun` sweep, all on this machine."""


@dataclass
class Config:
    """The whole tree."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    run: RunConfig = field(default_factory=RunConfig)
