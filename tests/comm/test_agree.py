"""Work of all ranks: values by rank, or every rank raises."""

from __future__ import annotations

from ranks import run_ranks

from distcache.comm.agreement import agree_on, on_first, together
from distcache.comm.failure import is_secondary
from distcache.comm.rendezvous import differences
from distcache.comm.world import close_world, open_world
from distcache.errors import ConfigError, PeerError


def outcomes(rank: int, size: int) -> list[str]:
    world = open_world("cpu", timeout_s=60)
    seen = []

    def fail(kind: type[Exception], *ranks: int, first: bool = False):
        def work() -> int:
            if rank in ranks:
                raise kind(f"no {rank}")
            return rank

        try:
            seen.append(str((on_first if first else together)(world, work)))
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
            assert is_secondary(error) == (rank not in ranks), "which rank was the cause"

    fail(ConfigError)
    fail(ConfigError, 1)
    fail(KeyError, 0, 2)
    fail(ConfigError, first=True)
    fail(ConfigError, 0, first=True)
    close_world(world)
    return seen


def test_all_ranks_learn_of_a_failure() -> None:
    first, second, third = run_ranks(outcomes, 3)
    assert first == [
        "[0, 1, 2]",
        "ConfigError: rank 1: no 1",
        "KeyError: 'no 0'",
        "0",
        "ConfigError: no 0",
    ]
    assert second == [
        "[0, 1, 2]",
        "ConfigError: no 1",
        f"{PeerError.__name__}: rank 0: KeyError: 'no 0'",
        "0",
        "ConfigError: rank 0: no 0",
    ]
    assert third[1:] == ["ConfigError: rank 1: no 1", "KeyError: 'no 2'", *second[3:]]


def test_a_difference_names_every_value_and_its_ranks() -> None:
    same = {"rows": 4, "seed": 0}
    seen = [same, same, same, {"rows": 5, "seed": 0}, {"seed": 0}, {"rows": 4, "seed": 7}]
    assert differences(seen) == [
        "rows is 4 on ranks 0-2, 5, 5 on rank 3 and not there on rank 4",
        "seed is 0 on ranks 0-4 and 7 on rank 5",
    ]
    assert differences([same, dict(same)]) == differences([]) == []


def disagreeing(rank: int, size: int) -> list[str]:
    world = open_world("cpu", timeout_s=60)
    seen = []
    for values in (
        {"rows": 4},
        {"rows": 4 + rank},
        {name: rank for name in "abcde"},
    ):
        try:
            agree_on(world, values)
            seen.append("agreed")
        except ConfigError as error:
            seen.append(str(error))
    close_world(world)
    return seen


def test_ranks_that_disagree_all_say_so() -> None:
    first, second = run_ranks(disagreeing, 2)
    assert first == second and first[0] == "agreed"
    assert first[1].startswith("the ranks differ: rows is 4 on rank 0 and 5 on rank 1; start all")
    assert "c is 0 on rank 0 and 1 on rank 1 (and 2 more); start" in first[2]
