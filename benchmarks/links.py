"""The step's bench on a link of a given rate: `python -m benchmarks.links rate=10gbit ...`, and any
words of `benchmarks.step`, such as `size=dcnv2 modes=table_wise,row_wise,replicated,sharded,auto`.

Two ranks, each a node of its own. A throttled link joins two network namespaces with a cable whose
ends `tc` throttles (as root, on Linux); `rate=none`: both are on loopback. What the link carries is
measured before, and logged.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.ranks import End, run_ranks
from distcache.cli.run import set_up_logging
from distcache.errors import ConfigError, DistcacheError

log = logging.getLogger("distcache.benchmarks.links")

NONE = "none"
"""The rate that throttles nothing: both ranks on loopback."""

_RATE = re.compile(r"([1-9]\d*)(mbit|gbit)")
_ADDRESSES, _CARDS = ("10.213.8.1", "10.213.8.2"), ("dc-a", "dc-b")
"""Inside the namespaces, where nothing else has them."""

_LEAST_BURST = 1 << 17
"""Bytes that may leave at once: what the rate carries in 1 ms, but at least two large packets."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step's bench on the link; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    set_up_logging("INFO")
    if "--help" in given or "-h" in given or not given:
        sys.stdout.write(__doc__ or "")
        return 0
    rates = [word.removeprefix("rate=") for word in given if word.startswith("rate=")]
    words = [word for word in given if not word.startswith("rate=")]
    try:
        if len(rates) != 1:
            raise ConfigError("give rate=none, or a rate such as rate=10gbit, once")
        sys.stdout.write(measure(rates[0], words))
    except DistcacheError as error:
        log.error("%s", error)
        return 1
    except KeyboardInterrupt:
        log.error("interrupted: ranks and namespaces are gone")
        return 130
    return 0


def measure(rate: str, words: Sequence[str]) -> str:
    """What `benchmarks.step` says on rank 0 of two, on a link of a rate.

    Raises ConfigError where the machine does not permit the link, and with the log of a rank that
    failed.
    """
    with cable(rate) as ends, tempfile.TemporaryDirectory(prefix="links-") as name:
        folder = Path(name)
        want = {"width": 16, "tables": 26, "batch": 2048, "optim": "sgd", "out": name}
        want["table_rows"] = [1000] * 26
        run_ranks(["-m", "distcache.cli.plan_run", json.dumps(want)], ends, folder)
        link = json.loads((folder / "cluster.json").read_text())["between"]
        gbits, ms = 8e-9 * link["bandwidth"], 1e3 * link["latency"]
        log.info("rate %s: %.2f Gb/s both ways at once, %.2f ms at least", rate, gbits, ms)
        run_ranks(["-m", "benchmarks.step", f"link={rate}", *words], ends, folder)
        return (folder / "rank0.log").read_text()


@contextmanager
def cable(rate: str) -> Iterator[tuple[End, ...]]:
    """The two ends of a cable, `rate` in each direction (`none`: loopback), gone afterwards.

    Raises ConfigError with the reason where this machine does not permit one.
    """
    if rate == NONE:
        yield (End(), End())
        return
    found = _RATE.fullmatch(rate)
    if found is None:
        raise ConfigError(f"rate={rate}: give none, or a rate such as 10gbit or 500mbit")
    burst = max(int(found[1]) * {"mbit": 125, "gbit": 125_000}[found[2]], _LEAST_BURST)
    for word in ("ip", "tc"):
        if shutil.which(word) is None:
            raise ConfigError(f"rate={rate} needs the command {word} (iproute2), which is missing")
    if os.geteuid():
        raise ConfigError(f"rate={rate} needs root: only root makes network namespaces")
    names = tuple(f"distcache-links-{os.getpid()}-{end}" for end in "ab")
    try:
        for command in _commands(names, rate, burst):
            done = _call(*command)
            if done.returncode:
                why = f"{' '.join(command)} is not permitted here: {done.stderr.strip()}"
                raise ConfigError(f"rate={rate}: {why}")
        places = zip(names, _CARDS, _ADDRESSES, strict=True)
        yield tuple(End(("ip", "netns", "exec", name), *place) for name, *place in places)
    finally:
        for name in names:
            _call("ip", "netns", "delete", name)


def _commands(names: Sequence[str], rate: str, burst: int) -> list[tuple[str, ...]]:
    """The commands that make the namespaces, the cable, and the throttle at both of its ends."""
    (a, b), (one, two) = names, _CARDS
    joined = ("link", "add", one, "netns", a, "type", "veth", "peer", two, "netns", b)
    commands = [*(("ip", "netns", "add", name) for name in names), ("ip", *joined)]
    for name, card, address in zip(names, _CARDS, _ADDRESSES, strict=True):
        commands.append(("ip", "-n", name, "address", "add", f"{address}/24", "dev", card))
        commands += [("ip", "-n", name, "link", "set", device, "up") for device in ("lo", card)]
        throttle = ("root", "tbf", "rate", rate, "burst", str(burst), "latency", "50ms")
        commands.append(("tc", "-n", name, "qdisc", "add", "dev", card, *throttle))
    return commands


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
