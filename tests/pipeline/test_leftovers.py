"""After a run nothing is left: no thread, no file, no shared memory, and every exit code is 0.

As a script (`<repetitions> [fails]`) this prints one JSON list per repetition: the exit codes of
two ranks, each an interpreter that ends on its own. They are forked from the process of the script,
which has imported everything and started nothing.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import launching
import pytest
from protocol_cases import Raises, batches, make, state, train
from ranks import free_port

from distcache.cli.run import leave
from distcache.comm.rendezvous import cause_of
from distcache.comm.world import close_world, open_world

TESTS = Path(__file__).resolve().parent.parent
RANKS = 2


@pytest.mark.parametrize(
    "repetitions",
    [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
@pytest.mark.parametrize(("arguments", "code"), [((), 0), (("fails",), 1)])
def test_nothing_is_left(arguments: tuple, code: int, repetitions: int) -> None:
    """A rank that leaves threads, files or mapped memory behind ends with code 3; with `fails` the
    model of rank 1 raises, and both ranks end with code 1."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    before = set(os.listdir("/dev/shm"))
    done = launching.run(
        [sys.executable, __file__, str(repetitions), *arguments],
        env=environment,
        capture_output=True,
        timeout=30 + 20 * repetitions,
    )
    assert done.returncode == 0, done.stderr
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "distcache" in name}
    codes = [json.loads(line) for line in done.stdout.splitlines()]
    assert codes == [[code, code]] * repetitions, (codes, done.stderr)


def run(fails: bool) -> None:
    """Stop one stream with plans on their way, end another, leave a third one half-read; or end as
    the command line does when the model of rank 1 raises, with plans on their way."""
    world = open_world("cpu", "gloo", 60)
    mode = make(world, 8, 8, model=Raises(2 if fails and world.rank else None))
    try:
        train(mode, batches(world, range(6)), stop_at=1 if not (fails or world.rank) else None)
        train(mode, batches(world, range(2, 4)))
        state(mode)
        stream = mode.stream(batches(world, range(4, 6)))
        mode.train_step(next(stream))
    except Exception as error:
        if not fails:
            raise
        cause_of(world.store, world.rank, error)
    mode.close()
    close_world(world, orderly=not fails)


def left_behind() -> list[str]:
    """What should not be there any more."""
    gc.collect()
    left = [thread.name for thread in threading.enumerate() if "distcache" in thread.name]
    left += [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(link)
            left += [target] * ("memfd" in target or target.startswith("/dev/shm"))
    return left


def repeat(fails: bool) -> list[int]:
    """Exit codes of one repetition, by rank."""
    processes, port = [], free_port()
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:
            here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
            here |= {"LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1"}
            os.environ.update({key: str(value) for key, value in here.items()})
            run(fails)
            if fails:
                leave(1)
            left = left_behind()
            sys.stderr.write(f"rank {rank} left {left}\n" if left else "")
            sys.exit(3 if left else 0)
        processes.append(process)
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        print(json.dumps(repeat("fails" in sys.argv)), flush=True)
