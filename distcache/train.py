"""Train: `torchrun [...] -m distcache.train key=value ...`, or `python -m distcache.train`.

1. Rank 0 composes and checks the configuration; the other ranks receive it, or the exit code.
2. The ranks compare their packages, and join the world.
3. Rank 0 writes `config.yaml` and `environment.json` into the run folder.
4. The trainer trains.
5. Every rank leaves the world; the first failing rank's error comes first.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from omegaconf import OmegaConf

from distcache.cli.compose import Composed, checked_config, compose_command_line, to_config
from distcache.cli.run import (
    INTERRUPTED,
    describe_environment,
    leave,
    not_writable,
    set_up_logging,
    take_over_ctrl_c,
)
from distcache.cli.run_lock import hold_run_folder
from distcache.comm import rendezvous
from distcache.comm.link import agree_on_versions, require_equal, run_on_rank0
from distcache.comm.world import World, close_world, open_world
from distcache.config.tree import Config
from distcache.engine.tracing import remove_trace
from distcache.errors import ConfigError, DistcacheError

log = logging.getLogger("distcache.train")

_OF_A_RUN = ("summary.json", "metrics.jsonl", "checkpoints", "model", "model.old")
"""Results in a run folder, which another run must not replace by accident. `model` and
`model.old` are checkpoints of format 2, which is not read."""


def main() -> int:
    """Run this rank of a training job; its exit code."""
    return launch(lambda text, *job: run(to_config(text), *job))


def launch(
    go: Callable[[str, rendezvous.Place, dist.Store | None], int],
    compose: Callable[[rendezvous.Place], Composed] | None = None,
) -> int:
    """Run this rank of a job: what `go` makes of what rank 0 composes; its exit code."""
    take_over_ctrl_c()
    rendezvous.end_with_agent()
    os.umask(0o077)  # what a run leaves is its owner's
    place = rendezvous.Place()
    store = None
    try:
        place = rendezvous.find_place()
        set_up_logging("INFO", place.rank, place.world_size)
        limit = rendezvous.start_timeout(sys.argv[1:])
        store = rendezvous.open_store(place, limit)
        composed = agree(place, store, limit, compose)
        return composed.exit_code if composed.text is None else go(composed.text, place, store)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return report(error, place, store)


def agree(
    place: rendezvous.Place,
    store: dist.Store | None,
    timeout_s: float = rendezvous.TIMEOUT_S,
    compose: Callable[[rendezvous.Place], Composed] | None = None,
) -> Composed:
    """Rank 0: compose, check and publish. Others: receive, within `timeout_s` seconds. The same
    value on every rank."""
    if place.rank > 0 and store is not None:
        return Composed(**rendezvous.receive(store, timeout_s))
    composed, agreed = Composed(None, 1), Composed(None, 1)
    try:
        composed = (compose or compose_command_line)(place)
        if composed.text is not None:
            checked_config(composed.text)
            if compose is None:  # what goes on after a restart is training
                composed = Composed(of_this_generation(composed.text))
        agreed = composed
    except SystemExit as stop:
        number = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        agreed = Composed(None, number)
    except KeyboardInterrupt:
        agreed = Composed(None, INTERRUPTED)
    except DistcacheError as error:
        show(error)
    finally:
        # Whatever happened, also an error nobody expected: the other ranks must hear of it.
        rendezvous.publish(store, place.world_size, asdict(agreed))
    return agreed


def of_this_generation(text: str) -> str:
    """A configuration with the run folder that the first ranks of this torchrun job have taken, and
    with the checkpoints there, if torchrun has started the ranks again."""
    from distcache.checkpoint.files import find_checkpoints

    config = OmegaConf.create(text)
    config.run.dir = run_dir_of_job(config.run.dir)
    if is_restart() and find_checkpoints(Path(config.run.dir)):
        config.trainer.resume = "auto"
    return OmegaConf.to_yaml(config)


def run_dir_of_job(run_dir: str, run: str = "run") -> str:
    """Return the run folder that the first ranks of this torchrun job have taken for a `run`, one
    of the job's: the name of a folder may be the time, so another one after a restart. Without a
    store that outlives the ranks it is `run_dir`."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return run_dir
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*where, is_master=False, wait_for_workers=False)
    return store.compare_set(f"distcache/{job}/{run}_dir", "", run_dir).decode()


def new_run_dir(mode: str) -> str:
    """Return the name of a run folder by the time, as on the command line, that is not there."""
    first = Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{mode}"
    later = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return str(next(path for path in itertools.chain([first], later) if not path.exists()))


def is_restart() -> bool:
    """Whether torchrun has started this job's ranks again, after one of them failed."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def run(config: Config, place: rendezvous.Place, store: dist.Store | None) -> int:
    """Train with a checked configuration; this rank's exit code."""
    # Imported here: `--help` and `--cfg job` need no trainer.
    from distcache.trainer.trainer import train

    def work(world: World) -> None:
        with run_folder(config, world, is_restart()) as begun:
            train(config, world, Path(config.run.dir), begun)

    return in_world(config, place, store, work)


def in_world(
    config: Config, place: rendezvous.Place, store: dist.Store | None, work: Callable[[World], None]
) -> int:
    """Do `work` in the world of all ranks of a job; this rank's exit code."""
    from distcache.trainer.build import compute_threads

    set_up_logging(config.trainer.log_level, place.rank, place.world_size)
    world: World | None = None
    try:
        trainer = config.trainer
        world = open_world(trainer.device, trainer.backend, trainer.timeout_s, store)
        # Rank 0's count for all; they may stand in any order.
        require_equal(world, {word.partition("=")[0]: word for word in sys.argv[1:]})
        agree_on_versions(world, config.parallel.mode == "hybrid")
        torch.set_num_threads(compute_threads(config, world))
        # What a second Ctrl-C does: an exception would go through libraries that swallow it.
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        work(world)
        close_world(world)
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return report(error, place, store)
    finally:
        if world is not None:
            close_world(world, orderly=False)


def needs_shared_folder(config: Config) -> str | None:
    """The setting that has all nodes write into the run folder; None where none does."""
    if config.run.save:
        return "run.save=true"
    return "trainer.trace=true" if config.trainer.trace else None


@contextmanager
def run_folder(
    config: Config, world: World, restarted: bool
) -> Iterator[Callable[[], None] | None]:
    """Hold the run folder against other runs; called by all ranks. Yields what `open_run_folder`
    returns, None on other ranks than the first.

    Raises ConfigError where another run has the folder, or not all nodes see it. A start that is
    refused before its first step leaves no new folder.
    """
    from distcache.checkpoint.files import check_run_folder

    run_dir, begun = Path(config.run.dir), list[Callable[[], None] | None]()
    with ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(hold_run_folder(run_dir))
            begun.append(open_run_folder(run_dir, config, world, restarted))

        run_on_rank0(world, begin)  # the folder is there before any rank writes into it
        check_run_folder(world, run_dir, needs_shared_folder(config))
        yield begun[0] if begun else None


def open_run_folder(
    run_dir: Path, config: Config, world: World, restarted: bool = False
) -> Callable[[], None] | None:
    """Write `config.yaml` and `environment.json` into a run folder that is held, and log its path.

    Where there are checkpoints to go on from, what describes the run that left them stays until
    this one has trained a step: then call what is returned. Raises ConfigError where that is not
    possible, and for a folder that holds another run, which this one does not go on with, unless
    `run.overwrite` is set: what that run measured and saved is then removed. One that is
    `restarted` goes on with what it left.
    """
    from distcache.checkpoint.files import find_checkpoints

    kept = [] if restarted else left_over(run_dir, config)
    if kept and not config.run.overwrite:
        names = ", ".join(path.name for path in kept)
        other = other_settings(run_dir, config)
        raise ConfigError(
            f"run.dir={run_dir} holds another run ({names}{other and f'; {other}'}), and "
            f"trainer.resume={config.trainer.resume} does not go on with it: name another folder, "
            "or remove it by run.overwrite=true"
        )
    is_unfinished = bool(results_in(run_dir)) and not kept and not find_checkpoints(run_dir)
    try:
        for path in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (run_dir / "bad_lines.json").unlink(missing_ok=True)
        remove_trace(run_dir)
        texts = {"config.yaml": OmegaConf.to_yaml(OmegaConf.structured(config))}
        texts["environment.json"] = json.dumps(describe_environment(world.size), indent=2) + "\n"

        def describe() -> None:
            (run_dir / "summary.json").unlink(missing_ok=True)  # until this run has one
            for name, text in texts.items():
                (run_dir / name).write_text(text)

        is_going_on = find_checkpoints(run_dir)
        if not is_going_on:
            describe()
    except OSError as error:
        raise not_writable(run_dir, "run.dir", error) from error
    where = f"{world.size} rank(s), {world.device.type}, {world.backend}"
    log.info(f"{config.parallel.mode} on {where}; run folder {run_dir}")
    if is_unfinished:
        log.info(f"run.dir={run_dir} has no complete checkpoint: the run starts from the beginning")
    return describe if is_going_on else None


def results_in(run_dir: Path) -> list[Path]:
    """Files and folders of results in `run_dir`, without empty ones, which a run leaves that failed
    at its first step."""
    paths = [path for name in _OF_A_RUN if (path := run_dir / name).exists()]
    return [own for own in paths if (any(own.iterdir()) if own.is_dir() else own.stat().st_size)]


def left_over(run_dir: Path, config: Config) -> list[Path]:
    """What a run has left in `run_dir`, for which one with `config` has no use.

    A folder without a complete checkpoint belongs to the run with this configuration: it was killed
    before the first one, and nothing is lost when it starts from the beginning.
    """
    from distcache.checkpoint.files import find_checkpoints

    files, resume, overwrite = results_in(run_dir), config.trainer.resume, config.run.overwrite
    is_own = is_unfinished_start(run_dir, files) and not other_settings(run_dir, config)
    if is_own and not overwrite:
        return []
    if resume == "auto":
        return [] if find_checkpoints(run_dir) and not overwrite else files
    source = Path(resume).resolve()
    if resume == "never" or run_dir.resolve() not in (source, *source.parents):
        return files
    # It goes on in its own folder: later checkpoints would be of another trajectory.
    begin = [folder.resolve() for folder in find_checkpoints(Path(resume))[:1]]
    later = itertools.takewhile(
        lambda folder: folder.resolve() not in begin, find_checkpoints(run_dir)
    )
    return list(later) if begin else []


def is_unfinished_start(run_dir: Path, results: Sequence[Path]) -> bool:
    """Return True if no complete checkpoint, of any name, and no summary is among the `results`."""
    names = {path.name for path in results}
    return names <= {"metrics.jsonl", "checkpoints"} and not any(
        (run_dir / "checkpoints").glob("*/manifest.json")
    )


def other_settings(run_dir: Path, config: Config) -> str:
    """In words, how the run that `config.yaml` in `run_dir` describes differs from `config` in the
    keys that decide its numbers; "" where it does not, or the file is missing or incomplete."""
    from distcache.checkpoint.files import differences

    try:
        was = yaml.safe_load((run_dir / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    sections = {"model", "data", "optim", "trainer", "run"}
    if not isinstance(was, dict) or not sections <= was.keys():  # `run`, the last one, was cut off
        return ""
    now = yaml.safe_load(OmegaConf.to_yaml(OmegaConf.structured(config)))
    same_data = config.trainer.resume_data == "same"
    return differences(*(decisive_settings(tree, same_data) for tree in (was, now)), "not set")


def decisive_settings(tree: Mapping[str, Any], same_data: bool) -> dict[str, Any]:
    """Values, by dotted key, of the keys of a configuration that decide the numbers of a run."""
    sections = ("model", "optim", "data") if same_data else ("model", "optim")
    found = {f"trainer.{key}": tree["trainer"].get(key) for key in ("seed", "dtype")}
    for section in sections:
        found |= {f"{section}.{key}": value for key, value in tree[section].items()}
    return found


def report(error: Exception, place: rendezvous.Place, store: dist.Store | None) -> int:
    """Say which rank failed first and why, in a line; exit code 1.

    The rank whose failure caused the others' says it; they only say that they stopped.
    """
    cause = rendezvous.cause_of(store, place.rank, error)
    if cause.rank == place.rank:
        show(error)
    else:
        log.error("stopped because rank %d failed: %s", cause.rank, cause.text.splitlines()[0])
        if cause.traceback:
            log.error("rank %d failed here:\n%s", cause.rank, cause.traceback.rstrip())
        log.debug("what this rank saw", exc_info=error)
    return 1


def show(error: Exception) -> None:
    """A line for an error that a user can act on, a traceback for any other."""
    if isinstance(error, DistcacheError):
        log.error(rendezvous.describe(error))
        log.debug("where it came from", exc_info=error)
    else:
        log.error(rendezvous.describe(error), exc_info=error)


if __name__ == "__main__":
    leave(main())
