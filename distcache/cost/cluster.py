"""The cluster that a prediction is for: its ranks, its links, what a rank computes, as a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distcache.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """What one rank can send: `bandwidth` bytes/s in one direction, `latency` seconds per message.

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
"""What starting a collective takes, in seconds, however little it sends."""


@dataclass(frozen=True)
class Compute:
    """What a rank computes in which time, in seconds.

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
    """What a rank's threads take on its host, in seconds on a core; all 0: nothing.

    Training: `launch_s`, a kernel or copy that any thread issues; `training_s`, its own work of a
    step, without the dense part's, and `summing_s`, more with several ranks. The planner:
    `planning_s` of a step, `id_s` of an id, `named_s` of a distinct row that ranks name to a home,
    `decided_s` of one that a home decides on, `fetched_s` of one that it fetches, `placed_s` of one
    that a rank's plan has; `serial`: the share of all these, but for `planning_s`, that the
    planner's thread does alone, `planner_threads`: k, which share the rest where it is long
    enough (`planner.threads.LEAST_S`). The talker: `exchange_s` of an exchange of two planners,
    `told_s` of a number that one tells, or hears. Movement: `moving_s` of a step, `listed_s` of a
    distinct row that the rank names, `moved_s` of one that its home fetches or writes back, `row_s`
    of one gathered or scattered. All together: `python_s` of a step in which one of them has
    Python's interpreter for its own work, and the others wait if they want it, and
    `python_more_s`, more with several ranks. Of mode `hybrid`, where training's thread is the
    only one: `hybrid_s`, its own work of a step, which is TorchRec's and the package's, and
    `hybrid_more_s`, more with several ranks. `name`: where the numbers come from.
    """

    launch_s: float = 0.0
    training_s: float = 0.0
    summing_s: float = 0.0
    planning_s: float = 0.0
    id_s: float = 0.0
    named_s: float = 0.0
    decided_s: float = 0.0
    fetched_s: float = 0.0
    placed_s: float = 0.0
    exchange_s: float = 0.0
    told_s: float = 0.0
    moving_s: float = 0.0
    listed_s: float = 0.0
    moved_s: float = 0.0
    row_s: float = 0.0
    python_s: float = 0.0
    python_more_s: float = 0.0
    hybrid_s: float = 0.0
    hybrid_more_s: float = 0.0
    serial: float = 1.0
    planner_threads: int = 1
    name: str = "given"


HOST = HostTimes(
    launch_s=7e-6,
    training_s=3.72e-4,
    summing_s=6.21e-7,
    planning_s=4.97e-4,
    id_s=1.52e-8,
    named_s=1.69e-8,
    decided_s=2.27e-8,
    fetched_s=7.97e-8,
    placed_s=4.62e-9,
    exchange_s=3.74e-4,
    told_s=1.1e-9,
    moving_s=4.09e-4,
    listed_s=5.72e-9,
    moved_s=1.74e-8,
    row_s=1.67e-8,
    python_s=1.11e-3,
    python_more_s=3.25e-4,
    hybrid_s=1.07e-3,
    hybrid_more_s=7.27e-4,
    serial=0.0302,
    planner_threads=6,
    name="measured on 2 shared cores of an AMD EPYC",
)
"""Measured on a CPU, except `launch_s`, an estimate of the time of a kernel launch beside a GPU,
and `planner_threads`, of which `trainer.planner_threads=auto` takes the rank's share of the cores,
14 in a DGX H100. A planner's wait for those of other ranks is
in none. Constants vary from run to run of one machine by a third, and single ones of a fit by more.
"""


DEVICES: dict[str, tuple[float, float, float]] = {
    "a100": (80e9, 2.039e12, 19.5e12),
    "h100": (80e9, 3.35e12, 67e12),
    "h200": (141e9, 4.8e12, 67e12),
}
"""Devices by name: memory (bytes), its bandwidth (bytes/s) and peak float32 operations per second
outside tensor cores, of NVIDIA's data sheets of A100 80GB SXM, H100 SXM and H200 SXM."""

REACHED = (0.8, 0.67)
"""Of both rates, what large kernels reach: 2.7 TB/s and 45 TFLOP/s of an H100. An estimate."""

_PASSES = 9
"""How often a step reads or writes a number of the dense part's layers, forward and backward: 2.2
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
    **{"compute": Compute, "threads": HostTimes},
}
"""What a cluster is made of."""


@dataclass(frozen=True)
class Cluster:
    """W = `ranks` ranks on `nodes` nodes of as many each.

    `host`: a rank's link to its host's memory; `inside`: to ranks of its node; `between`: of one
    rank to other nodes (`Link.shared` where ranks share a network card), None on one node;
    `device_memory`: bytes of a rank's device, None: not limited; `collective_s`: seconds to start a
    collective; `overlap`: share of the movement that could hide behind compute which does, and of
    what the `threads` of a rank's host do beside it.
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
    threads: HostTimes = field(default_factory=HostTimes)

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
        for key, share in (("overlap", self.overlap), ("threads.serial", self.threads.serial)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{key}={share}: it is a share, from 0 to 1")
        above = {"bandwidth": "bytes per second, such as 25e9", "planner_threads": "how many"}
        for part in _PARTS:
            for name, value in vars(getattr(self, part) or self.host).items():
                strange = not (isinstance(value, int | float) and math.isfinite(value))
                if name != "name" and (strange or value < 0 or (value == 0 and name in above)):
                    least = "above 0" if name in above else "at least 0"
                    how = above.get(name, "seconds")
                    raise ConfigError(f"{part}.{name}={value}: it must be {least}: give {how}")

    @property
    def local_ranks(self) -> int:
        """Ranks of one node."""
        return self.ranks // self.nodes


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
    """The cluster that a file, or the folder that has it, describes.

    Raises ConfigError naming `key`, the file and the way out where it cannot be read, or describes
    none.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    how = f"give the {FILE} of python -m distcache.plan, or leave {key} out to measure"
    try:
        values = json.loads(file.read_text())
        known = {name: kind for name, kind in _PARTS.items() if values.get(name) is not None}
        return Cluster(**values | {name: kind(**values[name]) for name, kind in known.items()})
    except OSError as error:
        raise ConfigError(f"{key}={path}: cannot be read ({error.strerror}): {how}") from error
    except ConfigError as error:
        raise ConfigError(f"{key}={path}: {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{key}={path} describes no cluster ({error}): {how}") from error
