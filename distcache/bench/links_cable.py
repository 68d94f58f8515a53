"""Two network namespaces joined by a cable of a given rate: two machines with a link between them,
on one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from distcache.errors import ConfigError

NONE = "none"
"""The rate that throttles nothing: both ranks on loopback."""

_RATE = re.compile(r"([1-9]\d*)(mbit|gbit)")
_ADDRESSES = ("10.213.8.1", "10.213.8.2")
_CABLES = ("dc-a", "dc-b")
"""Names inside the namespaces, where nothing else has one."""

_BURST_S, _LEAST_BURST = 1e-3, 1 << 17
"""Bytes that may leave at once: what the rate carries in 1 ms; at least two large packets."""


class NotPermittedError(ConfigError):
    """This machine does not let us make a throttled link."""


@dataclass(frozen=True)
class End:
    """Where a rank runs: the words that start a command there, the interface, its address."""

    prefix: tuple[str, ...]
    interface: str
    address: str


LOOPBACK = (End((), "lo", "127.0.0.1"),) * 2


def bits_per_second(rate: str) -> float:
    """`10gbit` as a number; ConfigError for what is no rate."""
    found = _RATE.fullmatch(rate)
    if found is None:
        raise ConfigError(f"rates={rate}: give none, or a rate such as 10gbit or 500mbit")
    return int(found[1]) * {"mbit": 1e6, "gbit": 1e9}[found[2]]


@contextmanager
def cable(rate: str) -> Iterator[tuple[End, End]]:
    """The two ends of a cable, `rate` in each direction (`none`: loopback), gone afterwards.

    Raises NotPermittedError with the reason where this machine does not permit one.
    """
    if rate == NONE:
        yield LOOPBACK
        return
    bits = bits_per_second(rate)
    for word in ("ip", "tc"):
        if shutil.which(word) is None:
            raise NotPermittedError(
                f"rates={rate} needs the command {word} (iproute2), which is missing"
            )
    if os.geteuid():
        raise NotPermittedError(f"rates={rate} needs root: only root makes network namespaces")
    names = tuple(f"distcache-links-{os.getpid()}-{end}" for end in "ab")
    try:
        for step in _steps(names, rate, max(int(bits / 8 * _BURST_S), _LEAST_BURST)):
            done = _call(*step)
            if done.returncode:
                raise NotPermittedError(
                    f"rates={rate}: {' '.join(step)} is not permitted here: {done.stderr.strip()}"
                )
        first, second = (
            End(("ip", "netns", "exec", name), card, address)
            for name, card, address in zip(names, _CABLES, _ADDRESSES, strict=True)
        )
        yield first, second
    finally:
        for name in names:
            _call("ip", "netns", "delete", name)


def _steps(names: tuple[str, ...], rate: str, burst: int) -> list[tuple[str, ...]]:
    """The commands that make the namespaces, the cable, and the throttle at both of its ends."""
    (a, b), (one, two) = names, _CABLES
    joined = ("link", "add", one, "netns", a, "type", "veth", "peer", two, "netns", b)
    steps = [*(("ip", "netns", "add", name) for name in names), ("ip", *joined)]
    for name, card, address in zip(names, _CABLES, _ADDRESSES, strict=True):
        steps.append(("ip", "-n", name, "address", "add", f"{address}/24", "dev", card))
        steps += [("ip", "-n", name, "link", "set", device, "up") for device in ("lo", card)]
        throttle = ("root", "tbf", "rate", rate, "burst", str(burst), "latency", "50ms")
        steps.append(("tc", "-n", name, "qdisc", "add", "dev", card, *throttle))
    return steps


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True)
