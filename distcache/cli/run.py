"""What the commands share: processes, logs, folders, and the machine that a run used."""

from __future__ import annotations

import logging
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from distcache.errors import ConfigError, human_bytes
from distcache.versions import NOT_INSTALLED, versions_here

# -----------------------------------------------------------------------------
# Logging of one rank: rank 0 speaks on stdout, all ranks' warnings and errors go to stderr.


INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def take_over_ctrl_c() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt, as `distcache/__init__` has left it until the
    imports of a command were done."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def set_up_logging(level: str = "INFO", rank: int = 0, world_size: int = 1) -> None:
    """Configure the `distcache` logger of this process; calling it again replaces the set-up.

    `level` holds for rank 0; other ranks log warnings and above, or all with DEBUG.
    """
    logging.getLogger().setLevel(logging.WARNING)  # libraries announce themselves at INFO
    logger = logging.getLogger("distcache")
    number = logging.getLevelNamesMapping()[level.upper()]
    quiet = rank > 0 and number > logging.DEBUG
    logger.setLevel(max(number, logging.WARNING) if quiet else number)
    logger.propagate = False
    out, err = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    out.addFilter(lambda record: record.levelno < logging.WARNING)

    def fail(record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), BrokenPipeError):  # as of `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            logging.StreamHandler.handleError(out, record)

    out.handleError = fail
    out.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))

    def in_lower_case(record: logging.LogRecord) -> bool:
        record.word = record.levelname.lower()
        return record.levelno >= logging.WARNING

    err.addFilter(in_lower_case)
    who = f"rank {rank}: " if world_size > 1 else ""
    err.setFormatter(logging.Formatter(f"{who}%(word)s: %(message)s"))
    logger.handlers[:] = [out, err]


def output_folder(given: str, default: str) -> Path:
    """The folder that a user gave as `output`, or `default` with the time."""
    return Path(given or f"{default}{datetime.now():%Y-%m-%d_%H-%M-%S}")


@contextmanager
def open_folder(folder: Path, key: str) -> Iterator[None]:
    """Make the folder that a user gave as `key`, and remove it again if it is empty after an error
    in the block. Raises ConfigError where the folder cannot be made."""
    try:
        created = make_folder(folder)
    except OSError as error:
        raise not_writable(folder, key, error) from error
    try:
        yield
    except BaseException:
        remove_empty(created)
        raise


def make_folder(folder: Path, mode: int = 0o777) -> list[Path]:
    """Make a folder with its parents; those that were missing, innermost first. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=mode, exist_ok=True)
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those folders that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def not_writable(folder: Path, key: str, error: OSError) -> ConfigError:
    """The error for a folder, given as `key`, that cannot be made or written."""
    return ConfigError(f"{key}={folder} cannot be written ({error.strerror}): name another folder")


# -----------------------------------------------------------------------------
# Figures that are drawn to files: without a display, and without pyplot's state.

log = logging.getLogger(__name__)


def draw(
    path: Path, size: tuple[float, float], paint: Callable[..., None], *arguments: object
) -> bool:
    """Write what `paint(figure, *arguments)` draws on a figure of `size` inches to `path`.

    False, with a warning and without a file, where matplotlib is missing.
    """
    # Importing matplotlib reads the backend's name and raises for one that this Python does not
    # have: a notebook names its own to all commands that it starts. None is needed here.
    os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("no plots: matplotlib is not installed (pip install matplotlib)")
        return False
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    paint(figure, *arguments)
    figure.savefig(path, dpi=110)
    return True


def write_report(path: Path, parts: Sequence[str], environment: dict[str, Any]) -> None:
    """Write a report of Markdown: a title and `parts`, with the command and machine that
    `environment` names."""
    title, *rest = parts
    command = f"`{' '.join(environment['command'])}`"
    path.write_text("\n\n".join([title, command, *rest, machine_text(environment)]) + "\n")


def tidy(panel: Any, axis: str = "both") -> None:
    """A panel of a figure with a faint grid, and no frame above and to the right."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis=axis, alpha=0.3)
    panel.set_axisbelow(True)


@contextmanager
def progress_bar(stage: str, total: int | None, unit: str, done: int = 0) -> Iterator[tqdm]:
    """A bar from `done` on, with rate and remaining time on stderr; a line every ten seconds where
    no one looks."""
    often, scale = 0.2 if sys.stderr.isatty() else 10.0, unit != "table"
    how: Any = {"unit_scale": scale, "mininterval": often, "maxinterval": often}
    with tqdm(total=total, initial=done, desc=stage, unit=unit, **how) as bar:
        yield bar


# -----------------------------------------------------------------------------
# The machine, versions and commit that a run used: `environment.json` of its folder.


def describe_environment(world_size: int) -> dict[str, Any]:
    """Hardware, versions, commit and command line as JSON values; None where one is unknown."""
    import torch

    versions = {name: text for name, text in versions_here().items() if text != NOT_INSTALLED}
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "hardware": {
            "cpu": models[0] if models else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        },
        "system": platform.platform(),
        "versions": versions | {"cuda": torch.version.cuda},
        "commit": commit(Path(__file__).resolve().parents[2]),
        "command": sys.argv,
        "threads": torch.get_num_threads(),
        "world_size": world_size,
    }


def commit(checkout: Path) -> dict[str, Any] | None:
    """Commit of a checkout and whether it has changes; None where it is none, or git is missing."""
    if not (checkout / ".git").exists():
        return None

    how = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    command = ["git", "-C", str(checkout), *how]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    said = done.stdout.strip()
    return {"commit": said.removesuffix("-dirty"), "dirty": said.endswith("-dirty")}


# -----------------------------------------------------------------------------
# Processes: fresh ones for a parent that never touches a device, and how a rank ends.

STOP_GRACE_S = 60.0
"""How long a stopped job may take to write its checkpoint before it is killed, seconds."""

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME")
LAUNCH_PREFIXES = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")


def train_command(ranks: int, arguments: Sequence[str], module: str = "distcache.train"):
    """The command line of one training job of `ranks` ranks on this machine."""
    program = ["-m", module, *arguments]
    if ranks > 1:
        # torchrun by module: the interpreter's own, whatever the PATH says.
        how = ("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}")
        program = ["-m", "torch.distributed.run", *how, *program]
    return [sys.executable, *program]


def job_environment(ranks: int) -> dict[str, str]:
    """The environment of a job: without the parent's own rank, the cores shared out evenly."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH_VARIABLES and not name.startswith(LAUNCH_PREFIXES)
    }
    cores = len(os.sched_getaffinity(0))
    kept.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    return kept


def run_job(
    command: Sequence[str],
    ranks: int,
    log: Path | None = None,
    every_s: float = 10.0,
    on_wait: Callable[[], None] | None = None,
) -> int:
    """Run a job to its end and return its exit code; its output goes to `log` where one is given.

    `on_wait` is called about every `every_s` seconds. Ctrl-C and SIGTERM stop the job, orderly
    first, and are raised as KeyboardInterrupt once it has ended; a second one kills it.
    """
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = None if log is None else log.open("w")
    child: subprocess.Popen | None = None
    try:
        # A session of its own: the parent decides when the job hears of Ctrl-C.
        child = subprocess.Popen(
            command, env=job_environment(ranks), stdout=out, stderr=out, start_new_session=True
        )
        while True:
            try:
                return child.wait(every_s)
            except subprocess.TimeoutExpired:
                if on_wait is not None:
                    on_wait()
    finally:
        if child is not None:
            stop_job(child)
        if out is not None:
            out.close()
        signal.signal(signal.SIGTERM, previous)


def stop_job(child: subprocess.Popen, grace_s: float = STOP_GRACE_S) -> None:
    """End a job that still runs: ask its ranks to stop, and kill it if they do not. Ranks that
    torchrun has started end with it."""
    if child.poll() is not None:
        return
    try:
        # torchrun passes a signal on to its ranks, which sit in sessions of their own.
        child.send_signal(signal.SIGINT)
        child.wait(grace_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()


def leave(code: int) -> NoReturn:
    """End the process with `code` once everything is written, without the interpreter's teardown.

    The work and the process groups have ended by then; destructors of torch's communication
    threads that run at teardown abort the process now and then, which would turn a finished run
    into a failed one.
    """
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has nothing left to end
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True)
class Table:
    """A table of a report; cells are text, `note` says what the numbers mean."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    @classmethod
    def of(
        cls,
        title: str,
        note: str,
        columns: Sequence[tuple[str, Callable[[Any], str]]],
        entries: Iterable[Any],
    ) -> Table:
        """A row for each of `entries`; `columns`: a title, and what makes a cell of an entry."""
        rows = [tuple(cell(entry) for _, cell in columns) for entry in entries]
        return cls(title, note, tuple(name for name, _ in columns), rows)

    @property
    def section(self) -> str:
        """The table as Markdown under its title and note."""
        return f"## {self.title}\n\n{self.note}\n\n{markdown_table(self)}"

    @property
    def padded(self) -> list[list[str]]:
        """The titles and the rows with all cells of a column equally wide: the first to the left,
        the others to the right."""
        cells = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        shown = [[cell.rjust(w) for cell, w in zip(line, widths, strict=True)] for line in cells]
        for line, padded in zip(cells, shown, strict=True):
            padded[0] = line[0].ljust(widths[0])
        return shown

    @property
    def aligned(self) -> str:
        """The table for a terminal."""
        return "\n".join("  ".join(line).rstrip() for line in self.padded)


def markdown_table(table: Table) -> str:
    """The rows of a table as Markdown; all columns but the first are aligned to the right."""
    marks = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = [table.columns, tuple(marks), *table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(value: float | None, digits: int = 2) -> str:
    """A share in percent, `-` for None."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def machine_text(environment: dict[str, Any]) -> str:
    """Machine, versions and commit of an `environment.json` in two lines."""
    hardware, commit = environment["hardware"], environment["commit"] or {}
    gpus = ", ".join(gpu["name"] for gpu in hardware["gpus"]) or "no GPU"
    versions = [f"{name} {version}" for name, version in environment["versions"].items() if version]
    state = commit.get("commit", "unknown") + (" with changes" if commit.get("dirty") else "")
    return (
        f"Hardware: {hardware['cpu']}, {hardware['cores']} cores, "
        f"{human_bytes(hardware['memory_bytes'])}, {gpus}. {environment['world_size']} rank(s), "
        f"{environment['threads']} thread(s) each.\n"
        f"Versions: {', '.join(versions)}. Commit: {state}."
    )


def plain_numbers(panel: Any) -> None:
    """Numbers such as 0.5 and 20 on logarithmic axes, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(lambda *_: ""))
