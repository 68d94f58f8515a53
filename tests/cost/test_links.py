"""Clusters and links: what is refused, and how links add up."""

from __future__ import annotations

import math

import pytest

from distcache.cost.cluster import (
    PRESETS,
    SOURCES,
    Cluster,
    Compute,
    Link,
    check_world,
    device_compute,
    parse_link,
)
from distcache.errors import ConfigError

LINK = Link(1e9, 1e-6)


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.nan, math.inf])
def test_bandwidth_is_above_zero(bandwidth: float) -> None:
    with pytest.raises(ConfigError, match=r"given.bandwidth=.*must be above 0: give bytes per"):
        Link(bandwidth)


def test_links_are_named_or_described() -> None:
    assert parse_link("inside", "NVLink4") == PRESETS["nvlink4"]
    described = parse_link("inside", {"bandwidth": "300e9", "latency": 5e-6})
    assert (described.bandwidth, described.latency) == (300e9, 5e-6)
    assert parse_link("host", {"bandwidth": 1e9}).latency == 0
    for value, said in (
        ("nvlink9", r"inside=nvlink9: the link is not known: give a preset \(pcie4, .*400gbe\)"),
        (None, r"inside=None"),
        ({"latency": 1e-6}, r"inside=.*the bandwidth is missing: give a preset"),
        ({"bandwidth": 0}, r"inside.bandwidth=0.0: it must be above 0"),
        ({"bandwidth": "fast"}, r"inside.bandwidth=fast is not a number"),
        ({"bandwidth": 1, "latency": -1}, r"inside.latency=-1.0: it must be at least 0"),
        ({"bandwidth": 1, "speed": 2}, r"inside.speed: no such key"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_link("inside", value)


def test_every_preset_has_its_source() -> None:
    assert set(PRESETS) == set(SOURCES)
    # What the sources say, multiplied out, in bytes per second.
    assert PRESETS["pcie4"].bandwidth == pytest.approx(16 * 16e9 * 128 / 130 / 8, rel=0.001)
    assert PRESETS["pcie5"].bandwidth == pytest.approx(16 * 32e9 * 128 / 130 / 8, rel=0.001)
    assert PRESETS["nvlink3"].bandwidth == 12 * 25e9
    assert PRESETS["nvlink4"].bandwidth == 18 * 25e9
    for gigabits in (100, 200, 400):
        assert PRESETS[f"{gigabits}gbe"].bandwidth == gigabits * 1e9 / 8


def test_nodes_divide_ranks_and_are_linked() -> None:
    assert Cluster(8, LINK, LINK, LINK, nodes=2).local_ranks == 4
    with pytest.raises(ConfigError, match=r"nodes=3 does not divide world_size=8"):
        Cluster(8, LINK, LINK, LINK, nodes=3)
    with pytest.raises(ConfigError, match=r"nodes=2, and the bandwidth between them is missing"):
        Cluster(8, LINK, LINK, nodes=2)
    with pytest.raises(ConfigError, match=r"world_size=0"):
        Cluster(0, LINK, LINK)
    with pytest.raises(ConfigError, match=r"overlap=2"):
        Cluster(1, LINK, LINK, overlap=2)
    with pytest.raises(ConfigError, match=r"device_memory=0"):
        Cluster(1, LINK, LINK, device_memory=0)


def test_a_cluster_describes_the_world_that_runs() -> None:
    found = Cluster(8, LINK, LINK, LINK, nodes=2)
    check_world(found, (4, 4))
    with pytest.raises(ConfigError, match=r"world_size=8, but 4 ranks run: describe world_size=4"):
        check_world(found, (4,))
    with pytest.raises(ConfigError, match=r"nodes=2 of 4 ranks, but 8 ranks run.*describe nodes=1"):
        check_world(found, (8,))


def test_nodes_of_different_sizes_are_described_as_one() -> None:
    for sizes in ((3, 1), (2, 1, 1)):
        check_world(Cluster(4, LINK, LINK), sizes)
        with pytest.raises(ConfigError, match=r"ranks run on its nodes.*one: describe nodes=1"):
            check_world(Cluster(4, LINK, LINK, LINK, nodes=2), sizes)


def test_seconds_of_a_link() -> None:
    assert LINK.seconds(1e6, 3) == pytest.approx(3e-6 + 1e-3)
    assert LINK.seconds(0, 3) == 0
    assert LINK.shared(4).seconds(1e6) == pytest.approx(1e-6 + 4e-3)


def test_a_device_computes_at_its_peak() -> None:
    found = device_compute("h100", 16, 32, 1_000_000)
    assert found.sample_s == pytest.approx(6e6 / 67e12)
    assert found.copy_s == pytest.approx(2 * 64 / 3.35e12)
    assert found.update_s > found.copy_s > 0 and found.lookup_s > found.copy_s
    with pytest.raises(ConfigError, match=r"device=tpu is unknown"):
        device_compute("tpu", 16, 0, 1)
    with pytest.raises(ConfigError, match=r"compute.update_s=-1"):
        Compute(update_s=-1)
