"""Every value of the config tree, checked before any rank starts: key, value and way out."""

from __future__ import annotations

import glob
import logging
import math
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from decimal import Decimal
from numbers import Integral
from pathlib import Path
from typing import Any

from distcache.config.keys import element_type, type_words
from distcache.config.tree import (
    CacheConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
)
from distcache.errors import ConfigError, unknown_value
from distcache.layout import MOST_ROWS
from distcache.planner.victims import Policy
from distcache.versions import require_hybrid

Refusals = dict[str, object]
"""What is told of a value, with key, value and way out: whether it is so."""


def refuse(found: Refusals) -> None:
    """Raise ConfigError for the first of what is told that is so."""
    for text, wrong in found.items():
        refuse_if(wrong, text)


def refuse_if(wrong: object, text: str) -> None:
    """Raise ConfigError with `text` for what is `wrong`."""
    if wrong:
        raise ConfigError(text)


# -----------------------------------------------------------------------------
# Rules of one value, of which most stand beside its field in the tree.

CRITEO_TABLES, CRITEO_DENSE = 26, 13

_ENDS = {"(0": "above 0", "[0": "at least 0", "1)": "below 1", "1]": "at most 1"}


def as_words(config: Config) -> Config:
    """Return `config` with the words that YAML and Python take for booleans, and with numbers for
    sizes with units, in place."""
    for section in fields(config):
        read_units(section.name, getattr(config, section.name))
    for section, key in ((config.run, "digest"), (config.trainer, "cuda_graph")):
        setattr(section, key, getattr(section, key).lower())  # a bool arrives as "True"
    if config.trainer.amp == "False":  # what YAML makes of an unquoted off
        config.trainer.amp = "off"
    return config


def check_values(config: Config, but: Collection[str] = ()) -> None:
    """Raise ConfigError for the first value outside the rule of its field, `but` for these keys."""
    for section in fields(config):
        check_section(section.name, getattr(config, section.name), but)


def check_section(name: str, section: Any, but: Collection[str] = ()) -> None:
    """`check_values` of one section of the tree, or of a command's own keys, which have no name."""
    kinds = typing.get_type_hints(type(section))
    for own in fields(section):
        key, value = f"{name}.{own.name}".lstrip("."), getattr(section, own.name)
        _check_type(key, value, kinds[own.name])
        rule = own.metadata
        default = own.default if own.default_factory is MISSING else own.default_factory()
        if key in but:
            continue
        for kind, test in _RULES.items():
            if kind in rule and value != default:
                test(key, value, rule[kind])
        if "only" in rule and value != default:
            by = name if rule["by"] == "name" else f"{name}.{rule['by']}".lstrip(".")
            _of_another(key, value, by, getattr(section, rule["by"]), rule["only"])


_INT64 = 1 << 63


def _check_type(key: str, value: Any, kind: Any) -> None:
    """Raise ConfigError for a list in which an element has another type than `kind` says, which
    OmegaConf takes where it is a list itself, and for whole numbers of more than 64 bits."""
    numbers = value if isinstance(value, list) else [value]
    large = [one for one in numbers if isinstance(one, Integral) and not -_INT64 <= one < _INT64]
    refuse_if(large, f"{key}={value} is out of range: give whole numbers of at most 64 bits")
    if isinstance(value, list) and (element := element_type(kind)) is not None:
        kinds = {int: Integral, float: (int, float)}.get(element, element)
        wrong = not all(isinstance(one, kinds) for one in value)
        refuse_if(wrong, f"{key}={value}: give {type_words(kind)}")


def one_of(key: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise unknown_value(key, value, allowed)


def at_least(key: str, value: float | None, least: float) -> None:
    """Raise ConfigError for a number below `least` or not finite; None passes."""
    if value is not None and not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key}={value} is out of range: give a number of at least {least}")


def auto_or_count(key: str, value: Any, least: int = 0) -> None:
    """Raise ConfigError unless `value` is `auto` or a whole number from `least` on."""
    how = f"give auto, or a whole number of at least {least}"
    wrong = value != "auto" and not _is_count(value, least)
    refuse_if(wrong, f"{key}={value} is out of range: {how}")


def all_or_count(key: str, value: Any, least: int = 0) -> None:
    """Raise ConfigError unless `value` is `all` or a whole number from `least` on."""
    fix = f"give all, or a whole number of at least {least}"
    wrong = value != "all" and not _is_count(value, least)
    refuse_if(wrong, f"{key}={value} is out of range: {fix}")


def _within(key: str, value: Any, bounds: str) -> None:
    """Raise ConfigError unless `value` is a number within `bounds`, such as `(0, 1]`."""
    inside = _is_number(value) and 0 <= value <= 1
    if not inside or (value == 0 and bounds[0] == "(") or (value == 1 and bounds[-1] == ")"):
        low, high = (_ENDS[end] for end in bounds.split(", "))
        raise ConfigError(f"{key}={value} is a share: give a number {low} and {high}")


def _at_least_bytes(key: str, value: Any, least: int) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `least`."""
    remedy = f"give bytes of at least {least}, such as 4000000000, 512MiB or 2GB"
    refuse_if(not _is_count(value, least), f"{key}={value} is out of range: {remedy}")


_RULES = {
    "size": _at_least_bytes,
    "choice": one_of,
    "least": at_least,
    "counted": auto_or_count,
    "all_or": all_or_count,
    "share": _within,
}
"""The checks of a field's rules, by name."""


def _of_another(key: str, value: Any, by: str, chosen: str, words: Sequence[str]) -> None:
    """Raise ConfigError for a `value` that is read where `by` is one of `words` alone."""
    if chosen not in words:
        others = " and ".join(f"{by}={word}" for word in words)
        raise ConfigError(
            f"{key}={value} is a key of {others} and means nothing to {by}={chosen}: leave it out"
        )


def byte_count(key: str, text: str) -> int:
    """Return the bytes of a size: kB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB, or
    k, m, g and t alone, of 1024. Raises ConfigError."""
    match = re.fullmatch(
        r"(\d+(?:\.\d*)?|\.\d+)(?:e(\d{1,2}))?\s*(?:([kmgt])(i?b)?|b)?", text.strip().lower()
    )
    if match is None:
        raise ConfigError(f"{key}={text}: give bytes, such as 4000000000, 512MiB or 2GB")
    mantissa, exponent, prefix, suffix = match.groups()
    unit = 1000 if suffix == "b" else 1024
    power = "kmgt".index(prefix) + 1 if prefix else 0
    return int(Decimal(f"{mantissa}e{exponent or 0}") * unit**power)


def read_units(name: str, section: Any) -> None:
    """Replace the texts of sizes (`1GB`) and shares (`15%`) of a section, or of a command's own
    keys, by numbers, in place. Raises ConfigError for a size that cannot be read."""
    for f in fields(section):
        key = f"{name}.{f.name}".lstrip(".")
        value = getattr(section, f.name)
        if isinstance(value, str) and "size" in f.metadata:
            setattr(section, f.name, byte_count(key, value))
        elif isinstance(value, str) and "share" in f.metadata:
            match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*%", value.strip())
            if match is not None:
                setattr(section, f.name, float(match[1]) / 100)


_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def cadence(every: Any) -> tuple[int | None, float | None]:
    """The steps, or the seconds, of `trainer.checkpoint_every`; (None, None) for `end`."""
    found = re.fullmatch(r"([1-9]\d*)|(\d*\.?\d*[1-9]\d*)(s|min|h)|end", str(every))
    if found is None:
        how = "give steps (1000), a time (90s, 30min, 2h) or end"
        raise ConfigError(f"trainer.checkpoint_every={every}: {how}")
    steps, time, unit = found.groups()
    return (int(steps) if steps else None), (float(time) * _UNITS[unit] if time else None)


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rows(key: str, rows: Any) -> Refusals:
    """Of {table: rows}; whether there are such tables is not known here."""
    return {
        f"{key}: {name}={count}: give a whole number of rows, at least 0": not _is_count(count)
        for name, count in (rows.items() if isinstance(rows, Mapping) else ())
    }


def _positive(key: str, values: Sequence[int]) -> Refusals:
    wrong = not values or min(values) < 1
    return {f"{key}={values}: give a list of whole numbers, each at least 1": wrong}


def check_table_rows(key: str, rows: Sequence[int]) -> None:
    """Raise ConfigError unless each table has a row and all tables have at most `MOST_ROWS`."""
    refuse(_positive(key, rows))
    total = sum(rows)
    refuse_if(
        total > MOST_ROWS,
        f"{key}={list(rows)}: {total:,} rows are more than the {MOST_ROWS:,} that all tables may "
        "have together: give fewer",
    )


def _same_length(key: str, values: Any, data: DataConfig) -> Refusals:
    """Of a list with a value for each table, where the tables are known."""
    given = len(values) if isinstance(values, list) else None
    tables = len(data.table_rows) or (CRITEO_TABLES if data.name == "criteo" else 0)
    wrong = given is not None and tables not in (0, given)
    return {f"{key} has {given} entries, data.table_rows has {tables}: give one per table": wrong}


# -----------------------------------------------------------------------------
# Group `data`: what each source needs.


def _criteo(data: DataConfig) -> Refusals:
    if data.path is None:
        raise ConfigError(
            "data.path is not set, and data=criteo reads files: give data.path=<folder that "
            "python -m distcache.preprocess made, text file or glob>, or data=synthetic for a "
            "click stream"
        )
    path, tables = Path(data.path), len(data.table_rows)
    of_folder = path.suffix in (".npy", ".json") and (path.parent / "manifest.json").is_file()
    unfinished = path.is_dir() and not (path / "manifest.json").is_file()
    return {
        f"data.path={path} is a folder without manifest.json: finish the run of python -m "
        "distcache.preprocess that makes it, or give a glob of text files": unfinished,
        **({} if path.is_dir() else _no_file("path", data.path)),
        f"data.path={path} is a file of a preprocessed folder: give the folder, "
        f"data.path={path.parent}": of_folder,
        f"data.table_rows has {tables} entries, but a Criteo line has {CRITEO_TABLES} categorical "
        "fields: give one per field": tables not in (0, CRITEO_TABLES),
        f"data.dense_features={data.dense_features}, but a Criteo line has {CRITEO_DENSE}: "
        "leave it out": data.dense_features != CRITEO_DENSE,
    }


def _parquet(data: DataConfig) -> Refusals:
    weights, ids, apart = data.weight_columns or {}, data.id_columns, data.held_out_path
    return {
        **_no_path(data, "path"),
        **({} if apart is None else _no_path(data, "held_out_path")),
        f"data.held_out={data.held_out} and data.held_out_path={apart} contradict each other: "
        "give one of them": apart is not None and data.held_out is not None,
        "data.label_column is not set: name the column of labels": not data.label_column,
        "data.id_columns is empty: name the columns of ids, each with its table's rows in "
        "data.table_rows": not ids,
        f"data.id_columns has {len(ids)} entries, data.table_rows {len(data.table_rows)}: give "
        "each column its table's rows": len(ids) != len(data.table_rows),
        f"data.weight_columns={weights}: give {{id column: weight column}}, its keys from "
        "data.id_columns": not isinstance(weights, dict) or not set(weights) <= set(ids),
        f"data.on_bad_line={data.on_bad_line}: Parquet has no lines that could be left out; "
        "data.nulls and data.on_bad_id say what of odd values": data.on_bad_line != "error",
    }


def _interactions(data: DataConfig) -> Refusals:
    apart = data.held_out is not None and data.held_out_by == "last"
    return {
        **_no_path(data, "path"),
        f"data.table_rows={data.table_rows}: give the rows of users and items, or leave it "
        "empty for the largest ids of the data": len(data.table_rows) not in (0, 2),
        "data.delimiter is empty: give the text that separates columns, tab, space or auto": (
            not data.delimiter
        ),
        f"data.delimiter={data.delimiter} separates columns, and data.format=lines has none: give "
        "one of them": data.format == "lines" and data.delimiter != "auto",
        f"data.held_out={data.held_out} means nothing to data.held_out_by=last, which holds "
        "out each user's last: leave it out, or give data.held_out_by=time": apart,
    }


_OF_SOURCES = {"criteo": _criteo, "parquet": _parquet, "interactions": _interactions}


def _no_path(data: DataConfig, key: str) -> Refusals:
    path = getattr(data, key)
    no_path, folder = path is None, path is not None and Path(path).is_dir()
    return {
        f"data.{key} is not set, and data={data.name} reads files: give data.{key}=<file or "
        "glob>": no_path,
        f"data.{key}={path} is a folder: give a glob of its files, such as '{path}/*'": folder,
        **_no_file(key, path or ""),
    }


def _no_file(key: str, path: str) -> Refusals:
    """No regular file, nor a glob that matches one: files are read more than once."""
    no_file = not any(Path(name).is_file() for name in (path, *glob.glob(path)))
    return {
        f"data.{key}={path} is no regular file but a pipe, socket or device, and files are "
        "read more than once: give a file or glob": no_file and Path(path).exists(),
        f"data.{key}={path}: no such file (working directory {Path.cwd()})": no_file,
    }


def _batching(config: Config) -> Refusals:
    """What `data.batching` needs."""
    data, hot, unknown = config.data, config.data.hot_rows, config.cache.statistics is None
    share_of_rows = isinstance(hot, float) and 0 < hot < 1
    endless = data.name == "synthetic" and data.samples is None
    if data.batching == "as_is":
        return {}
    return {
        f"data.hot_rows={hot}: give auto, a whole number of rows, or a share of all rows "
        "above 0 and below 1": not (hot == "auto" or _is_count(hot) or share_of_rows),
        "data.batching=hot_cold means nothing to batches of your own loader: how samples are "
        "brought together is up to it; leave the key out": data.name == "own",
        f"data.batching=hot_cold needs to know which rows are hot: {_HOW}": unknown,
        "data.batching=hot_cold sorts the samples of an epoch, and data.samples=null is a "
        "stream without an end: give data.samples=<samples of an epoch>": endless,
    }


# -----------------------------------------------------------------------------
# Group `cache`, checked as a whole.

_HOW = "give cache.statistics=<folder of python -m distcache.analyze or preprocess>"


def check_cache(cache: CacheConfig) -> None:
    """Raise ConfigError for a value of the group, or for those of its keys that do not agree."""
    check_section("cache", cache)
    sizes = {"rows": cache.rows, "ratio": cache.ratio, "bytes": cache.bytes}
    given = [f"cache.{name}={value}" for name, value in sizes.items() if value is not None]
    if len(given) > 1:
        name = given[-1].partition("=")[0]
        raise ConfigError(
            f"{' and '.join(given)} contradict each other: give one of them (null takes back what "
            f"an experiment brings: {name}=null)"
        )
    refuse(_policy(cache))
    refuse(_popularity(cache))
    refuse(_placement(cache))


def _policy(cache: CacheConfig) -> Refusals:
    policy = Policy.of(cache)  # with its own rules
    chosen = f"cache.{'tail' if policy.uses_window else 'policy'}={policy.ranking}"
    tail = cache.tail != CacheConfig().tail and not policy.uses_window
    unknown = policy.needs_popularity and cache.statistics is None
    uncounted = policy.half_life is not None and policy.ranking != "lfu"
    return {
        f"cache.tail={cache.tail} orders what cache.policy=lookahead leaves open, and "
        f"cache.policy={cache.policy} leaves nothing open: leave one of them out": tail,
        f"{chosen} ranks rows by how often they are looked up: {_HOW}": unknown,
        f"cache.half_life={cache.half_life} is for counts, which {chosen} does not keep: "
        "leave it out, or use cache.tail=lfu or cache.policy=lfu": uncounted,
    }


def _popularity(cache: CacheConfig) -> Refusals:
    """Of the keys that read `cache.statistics`."""
    warm, split, unknown = cache.warm_start, cache.split, cache.statistics is None
    strange = not isinstance(split, Mapping) and split not in ("proportional", "by_curve")
    return {
        f"cache.warm_start={warm} fills slots with the most frequent rows, and which those are "
        f"is not known: {_HOW}, or leave cache.warm_start out": warm not in ("auto", 0) and unknown,
        **_rows("cache.split", split),
        f"cache.split={split} is unknown: choose proportional or by_curve, or give the rows "
        "of each table: cache.split='{t_cat_0:1000,t_cat_1:500}'": strange,
        f"cache.split=by_curve needs to know how often rows are looked up: {_HOW}, or use "
        "cache.split=proportional": split == "by_curve" and unknown,
    }


def _placement(cache: CacheConfig) -> Refusals:
    kind, rows, share = cache.placement, cache.replicated_rows, cache.replicated_share
    key = "state" if kind == "replicated" else "placement"
    at_homes = cache.reduction == "native" and (key == "placement" or cache.state == "home")
    no_tables = rows is not None and not isinstance(rows, Mapping)
    return {
        f"cache.replicated_rows={rows} and cache.replicated_share={share} contradict each other: "
        "give one of them": rows is not None and share is not None,
        "cache.reduction=native lets the library sum rows that all ranks hold, but "
        f"cache.{key}={getattr(cache, key)} sums them at their homes: leave one out": at_homes,
        f"cache.replicated_rows={rows}: give the rows of each table, "
        "cache.replicated_rows='{t_cat_0:1000,t_cat_1:500}'": no_tables,
        **_rows("cache.replicated_rows", rows),
    }


def check(config: Config) -> list[str]:
    """Check every value of a job; warnings, one sentence each.

    Raises ConfigError for the first wrong value. Reads the file system, looks for a GPU, and
    imports torchrec, for `hybrid` only.
    """
    check_values(config)
    data = config.data
    if data.name == "synthetic" or data.table_rows:
        check_table_rows("data.table_rows", data.table_rows)
    how = "give an int (ids per bag), a float (their mean), or a list with one of these per table"
    for size in data.bag_size if isinstance(data.bag_size, list) else [data.bag_size]:
        refuse_if(not _is_number(size), f"data.bag_size={data.bag_size}: {how}")
        at_least("data.bag_size", size, 0)
    refuse(_same_length("data.bag_size", data.bag_size, data))
    if data.name in _OF_SOURCES:
        refuse(_OF_SOURCES[data.name](data))
    refuse(_model(config.model, data))
    refuse(_trainer(config))
    level = config.trainer.log_level.upper()
    one_of("trainer.log_level", level, tuple(logging.getLevelNamesMapping()))
    _check_parts(config)
    return _warnings(config)


def check_own(config: Config) -> None:
    """The checks of `check` for callers who bring data, tables and model of their own."""
    check_values(config, but=("data.name", "model.name"))
    _check_parts(config)


def _check_parts(config: Config) -> None:
    """What does not depend on whose the data and the model are."""
    refuse(_batching(config))
    check_cache(config.cache)
    refuse(_optim(config.optim))
    cadence(config.trainer.checkpoint_every)
    refuse(_precision_and_start(config.trainer))
    if config.parallel.mode == "hybrid":
        refuse(_hybrid(config))
        require_hybrid()


def _model(model: ModelConfig, data: DataConfig) -> Refusals:
    dense, over, dims = model.dense_arch, model.over_arch, model.table_dims
    other_width = model.name == "dlrm" and dense[-1:] != [model.embedding_dim]
    weights = "data.weighted=true" if data.weighted else "data.weight_columns"
    weighted = (data.weighted or data.weight_columns) and model.pooling != "sum"
    return {
        **_positive("model.dense_arch", dense),
        **_positive("model.over_arch", over),
        f"model.over_arch={over} must end in 1, the logit: append a 1": over[-1:] != [1],
        f"model.dense_arch={dense} must end in model.embedding_dim={model.embedding_dim}, because "
        "dlrm takes dot products with the embeddings: change one of them": other_width,
        **({} if dims is None else _positive("model.table_dims", dims)),
        **_same_length("model.table_dims", dims, data),
        f"{weights} with model.pooling={model.pooling}: torch's embedding_bag takes "
        "per-sample weights with sum alone: use model.pooling=sum, or no weights": weighted,
    }


_FLOAT32_MAX = 3.4028234e38


def _optim(optim: OptimConfig) -> Refusals:
    two = len(optim.betas) == 2 and all(0 <= beta < 1 for beta in optim.betas)
    zero = "adam" in optim.name or ("adagrad" in optim.name and not optim.initial_accumulator)
    inside = optim.decay_steps > 0 and optim.decay_start < optim.warmup_steps
    numbers = {name: value for name, value in vars(optim).items() if isinstance(value, float)}
    return {
        **{
            f"optim.{name}={value} is too large for float32: give a smaller number": (
                abs(value) > _FLOAT32_MAX
            )
            for name, value in numbers.items()
        },
        f"optim.betas={optim.betas}: give two numbers in [0, 1)": not two,
        f"optim.lr_power={optim.lr_power}: give a number from -1 on, below 0": (
            not -1 <= optim.lr_power < 0
        ),
        f"optim.eps=0 divides by zero in {optim.name} where a gradient is zero: give 1e-8": (
            optim.eps == 0 and zero
        ),
        f"optim.decay_start={optim.decay_start} lies inside the warm-up of optim.warmup_steps="
        f"{optim.warmup_steps}: start the decay at that step or later": inside,
    }


def _trainer(config: Config) -> Refusals:
    """Of a run whose data and model are the package's."""
    trainer, data = config.trainer, config.data
    endless = trainer.steps is None and data.name == "synthetic" and data.samples is None
    nothing = trainer.eval_every is not None and trainer.eval_steps == 0
    no_time = not 0 < trainer.timeout_s <= 1e8
    return {
        "run.dir is empty: name a folder, such as run.dir=runs/first": not config.run.dir.strip(),
        "trainer.steps=null means one epoch, but data.samples=null is a stream without an end: "
        "give trainer.steps=<steps> or data.samples=<samples of an epoch>": endless,
        f"trainer.eval_every={trainer.eval_every} with trainer.eval_steps=0 evaluates nothing: "
        "give trainer.eval_steps=all or a number of batches, or leave eval_every out": nothing,
        f"trainer.timeout_s={trainer.timeout_s}: give seconds above 0, at most 10^8": no_time,
    }


def _precision_and_start(trainer: TrainerConfig) -> Refusals:
    source, names = trainer.init_from, trainer.init_names
    wasted = trainer.amp != "off" and trainer.dtype != "float32"
    no_folder = trainer.resume not in ("auto", "never") and not Path(trainer.resume).is_dir()
    return {
        # Before run.overwrite removes what is in the run folder.
        f"trainer.resume={trainer.resume} is no folder: give a run folder or one of its "
        "checkpoints/, auto or never": no_folder,
        f"trainer.init_from={source} is no folder: give a run folder, one of its checkpoints/, or "
        "a folder of *.safetensors": source is not None and not Path(source).is_dir(),
        f"trainer.init_names={names}: give {{table: its name in trainer.init_from}}": (
            names is not None and not (isinstance(names, Mapping) and source is not None)
        ),
        f"trainer.amp={trainer.amp} with trainer.dtype={trainer.dtype}: bfloat16 products have 8 "
        "bits, float64 around them is wasted: use trainer.amp=off or trainer.dtype=float32": wasted,
    }


def _hybrid(config: Config) -> Refusals:
    import torch

    dims, key = config.model.table_dims, "model.table_dims"
    if dims is None:
        dims, key = [config.model.embedding_dim], "model.embedding_dim"
    optim, has = config.optim, ("sgd", "adagrad", "rowwise_adagrad", "adam")
    on_cpu = config.trainer.device == "cpu" or not torch.cuda.device_count()
    return {
        **{
            f"{key}: width {dim} is not a multiple of 4, which fbgemm's kernels need: use "
            f"{-(-dim // 4) * 4}, or parallel=data": dim % 4
            for dim in dims
        },
        "trainer.dtype=float64: fbgemm's fused optimizers are float32 only: use "
        "trainer.dtype=float32, or parallel=data": config.trainer.dtype == "float64",
        "optim=adam: fbgemm has no Adam on the CPU: use optim=sgd, adagrad or rowwise_adagrad, a "
        "GPU, or parallel=data": optim.name == "adam" and on_cpu,
        f"optim={optim.name}: parallel=hybrid has {', '.join(has)} of fbgemm's optimizers: use one "
        "of these, or parallel=data": optim.name not in has,
        f"optim.weight_decay={optim.weight_decay}: fbgemm's sgd and adagrad, and on the CPU its "
        "rowwise_adagrad, pass over it: leave it out, or use parallel=data": (
            bool(optim.weight_decay)
        ),
    }


def _warnings(config: Config) -> list[str]:
    cache, mode, total = config.cache, config.parallel.mode, sum(config.data.table_rows)
    kind = config.parallel.sharding
    by_column = config.optim.name == "rowwise_adagrad" and kind in ("column_wise", "auto")
    found = {
        f"cache.rows={cache.rows} is capped: the tables have {total} rows": (
            mode == "data" and cache.rows is not None and 0 < total < cache.rows
        ),
        f"trainer.checkpoint_every={config.trainer.checkpoint_every}: run.save=false keeps no "
        "checkpoints but that of a stop; set run.save=true": not config.run.save
        and config.trainer.checkpoint_every != TrainerConfig().checkpoint_every,
        f"parallel.sharding={kind}: column-wise shards keep row states of their own, so "
        "rowwise_adagrad may differ from the other modes": mode == "hybrid" and by_column,
    }
    return [warning for warning, is_so in found.items() if is_so]
