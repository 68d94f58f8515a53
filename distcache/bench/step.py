"""Milliseconds per training step of the modes and of TorchRec's fused tables, side by side:
`python -m distcache.bench.step`, or under torchrun for several ranks.

All contenders live in one process per rank and take turns over the same batches, which are made in
advance; each turn begins with steps that are not timed. Ratios are taken within a repetition.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from distcache.bench.options import at_least, option, parse, split_arguments, usage
from distcache.bench.report import Report, check_out, header, to_markdown, write_report
from distcache.bench.setting import compose_setting
from distcache.bench.step_contenders import CACHED, SHARDED_BY, build_contenders
from distcache.bench.step_tables import tables
from distcache.bench.step_turns import Turns
from distcache.bench.yardsticks import YARDSTICKS
from distcache.cli.run import set_up_logging
from distcache.comm.rendezvous import Place, find_place
from distcache.comm.world import close_world, open_world
from distcache.config.tree import Config
from distcache.errors import ConfigError, DistcacheError

log = logging.getLogger("distcache.bench.step")

MODULE = "distcache.bench.step"
PURPOSE = "Milliseconds per training step of the modes and of TorchRec's fused tables, in turns."
MODES = (*CACHED, "resident", "host", "hybrid", *SHARDED_BY, *YARDSTICKS)


@dataclass(frozen=True)
class StepOptions:
    """The keys of the command line; zero leaves threads to torch."""

    size: str = option(
        "kaggle", "tables: kaggle (33,762,577 rows), terabyte (204,184,588) or small"
    )
    modes: tuple[str, ...] = option(
        ("data", "resident", "host", "fused"),
        f"who takes turns, of {', '.join(MODES)}; each has its own copy of the tables "
        "(data moves rows beside the steps, serial is data without; replicated, home, sharded, "
        "mixed and auto are data with that placement, home with cache.state=home; table_wise, "
        "row_wise and column_wise are hybrid with that sharding; uvm is FBGEMM's own cache of that "
        "many slots on a GPU, uvm_prefetch with the next batch brought in ahead)",
    )
    model: str = option("dlrm", "dlrm, or embeddings: next to no dense part")
    batch: int = option(4096, "samples of a step over all ranks")
    width: int = option(16, "width of every table")
    ratio: float = option(0.015, "slots as a share of the rows, mode data")
    optimizer: str = option("sgd", "sgd, adagrad, rowwise_adagrad or adam")
    steps: int = option(20, "timed steps of a turn")
    lead: int = option(4, "steps before them, not timed")
    repetitions: int = option(9, "turns of each mode")
    warmup: int = option(20, "steps before the first turn, at least")
    warmup_most: int = option(600, "and at most; between them, until every miss evicts")
    device: str = option("cpu", "cpu, cuda or auto")
    threads: int = option(0, "torch threads of a rank; 0: torch's own choice")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, batch=self.batch, width=self.width, steps=self.steps, warmup=self.warmup)
        at_least(1, repetitions=self.repetitions)
        at_least(0, lead=self.lead, threads=self.threads)
        at_least(self.warmup, warmup_most=self.warmup_most)
        if self.model not in ("dlrm", "embeddings"):
            raise ConfigError(f"model={self.model!r} is not 'dlrm' or 'embeddings'")
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown:
            raise ConfigError(f"modes={','.join(unknown)}: the modes are {', '.join(MODES)}")
        if len(set(self.modes)) < len(self.modes):
            raise ConfigError(f"modes={','.join(self.modes)} names one twice")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench on this rank; the exit code."""
    given = tuple(sys.argv[1:] if arguments is None else arguments)
    place = find_place()
    set_up_logging("INFO", place.rank, place.world_size)
    if "--help" in given or "-h" in given:
        sys.stdout.write(usage(StepOptions, MODULE, PURPOSE))
        return 0
    try:
        line = split_arguments(given)
        options = parse(StepOptions, line.given)
        run(options, compose(options, line.overrides, place), given)
    except DistcacheError as error:
        log.error("%s", error)
        return 1
    return 0


def compose(options: StepOptions, overrides: Sequence[str], place: Place) -> Config:
    """The configuration of the options; `overrides` (keys with a dot) win."""
    width = options.width
    return compose_setting(
        options.size,
        (
            f"optim={options.optimizer}",
            f"model.embedding_dim={width}",
            f"model.dense_arch=[512,256,64,{width}]",
            f"data.global_batch_size={options.batch}",
            f"cache.ratio={options.ratio}",
            f"trainer.device={options.device}",
            *overrides,
        ),
        place,
    )


def run(options: StepOptions, config: Config, given: tuple[str, ...]) -> Report:
    """Build, warm up, take turns and report; every rank runs it, the first one writes."""
    out = check_out(options.out)
    threads = torch.get_num_threads()
    if options.threads:
        torch.set_num_threads(options.threads)
    world = open_world(config.trainer.device, config.trainer.backend, config.trainer.timeout_s)
    try:
        head = header(MODULE, given, asdict(options), world.size)
        contenders, bank = build_contenders(
            options.modes, config, world, options.model == "embeddings"
        )
        with Turns(contenders, bank, world) as turns:
            turns.warm_up(options.warmup, options.warmup_most)
            for repetition in range(options.repetitions):
                turns.take(repetition, options.lead, options.steps)
            records = turns.summarise()
        report = Report("Training step", MODULE, given, asdict(options), records, tables)
        if world.is_first:
            sys.stdout.write(to_markdown(report, head))
            if out is not None:
                write_report(report, head, out)
        close_world(world)
        return report
    finally:
        close_world(world, orderly=False)
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
