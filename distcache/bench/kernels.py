"""Milliseconds of lookup, row gradients and update, our kernels beside FBGEMM's and PyTorch's:
`python -m distcache.bench.kernels`.

One device, everything cached. All contenders start from the same weights and take turns over the
same batches; on a GPU times are those between CUDA events, else of the clock. Ratios are taken
within a repetition.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from distcache.bench.kernel_contenders import CONTENDERS, Contender, make_contender, why_not
from distcache.bench.kernel_tables import tables
from distcache.bench.kernel_work import Shape, Work, initial_weight, make_work, moved_bytes
from distcache.bench.options import at_least, option, parse, split_arguments, usage
from distcache.bench.report import Record, Report, check_out, header, to_markdown, write_report
from distcache.bench.spread import ratios, rotated, spread
from distcache.cli.run import set_up_logging
from distcache.comm.world import pick_device
from distcache.errors import ConfigError, DistcacheError
from distcache.ops import ON_GPU

log = logging.getLogger("distcache.bench.kernels")

MODULE = "distcache.bench.kernels"
PURPOSE = "Milliseconds of lookup, row gradients and update, beside FBGEMM's and PyTorch's."
OPTIMIZERS = ("sgd", "adam")
SIZES = {"cuda": (10_500, 250_000), "cpu": (400, 20_000)}
"""Bags per table and rows per table by device, where the options say 0: 1.05 M ids on a GPU."""
BARS = {"fbgemm": 1.3, "adam / sgd": 1.5}
"""What our kernels must not exceed on a GPU: FBGEMM's time times, and their own with SGD times."""


@dataclass(frozen=True)
class KernelOptions:
    """The keys of the command line; zero leaves sizes to the device and threads to torch."""

    contenders: tuple[str, ...] = option(
        CONTENDERS, f"of {', '.join(CONTENDERS)}; who cannot run here is left out, and named"
    )
    optimizers: tuple[str, ...] = option(OPTIMIZERS, "of sgd, adam")
    tables: int = option(10, "tables, one feature each")
    rows: int = option(0, "rows of a table; 0: 250,000 on a GPU, 20,000 on a CPU")
    width: int = option(128, "width of every table")
    batch: int = option(0, "bags per table and step; 0: 10,500 on a GPU, 400 on a CPU")
    pooling: int = option(10, "ids of a bag")
    zipf: float = option(1.05, "exponent of the ids' popularity; 0: uniform")
    batches: int = option(4, "different batches, taken in turn")
    steps: int = option(8, "timed steps of a turn")
    lead: int = option(2, "steps before them, not timed")
    repetitions: int = option(9, "turns of each contender")
    device: str = option("auto", "cpu, cuda or auto")
    threads: int = option(0, "torch threads; 0: torch's own choice")
    seed: int = option(1, "of ids, weights and gradients")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, tables=self.tables, width=self.width, pooling=self.pooling)
        at_least(1, batches=self.batches, steps=self.steps, repetitions=self.repetitions)
        at_least(0, rows=self.rows, batch=self.batch, lead=self.lead, threads=self.threads)
        for key, known in (("contenders", CONTENDERS), ("optimizers", OPTIMIZERS)):
            given = getattr(self, key)
            unknown = [one for one in given if one not in known]
            if unknown:
                raise ConfigError(f"{key}={','.join(unknown)}: there are {', '.join(known)}")
            if len(set(given)) < len(given):
                raise ConfigError(f"{key}={','.join(given)} names one twice")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device={self.device} is not cpu, cuda or auto")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    given = tuple(sys.argv[1:] if arguments is None else arguments)
    set_up_logging("INFO", 0, 1)
    if "--help" in given or "-h" in given:
        sys.stdout.write(usage(KernelOptions, MODULE, PURPOSE))
        return 0
    try:
        line = split_arguments(given)
        if line.overrides:
            raise ConfigError(f"{line.overrides[0]}: no such key, --help shows them")
        run(parse(KernelOptions, line.given), given)
    except DistcacheError as error:
        log.error("%s", error)
        return 1
    return 0


def run(options: KernelOptions, given: tuple[str, ...]) -> Report:
    """Build, take turns and report."""
    out = check_out(options.out)
    device = pick_device(options.device, 0)
    batch, rows = SIZES[device.type]
    options = replace(options, batch=options.batch or batch, rows=options.rows or rows)
    threads = torch.get_num_threads()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        head = header(MODULE, given, asdict(options), 1)
        report = Report("Kernels", MODULE, given, asdict(options), measure(options, device), tables)
        sys.stdout.write(to_markdown(report, head))
        if out is not None:
            write_report(report, head, out)
        return report
    finally:
        torch.set_num_threads(threads)


def measure(options: KernelOptions, device: torch.device) -> list[Record]:
    """Turns of every contender with every optimizer, and what they come to."""
    shape = Shape(options.tables, options.rows, options.width, options.batch, options.pooling)
    weight = initial_weight(shape, options.seed)
    contenders, records = [], []
    for optimizer in options.optimizers:
        for name in options.contenders:
            reason = why_not(name, optimizer, device)
            if reason:
                log.warning("%s with %s is left out: %s", name, optimizer, reason)
                left = {"kind": "left_out", "contender": name, "optimizer": optimizer}
                records.append({**left, "reason": reason})
                continue
            contenders.append(make_contender(name, shape, optimizer, device, weight, options.seed))
    if not contenders:
        raise ConfigError(f"contenders={','.join(options.contenders)}: none can run here")
    works = [
        make_work(shape, options.zipf, options.seed, step, device)
        for step in range(options.batches)
    ]
    turns: dict[tuple[str, str], list[list[dict[str, float]]]] = {}
    by_key = {(one.optimizer, one.name): one for one in contenders}
    for repetition in range(options.repetitions):
        for key in rotated(list(by_key), repetition):
            turns.setdefault(key, []).append(_turn(by_key[key], works, options, repetition))
        log.info("repetition %d of %d", repetition + 1, options.repetitions)
    distinct = int(np.mean([len(work.slots) for work in works]))
    records += [_summary(by_key[key], turns[key], distinct) for key in by_key]
    return records + _agreement(contenders) + _ratios(records, device) + _choices(records)


def _turn(
    contender: Contender, works: Sequence[Work], options: KernelOptions, repetition: int
) -> list[dict[str, float]]:
    """Milliseconds by piece of every timed step."""
    count = options.lead + options.steps
    start = repetition * count
    steps = [contender.pieces(works[(start + i) % len(works)]) for i in range(count)]
    cuda = contender.device.type == "cuda"
    marks: list[list] = []
    for pieces in steps:
        marks.append([_mark(cuda)])
        for _, call in pieces:
            call()
            marks[-1].append(_mark(cuda))
    if cuda:
        torch.cuda.synchronize(contender.device)
    return [
        {
            name: _between(marks[i][place], marks[i][place + 1])
            for place, (name, _) in enumerate(steps[i])
        }
        for i in range(options.lead, count)
    ]


def _mark(cuda: bool) -> torch.cuda.Event | float:
    """A point in time, on the current stream or of the clock."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: torch.cuda.Event | float, second: torch.cuda.Event | float) -> float:
    """Milliseconds between two marks."""
    if isinstance(first, torch.cuda.Event):
        return first.elapsed_time(second)
    return 1e3 * (second - first)  # type: ignore[operator]


def _summary(contender: Contender, turns: list[list[dict[str, float]]], distinct: int) -> Record:
    """The record of one contender: its steps, and its pieces with bytes and GB/s."""
    totals = [[sum(step.values()) for step in turn] for turn in turns]
    moved = moved_bytes(contender.shape, distinct, contender.optimizer)
    pieces = {}
    for name in turns[0][0]:
        times = spread([step[name] for turn in turns for step in turn])
        rate = moved[name] / (1e6 * float(times["median"] or 1.0))
        pieces[name] = {"ms": times, "bytes": moved[name], "gb_per_s": rate}
    return {
        "kind": "contender",
        "contender": contender.name,
        "optimizer": contender.optimizer,
        "ids": contender.shape.ids,
        "distinct": distinct,
        "step_ms": spread([total for turn in totals for total in turn]),
        "turn_medians_ms": [float(np.median(turn)) for turn in totals],
        "pieces": pieces,
    }


def _agreement(contenders: Sequence[Contender]) -> list[Record]:
    """How far the weights and the last bags are from those of the first with the same optimizer."""
    records = []
    for optimizer in OPTIMIZERS:
        first, *others = [one for one in contenders if one.optimizer == optimizer] or [None]
        for other in others:
            record = {"kind": "agreement", "optimizer": optimizer}
            record |= {"contender": other.name, "with": first.name}
            for name in ("weight_by_row", "pooled_by_bag"):
                ours, theirs = getattr(first, name)(), getattr(other, name)()
                record[name] = float((ours - theirs).abs().max() / ours.abs().max())
            records.append(record)
    return records


def _ratios(records: Sequence[Record], device: torch.device) -> list[Record]:
    """Our best installed body over the others, and Adam over SGD; bars hold on a GPU."""
    found = {(r["optimizer"], r["contender"]): r for r in records if r["kind"] == "contender"}
    result = []

    def add(above: Record, below: Record, title: str, bar: float | None) -> None:
        values = ratios(above["turn_medians_ms"], below["turn_medians_ms"])
        record = {"kind": "ratio", "title": title, "repetitions": values, "ratio": spread(values)}
        result.append({**record, "bar": bar if device.type == "cuda" else None})

    for (optimizer, name), record in found.items():
        if name not in ("triton", "reference"):
            continue
        for other in ("reference", "fbgemm", "torch"):
            if (optimizer, other) in found and other != name:
                bar = BARS.get(other) if name == "triton" else None
                add(record, found[optimizer, other], f"{name} / {other}, {optimizer}", bar)
        if optimizer == "adam" and ("sgd", name) in found:
            bar = BARS["adam / sgd"] if name == "triton" else None
            add(record, found["sgd", name], f"adam / sgd, {name}", bar)
    return result


def _choices(records: Sequence[Record]) -> list[Record]:
    """For each operation, our bodies' times beside PyTorch's, and what the dispatch has."""
    names = {"lookup": "pooled_lookup", "gradient": "row_gradients", "update": "update_rows"}
    result = []
    for optimizer in OPTIMIZERS:
        for piece, operation in names.items():
            times = {
                r["contender"]: r["pieces"][piece]["ms"]["median"]
                for r in records
                if r["kind"] == "contender" and r["optimizer"] == optimizer and piece in r["pieces"]
            }
            if times:
                record = {"kind": "choice", "optimizer": optimizer, "operation": operation}
                result.append({**record, "median_ms": times, "on_gpu": ON_GPU[operation]})
    return result


if __name__ == "__main__":
    sys.exit(main())
