"""Mutants of the package, each of which breaks one law in one line, and a runner that lets the
tests look for them.

    python tests/mutants.py [NAME ...]

For each mutant the default tests that are listed with it run until the first failure on a copy of
this checkout with the one change. A mutant whose tests all pass survives: no test holds that law.
The laws are those of movement and of what ranks tell one another: a row is never read stale, no
update is lost, bits depend on nothing but ids and values, no rank waits in vain.

Exits with 1 where a mutant survives, where its text is not found in the package exactly once
(`stale`: the code has changed, bring the mutant up to date), or where the listed tests fail
without it.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

MUTANTS = r"""
holds-end-early: a slot used by step s is held until step s + P has been planned
  - for before in range(step - prefetch, step + 1):
  + for before in range(step, step + 1):
  tests/planner/test_victims.py -k slow_twin
hits-not-held: a row of the step itself is held: it does not leave for another row of that step
  - table[slot, LAST], table[slot, NEXT] = step, NEVER  # held: no victim of its own step
  + pass
  tests/planner/test_victims.py -k slow_twin
victims-in-use: movement waits for the last uses of the rows that leave
  - max(step - prefetch - 1, before, -1, *latest_uses)
  + max(step - prefetch - 1, before, -1)
  tests/planner/test_laws.py -k no_stale
moves-late: where slots are not short, rows move P steps ahead, whatever the window
  - max(step - prefetch - 1, before, -1, *latest_uses)
  + max(step - 1, before, -1, *latest_uses)
  tests/planner/test_laws.py -k tight_caches
victims-of-own-home: movement waits for the victims' last uses over all homes, not the own one's
  - told.latest_use = numbers[:, :, 2].max(0).tolist()
  + told.latest_use = numbers[self._rank, :, 2].tolist()
  tests/pipeline/test_streams.py -k random
moves-before-apply: rows move once `apply` of the step that they must follow is done, not before
  - return self._unmoved[0].move_after <= self._released
  + return self._unmoved[0].move_after <= self._released + 1
  tests/parallel/test_exact.py -k "overlapped and 1"
early-rows-stale: a sharded row that a step on its way changes travels after that step's update
  - bound = move_after if parts.early else _BEFORE_ALL
  + bound = move_after + 1 if parts.early else _BEFORE_ALL
  tests/planner/test_laws.py -k sharded
window-short: step s is decided when the ids through s + L are known, no sooner
  - len(waiting) > window > 0
  + len(waiting) >= window > 0
  tests/pipeline/test_streams.py -k "batches_are_read or travel_together"
restore-leaves-traces: how far planning was ahead of an abandoned stream leaves no trace
  - while self._past and self._past[-1][0].step > step:
  + while False:
  tests/planner/test_laws.py -k forgets
plans-outlive-their-stream: a stream that is left early discards the plans that have not moved
  - if self._stale or self.planner.ingested != self.last_step + 1:
  + if self._stale:
  tests/parallel/test_placement_ends.py -k left_early
flush-beside-movement: no row moves while the tables are made whole
  - self.quiet()
  + pass
  tests/pipeline/test_streams.py -k flush
write-back-late: a row that left and is wanted again is read after its write-back has landed
  - self._store.scatter(rows, weight, state)
  + __import__("threading").Timer(0.03, self._store.scatter, (rows, weight, state)).start()
  tests/parallel/test_exact.py -k "overlapped and 1"
state-left-behind: optimizer state travels with its row
  - ((self.weight, at, weight), (self.state, stateful, state)):
  + ((self.weight, at, weight),):
  tests/cache/test_cache.py
clean-rows-written: only rows that have changed are written back
  - dirty = self.dirty[at]
  + dirty = self.dirty[at] | True
  tests/cache/test_cache.py
sharded-updates-lost: a row that a step has changed is written back when it leaves
  - self.cache.mark_dirty(changed)
  + pass
  tests/parallel/test_exact.py -k every_cache
evaluation-dirties: a step of evaluation changes no row, so it has none written back
  - return self.cache.gather(plan.slots, where)
  + return self.cache.mark_dirty(plan.slots) or self.cache.gather(plan.slots, where)
  tests/planner/test_replay.py -k left
homes-by-remainder: strided ids do not pile up at one home
  - return found.view(np.int64)
  + return found.view(np.int64) * 0
  tests/planner/test_laws.py -k stride
memory-of-the-machine: memory is checked against the control group's limit too, before it is taken
  - return max(0, min(found))
  + return max(0, max(found))
  tests/store/test_store.py
library-sums: the bits of a row's summed gradient depend on the contributions in rank order alone
  - if native:
  + if native or plan.misses:
  tests/parallel/test_exact.py -k every_cache
bits-by-place: the bits of a row's local gradient do not depend on its place among the others
  - bag_of.index_select(0, order), segments, weights)
  + bag_of.index_select(0, order), segments, weights) * (1 + 1e-7 * (segments[:-1, None] % 2))
  tests/ops/test_reference.py -k "labels or company"
buckets-reordered: a sum of dense gradients adds up in one order from the first step of a run on
  - for _ in range(2):
  + for _ in range(0):
  tests/parallel/test_hybrid.py -k buckets
empty-slice-is-nan: a rank without a sample contributes zero
  - functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
  + functional.binary_cross_entropy_with_logits(logits, labels) * len(labels)
  tests/parallel/test_exact.py -k awkward
ranks-gradients-not-divided: under DDP the rows' gradients are the mean over the ranks
  - gradient.mul_(1.0 / size)
  + gradient.mul_(1.0)
  tests/embedding/test_contract.py -k embedding_bag
fills-not-settled: the fills beside a step come before its sums, in one order on all ranks
  - (flight.stream.settle() or flight).waited(began)
  + flight.waited(began)
  tests/parallel/test_exact.py -k overlapped
digests-not-compared: planners that run with different configurations notice
  - columns.append(_DIGEST)
  + pass
  tests/pipeline/test_streams.py -k differ
first-end-unheard: the ranks end with the first of them whose data end
  - status = Status(max(said))
  + status = Status(min(said))
  tests/pipeline/test_streams.py -k random
errors-end-in-silence: an error in one rank's data is raised on all ranks
  - return asking.error or _peer_error(verdict)
  + return asking.error
  tests/pipeline/test_streams.py -k random
left-alone: a rank that goes on with a stream that the others have left says so
  - if not stop():
  + if False:
  tests/pipeline/test_streams.py -k left
stops-of-rank-0: a request to stop on any rank stops all after the same step
  - stop = any(of & STOP for of in bits)
  + stop = bool(bits[0] & STOP)
  tests/pipeline/test_step_numbers.py
bad-losses-forgotten: nothing applies after a loss that is not finite
  - self._enabled & torch.isfinite
  + torch.isfinite
  tests/parallel/test_placement_ends.py -k sticky
failures-unheard: an exception of one rank reaches the others within seconds
  - if failure.rank != rank
  + if failure.rank < 0
  tests/pipeline/test_failures.py
waiting-ranks-blamed: who is missing is named, and nobody else
  - if not waits_too(f"{self._key}/{rank}")
  + if rank >= 0
  tests/pipeline/test_failures.py
deaths-unseen: a rank that ended without a word is named at once
  - _started(process) != started
  + process < 0
  tests/pipeline/test_failures.py
different-steps-written: nobody writes unless all ranks have applied the same last step
  - if len(set(steps)) > 1:
  + if False:
  tests/pipeline/test_streams.py -k misuse
half-steps-written: nobody writes after a step that failed half-way
  - self.failed = True
  + pass
  tests/pipeline/test_failures.py -k nobody_goes_on
movement-fails-in-silence: what ends the thread that moves rows ends training, on all ranks
  - self._moving, self._broken = False, error
  + self._moving = False
  tests/pipeline/test_failures.py -k "seconds and gather"
work-fails-alone: what fails on one rank in work that all do is raised on all
  - gather_objects((value, failure),
  + gather_objects((value or b"N.", None),
  tests/comm/test_worlds.py
"""
"""Four lines for each: name and law; the text of the package; what stands there instead; pytest's
arguments."""

CHECKOUT = Path(__file__).resolve().parent.parent
LEFT_OUT = (".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "runs", "build", "dist")
PYTEST = "-x -q -rfE --tb=no --no-header -p no:cacheprovider --hypothesis-seed=0"


def killer(folder: Path, tests: str, limit_s: float) -> str:
    """What fails first of default tests in a copy of the checkout; empty where all pass. A test
    that takes longer than `limit_s` hangs."""
    command = [sys.executable, "-m", "pytest", *PYTEST.split(), "-m", "not slow"]
    command += [f"--timeout={limit_s:.0f}", *shlex.split(tests)]
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "400"}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(2 * limit_s + 60)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            with suppress(ProcessLookupError):  # what it has started goes with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        text = out.read()
    if code == 0:
        return ""
    told = re.search(r"(?m)^(?:FAILED|ERROR) ([^\s[]+)(.*)", text)
    if told:
        return ("hang: " if "Timeout (>" in told[2] else "") + told[1]
    if code < 0:
        return f"hang or crash: {signal.Signals(-code).name}"
    return f"pytest ends with {code}: {' '.join(text.split())[-200:]}"


def end_of(folder: Path, before: str, after: str, tests: str, passed: dict[str, float]) -> str:
    """What kills a mutant, or how it stands; `passed`: seconds of tests that pass without it."""
    places = {file: file.read_text() for file in sorted((folder / "distcache").rglob("*.py"))}
    places = {file: text for file, text in places.items() if before in text}
    count = sum(text.count(before) for text in places.values())
    if count != 1:
        return f"stale: {count} places have {before!r}"
    for path in (word for word in shlex.split(tests) if word.startswith("tests/")):
        if not (folder / path).exists():
            return f"stale: there is no {path}"
    if tests not in passed:
        began = time.monotonic()
        killed_by = killer(folder, tests, 300)
        if killed_by:
            return f"fails without it: {killed_by}"
        passed[tests] = time.monotonic() - began
    ((file, text),) = places.items()
    file.write_text(text.replace(before, after))
    try:
        return killer(folder, tests, 120 + 3 * passed[tests]) or "SURVIVES"
    finally:
        file.write_text(text)


def main(names: list[str]) -> int:
    """Print how each mutant ends; 1 if any survives or is out of date."""
    bad, passed, blocks = [], {}, re.findall(r"(.*)\n  - (.*)\n  \+ (.*)\n  (.*)\n", MUTANTS)
    with tempfile.TemporaryDirectory(prefix="distcache-mutants-") as temporary:
        folder = Path(temporary, "copy")
        ignored = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(CHECKOUT, folder, symlinks=True, ignore=ignored)
        for head, *mutant in blocks:
            name = head.partition(":")[0]
            if not any(fnmatch.fnmatch(name, pattern) for pattern in names or "*"):
                continue
            end = end_of(folder, *mutant, passed)
            print(f"{name} | {end}", flush=True)
            bad += [name] * end.startswith(("SURVIVES", "stale", "fails", "pytest"))
    print(f"not killed: {', '.join(bad) or 'none'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
