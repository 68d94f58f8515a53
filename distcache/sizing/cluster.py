"""The cluster that a prediction is for: its ranks, its links, what a rank computes, as a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distcache.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """Link of one rank: `bandwidth` bytes/s in one direction, `latency` seconds per message.

    A rank's messages to its peers go one after the other, those over different links side by side
    (Hockney 1994; for all-to-all by pairwise exchange: Thakur, Rabenseifner & Gropp 2005).
    """

    bandwidth: float
    latency: float = 0.0
    name: str = "given"

    def seconds(self, nbytes: float, messages: float = 1) -> float:
        """Time to send `nbytes` in so many messages; 0 where nothing is sent."""
        return messages * self.latency + nbytes / self.bandwidth if nbytes > 0 else 0.0

    def shared(self, ranks: float) -> Link:
        """The link of one of `ranks` ranks that use it at once."""
        return Link(self.bandwidth / ranks, self.latency, self.name)


PRESETS: dict[str, Link] = {
    "pcie4": Link(31.5e9, 1.0e-6, "pcie4"),  # PCI Express Base 4.0: 16 lanes x 16 GT/s x 128/130
    "pcie5": Link(63.0e9, 1.0e-6, "pcie5"),  # PCI Express Base 5.0: 16 lanes x 32 GT/s x 128/130
    "nvlink3": Link(300e9, 0.6e-6, "nvlink3"),  # NVIDIA A100: 12 links x 25 GB/s each way
    "nvlink4": Link(450e9, 0.6e-6, "nvlink4"),  # NVIDIA H100: 18 links x 25 GB/s each way
    "100gbe": Link(12.5e9, 2.7e-6, "100gbe"),  # IEEE 802.3, InfiniBand
    "200gbe": Link(25e9, 2.7e-6, "200gbe"),
    "400gbe": Link(50e9, 2.7e-6, "400gbe"),
}
"""Links by name: raw figures of the specifications, in one direction. Software reaches less:
measure where it matters. Latencies are those of NCCL's own cost model for small messages (`hwLat`
of its `tuning.cc`, ring, protocol LL: 0.6 us NVLink, 1.0 PCIe, 2.7 network), and so is
`COLLECTIVE_S` (`baseLat`)."""

COLLECTIVE_S = 6.6e-6
"""Seconds to start a collective, whatever its size."""


@dataclass(frozen=True)
class Compute:
    """Seconds of a rank's computations.

    `lookup_s`: of one id, its row read into a bag, forward, and its gradient added, backward;
    `update_s`: of one row that the optimizer updates; `copy_s`: of one row copied on the device,
    without its state; `sample_s`: of one sample in the dense part, forward and backward.
    """

    lookup_s: float = 0.0
    update_s: float = 0.0
    copy_s: float = 0.0
    sample_s: float = 0.0


@dataclass(frozen=True)
class HostTimes:
    """Seconds that the threads of a rank take on its host; all 0: nothing.

    `launch_s`: of a kernel or copy that is issued; `id_s`: of an id that is planned, by all planner
    threads together; `row_s`: of a row that the mover gathers from host memory or scatters there;
    `step_s`: of a step, whatever its size: Python, of which one thread runs at a time. `name`: the
    source of the numbers.
    """

    launch_s: float = 0.0
    id_s: float = 0.0
    row_s: float = 0.0
    step_s: float = 0.0
    name: str = "given"


HOST = HostTimes(
    launch_s=1.9e-5,
    id_s=1.8e-8,
    row_s=6e-8,
    step_s=1.1e-3,
    name="measured beside an H100, step_s on two CPU cores",
)
"""Defaults, from runs on a machine with an H100 and 16 CPU cores (docs/results/gpu.md): eight
threads plan 1,048,570 ids in 18.7 ms, and gather 114,645 rows in 6.7 ms; scattering is taken to
be as fast. `step_s` is what all threads take for a step of 64 samples on two CPU cores."""


DEVICES: dict[str, tuple[float, float, float]] = {
    "a100": (80e9, 2.039e12, 19.5e12),
    "h100": (80e9, 3.35e12, 67e12),
    "h200": (141e9, 4.8e12, 67e12),
}
"""Devices by name: memory (bytes), its bandwidth (bytes/s) and peak float32 operations per second
outside tensor cores, of NVIDIA's data sheets of A100 80GB SXM, H100 SXM and H200 SXM."""

REACHED = (0.8, 0.67)
"""Shares of both rates that large kernels reach: 2.7 TB/s and 45 TFLOP/s of an H100, estimated."""

_PASSES = 9
"""Reads and writes of each number of the dense part's layers, forward and backward: 2.2
GB of DLRM's 16,384 samples of 26 features of width 64, counted kernel by kernel."""


def device_compute(
    name: str, dim: int, state_width: int, dense_parameters: int, dense_outputs: float = 0.0
) -> Compute:
    """Times of a device of `DEVICES` at the rates that it reaches.

    A lookup reads and writes a row forward and again backward; an update reads row, state and
    gradient and writes row and state; a copy reads and writes a row; a sample takes 2 operations
    per dense parameter forward and 4 backward, and `_PASSES` over the `dense_outputs` numbers that
    its layers take and give. Rows are float32 of `dim` elements with `state_width` more of state.
    """
    memory, flops = (peak * part for peak, part in zip(DEVICES[name][1:], REACHED, strict=True))
    row, state = 4.0 * dim, 4.0 * state_width
    update = (3 * row + 2 * state) / memory
    sample = 6 * dense_parameters / flops + 4.0 * _PASSES * dense_outputs / memory
    return Compute(4 * row / memory, update, 2 * row / memory, sample)


_PARTS = {
    **dict.fromkeys(("host", "inside", "between"), Link),
    **{"compute": Compute, "host_times": HostTimes},
}
"""Parts of a cluster that are records of their own."""


@dataclass(frozen=True)
class Cluster:
    """W = `ranks` ranks on `nodes` nodes of as many each.

    `host`: a rank's link to its host's memory; `inside`: to ranks of its node; `between`: of one
    rank to other nodes (`Link.shared` where ranks share a network card), None on one node;
    `device_memory`: bytes of a rank's device, None: not limited; `collective_s`: seconds to start a
    collective; `overlap`: share of what could hide behind compute that does: of movement, and of
    the time that the threads of a rank's host take (`host_times`).
    """

    ranks: int
    host: Link
    inside: Link
    between: Link | None = None
    nodes: int = 1
    device_memory: int | None = None
    compute: Compute = field(default_factory=Compute)
    collective_s: float = COLLECTIVE_S
    overlap: float = 1.0
    host_times: HostTimes = field(default_factory=HostTimes)

    def __post_init__(self) -> None:
        for key, value in (("world_size", self.ranks), ("nodes", self.nodes)):
            if value < 1:
                raise ConfigError(f"{key}={value}: give at least 1")
        if self.ranks % self.nodes:
            raise ConfigError(
                f"nodes={self.nodes} does not divide world_size={self.ranks}: every node has as "
                "many ranks; give numbers that do"
            )
        if self.nodes > 1 and self.between is None:
            raise ConfigError(
                f"nodes={self.nodes}, and the bandwidth between them is missing: give between= a "
                f"preset ({', '.join(PRESETS)}) or '{{bandwidth: 25e9, latency: 3e-6}}'"
            )
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap={self.overlap}: it is a share, from 0 to 1")
        for part in _PARTS:
            for name, value in vars(getattr(self, part) or self.host).items():
                if name != "name":
                    _check_number(f"{part}.{name}", value)

    @property
    def local_ranks(self) -> int:
        """Ranks of one node."""
        return self.ranks // self.nodes


def _check_number(key: str, value: object) -> None:
    """Raise ConfigError unless `value` is a bandwidth above 0, or seconds of at least 0."""
    positive = key.endswith(".bandwidth")
    number = isinstance(value, int | float) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        rule = "above 0: give bytes per second, such as 25e9"
        rule = rule if positive else "at least 0: give seconds"
        raise ConfigError(f"{key}={value}: it must be {rule}")


def parse_link(key: str, value: str | Mapping[str, Any] | None) -> Link:
    """The link that a user gave `key` as: a name of `PRESETS`, or bandwidth and latency.

    Raises ConfigError naming key, value and way out.
    """
    how = f"a preset ({', '.join(PRESETS)}) or '{{bandwidth: 25e9, latency: 5e-6}}'"
    if isinstance(value, str) and value.lower() in PRESETS:
        return PRESETS[value.lower()]
    try:
        found: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Link), value))
    except (ValueError, OmegaConfBaseException) as error:
        why = str(error).partition("\n")[0] if isinstance(value, Mapping) else "no such link"
        raise ConfigError(f"{key}={value}: {why}: give {how}") from error
    return replace(found, name=key)


def check_world(cluster: Cluster, sizes: Sequence[int]) -> None:
    """Raise ConfigError where `cluster` does not describe a running world with `sizes` ranks on its
    nodes. Nodes of different numbers of ranks count as one, as where links are measured."""
    even = len(set(sizes)) == 1
    want, found = (sum(sizes), len(sizes) if even else 1), (cluster.ranks, cluster.nodes)
    if want != found:
        ranks = f"{', '.join(map(str, sizes))} ranks run on the nodes"
        raise ConfigError(
            f"the cluster description has world_size={found[0]} on nodes={found[1]}, but {ranks}"
            f"{'' if even else ', which count as one'}: describe world_size={want[0]} and "
            f"nodes={want[1]}, or start as many as it says"
        )


# -----------------------------------------------------------------------------
# A cluster as a file: `cluster.json`, which `distcache.plan` writes and `cache.cluster` reads.

FILE = "cluster.json"


def write_cluster(cluster: Cluster, folder: Path) -> Path:
    """Write `cluster.json` into `folder`; its path."""
    path = folder / FILE
    path.write_text(json.dumps(asdict(cluster), indent=1) + "\n")
    return path


def read_cluster(path: str | Path, key: str = "cache.cluster") -> Cluster:
    """Return the cluster that a file, or the folder that holds it, describes.

    Raises ConfigError naming `key`, the file and the remedy if it cannot be read, describes no
    cluster, or was written by a version that measured other times.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    remedy = f"give the {FILE} of python -m distcache.plan, or leave {key} out to measure"
    try:
        values = json.loads(file.read_text())
        _check_keys(values)
        parts = {name: kind for name, kind in _PARTS.items() if values.get(name) is not None}
        return Cluster(**values | {name: kind(**values[name]) for name, kind in parts.items()})
    except OSError as error:
        raise ConfigError(f"{key}={path}: cannot be read ({error.strerror}): {remedy}") from error
    except ConfigError as error:
        raise ConfigError(f"{key}={path}: {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{key}={path} describes no cluster ({error}): {remedy}") from error


def _check_keys(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys that a cluster does not have: those of other versions."""
    for part, kind in {"": Cluster, **_PARTS}.items():
        section = values.get(part) or {} if part else values
        if unknown := sorted(section.keys() - {f.name for f in fields(kind)}):
            names = ", ".join(f"{part}.{name}".lstrip(".") for name in unknown)
            raise ConfigError(
                f"the file is of another version of distcache; this one has no {names}: measure "
                "again with python -m distcache.plan measure=true"
            )
