"""Placements beside TorchRec's hybrid layouts on links of several rates, on batches of Criteo
Terabyte's shape: `python -m distcache.bench.links`.

Two ranks, each a node of its own. A throttled link joins two network namespaces with a cable whose
ends `tc` throttles (as root, on Linux). For each rate and kind of batch, two fresh processes hold
all contenders and train them in turns, as `distcache.bench.step` does; ratios are taken within a
turn.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distcache.bench import links_probe, step
from distcache.bench.command import Bench, run_bench
from distcache.bench.links_cable import NONE, End, NotPermittedError, bits_per_second, cable
from distcache.bench.links_ranks import run_ranks
from distcache.bench.links_records import cell_records
from distcache.bench.links_shape import MODEL, SIZES, batch_record, table_rows
from distcache.bench.links_tables import tables
from distcache.bench.options import at_least, option
from distcache.bench.report import Record
from distcache.errors import ConfigError

log = logging.getLogger("distcache.bench.links")

MODULE = "distcache.bench.links"
PURPOSE = "Placements beside hybrid layouts on links of several rates."
RANKS = 2


@dataclass(frozen=True)
class LinksOptions:
    """The keys of the command line."""

    size: str = option("terabyte", "tables and bags: terabyte or small")
    scale: int = option(64, "tables above 40,000 rows are divided by this")
    batches: tuple[str, ...] = option(("multi_hot", "one_hot"), "multi_hot or one_hot bags")
    rates: tuple[str, ...] = option(
        (NONE, "10gbit", "1gbit"), "links: none (loopback), or the rate of a throttled cable"
    )
    modes: tuple[str, ...] = option(
        ("table_wise", "row_wise", "replicated", "sharded", "auto"),
        "contenders, as of distcache.bench.step; the first is the one others are compared with",
    )
    batch: int = option(1024, "samples of a step on each rank")
    width: int = option(64, "width of every table")
    ratio: float = option(0.1, "slots of a rank as a share of the rows")
    optimizer: str = option("sgd", "sgd, adagrad, rowwise_adagrad or adam")
    steps: int = option(8, "timed steps of a turn")
    lead: int = option(3, "steps before them, not timed")
    repetitions: int = option(3, "turns of each contender")
    warmup: int = option(12, "steps before the first turn")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, batch=self.batch, width=self.width, steps=self.steps, scale=self.scale)
        at_least(1, warmup=self.warmup, repetitions=self.repetitions)
        at_least(0, lead=self.lead)
        if self.size not in SIZES:
            raise ConfigError(f"size={self.size} is not {' or '.join(SIZES)}")
        wrong = [kind for kind in self.batches if kind not in ("multi_hot", "one_hot")]
        if wrong:
            raise ConfigError(f"batches={wrong[0]} is not multi_hot or one_hot")
        for rate in self.rates:
            if rate != NONE:
                bits_per_second(rate)
        step.StepOptions(modes=self.modes)  # refuses names that are none


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    bench = Bench(
        "Links: placements beside hybrid layouts",
        MODULE,
        PURPOSE,
        LinksOptions,
        measure,
        tables,
        overrides=True,
    )
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_bench(bench, arguments)
    except KeyboardInterrupt:
        log.error("interrupted: ranks and namespaces are gone")
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def measure(options: LinksOptions, overrides: Sequence[str] = ()) -> list[Record]:
    """All rates and kinds of batches, one after the other.

    A rate that this machine does not permit is left out, with a record that says why; ConfigError
    where none is left.
    """
    found: list[Record] = [batch_record(options, kind) for kind in options.batches]
    refused: list[Record] = []
    for rate in options.rates:
        try:
            with cable(rate) as ends:
                found += measure_rate(options, rate, ends, overrides)
        except NotPermittedError as error:
            log.warning("%s", error)
            refused.append({"kind": "refused", "rate": rate, "why": str(error)})
    if len(refused) == len(options.rates):
        raise ConfigError(refused[0]["why"])
    return [*found, *refused]


def measure_rate(
    options: LinksOptions, rate: str, ends: tuple[End, End], overrides: Sequence[str]
) -> list[Record]:
    """What the link carries, and the turns of all contenders on it."""
    with tempfile.TemporaryDirectory(prefix="links-") as name:
        folder = Path(name)
        speed = folder / "speed.json"
        run_ranks(ends, rate, [links_probe.MODULE, str(speed)], folder)
        found = [{"kind": "link", "rate": rate, **json.loads(speed.read_text())}]
        for kind in options.batches:
            log.info("rate %s, %s", rate, kind)
            report = folder / f"{kind}.md"
            words = [*step_words(options, kind), f"out={report}", *overrides]
            run_ranks(ends, rate, words, folder)
            lines = report.with_suffix(".jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            where = {"rate": rate, "batches": kind}
            found += cell_records(records, where, options.modes[0], RANKS * options.batch)
        return found


def step_words(options: LinksOptions, kind: str) -> list[str]:
    """The command of `distcache.bench.step`, for one kind of batch."""
    rows, bags = table_rows(options), SIZES[options.size].bags
    return [
        step.MODULE,
        "size=small",
        f"modes={','.join(options.modes)}",
        f"batch={RANKS * options.batch}",
        f"width={options.width}",
        f"ratio={options.ratio}",
        f"optimizer={options.optimizer}",
        f"steps={options.steps}",
        f"lead={options.lead}",
        f"repetitions={options.repetitions}",
        f"warmup={options.warmup}",
        f"warmup_most={options.warmup}",
        f"data.table_rows=[{','.join(map(str, rows))}]",
        f"data.bag_size=[{','.join(map(str, bags))}]" if kind == "multi_hot" else "data.bag_size=1",
        *MODEL,
        f"model.dense_arch=[512,256,{options.width}]",
    ]


if __name__ == "__main__":
    sys.exit(main())
