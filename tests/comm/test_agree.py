"""Work of all ranks: values by rank, or every rank raises."""

from __future__ import annotations

from ranks import run_ranks

from distcache.comm.agree import together
from distcache.comm.world import close_world, open_world
from distcache.errors import ConfigError, PeerError


def outcomes(rank: int, size: int) -> list[str]:
    world = open_world("cpu", timeout_s=60)
    seen = []

    def fail(kind: type[Exception], *ranks: int):
        def work() -> int:
            if rank in ranks:
                raise kind(f"no {rank}")
            return rank

        try:
            seen.append(str(together(world, work)))
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")

    fail(ConfigError)
    fail(ConfigError, 1)
    fail(KeyError, 0, 2)
    fail(ConfigError)
    close_world(world)
    return seen


def test_all_ranks_learn_of_a_failure() -> None:
    first, second, third = run_ranks(outcomes, 3)
    assert first == [
        "[0, 1, 2]",
        "ConfigError: rank 1: no 1",
        "KeyError: 'no 0'",
        "[0, 1, 2]",
    ]
    assert second == [
        "[0, 1, 2]",
        "ConfigError: no 1",
        f"{PeerError.__name__}: rank 0: KeyError: 'no 0'",
        "[0, 1, 2]",
    ]
    assert third[1:] == ["ConfigError: rank 1: no 1", "KeyError: 'no 2'", "[0, 1, 2]"]
