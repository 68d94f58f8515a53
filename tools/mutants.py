"""Mutation tests: break one law of the package at a time and check that a default test fails.

    python tools/mutants.py [NAME ...]

`NAME` is the name of an entry of `MUTANTS`, or a shell pattern; without one, all entries run. An
entry changes one place of the package in a temporary copy of this checkout. Then its tests run
until the first failure. A mutant whose tests all pass survives, so no test checks its law. The laws
are about the movement of rows and about what ranks tell each other: no row is read stale, no update
is lost, bits depend on ids and values only, and no rank waits forever.

The exit code is 1 if a mutant survives, if its text is not found exactly once in the package, or if
its tests fail without the change.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
IGNORED = (".git", ".venv*", ".*_cache", ".hypothesis", "runs", "build", "dist")
PYTEST = "-q -rfE --tb=no --no-header -p no:cacheprovider --hypothesis-seed=0"
LIMIT_S = 30
"""Seconds that a test may take with a mutant, beside three times its duration without one."""


@dataclass(frozen=True)
class Mutant:
    """A wrong version of one place of the package.

    `law`: what the package guarantees and this version breaks; `before`: text that occurs exactly
    once in the package; `after`: the text that replaces it; `tests`: pytest's name of the test that
    fails then (of all its cases, or of one).
    """

    name: str
    law: str
    before: str
    after: str
    tests: str


MUTANTS = (
    # --- planner: slots and victims -----------------------------------------------------------
    Mutant(
        "recent-slots-not-held",
        law="A slot that one of the last P steps used is evicted only if all others are taken.",
        before="leave(table, node, step, before, True,",
        after="leave(table, node, step, step, True,",
        tests="tests/planner/test_victims.py::"
        "test_every_victim_is_the_one_that_the_slow_twin_picks",
    ),
    Mutant(
        "hits-evictable",
        law="A step evicts no row that it reads itself.",
        before="elif level != PINNED:",
        after="elif False:",
        tests="tests/planner/test_victims.py::"
        "test_every_victim_is_the_one_that_the_slow_twin_picks",
    ),
    Mutant(
        "restore-keeps-traces",
        law="Plans after `restore` do not depend on how far ahead the left stream was planned.",
        before="while self._past and self._past[-1][0].named.step > step:",
        after="while False:",
        tests="tests/planner/test_laws.py::test_restore_forgets_how_far_planning_was_ahead",
    ),
    Mutant(
        "owners-uneven",
        law="Ids with a constant stride are spread evenly over the owners.",
        before="return found.view(np.int64)",
        after="return found.view(np.int64) * 0",
        tests="tests/planner/test_laws.py::test_no_stride_has_few_homes[2]",
    ),
    # --- planner: when rows may move ----------------------------------------------------------
    Mutant(
        "victims-in-use",
        law="Rows move after the last use of the rows that they evict.",
        before="max(step - prefetch - 1, before, -1, *latest_uses)",
        after="max(step - prefetch - 1, before, -1)",
        tests="tests/planner/test_laws.py::test_no_stale_read_and_no_lost_update",
    ),
    Mutant(
        "moves-late",
        law="Rows move P steps ahead if slots suffice, whatever the look-ahead window is.",
        before="max(step - prefetch - 1, before, -1, *latest_uses)",
        after="max(step - 1, before, -1, *latest_uses)",
        tests="tests/planner/test_laws.py::test_tight_caches_evict_and_rows_travel_both_ways[1-0]",
    ),
    Mutant(
        "victims-of-one-owner",
        law="Every rank waits for the last uses of the victims of all owners.",
        before='told.latest_use = headers["latest_use"].max(0).tolist()',
        after='told.latest_use = headers["latest_use"][self._rank].tolist()',
        tests="tests/pipeline/test_streams.py::"
        "test_movement_waits_for_the_last_uses_of_the_victims_of_all_homes",
    ),
    Mutant(
        "early-rows-stale",
        law="A sharded row that a step in flight changes is sent after the update of that step.",
        before="bound = move_after if parts.early else _BEFORE_ALL",
        after="bound = move_after + 1 if parts.early else _BEFORE_ALL",
        tests="tests/planner/test_laws.py::test_every_sharded_row_comes_once_and_up_to_date",
    ),
    # --- movement -----------------------------------------------------------------------------
    Mutant(
        "moves-before-apply",
        law="Rows move after the update of the step `move_after`, not before it.",
        before="return self._unmoved[0].move_after <= self._released_step",
        after="return self._unmoved[0].move_after <= self._released_step + 1",
        tests="tests/parallel/test_exact.py::"
        "test_overlapped_and_serial_have_the_bits_and_counts_of_one_another[1]",
    ),
    Mutant(
        "write-back-late",
        law="An evicted row is read again only after its write-back has reached the store.",
        before="return partial(self._store.scatter, rows, *self._kind.parts(memory))",
        after='return __import__("threading").Timer('
        "0.03, self._store.scatter, (rows, *self._kind.parts(memory))).start",
        tests="tests/parallel/test_exact.py::"
        "test_overlapped_and_serial_have_the_bits_and_counts_of_one_another[1]",
    ),
    Mutant(
        "state-not-filled",
        law="The optimizer state of a row moves with the row.",
        before="self._copy_in(self.state, where, state)",
        after="pass",
        tests="tests/cache/test_cache.py::test_against_a_dictionary[cpu]",
    ),
    Mutant(
        "clean-rows-written",
        law="Only rows that have changed are written back.",
        before="if dirty[slot]:",
        after="if True:",
        tests="tests/cache/test_cache.py::test_against_a_dictionary[cpu]",
    ),
    Mutant(
        "sharded-rows-not-dirty",
        law="A sharded row that a step has changed is written back when it is evicted.",
        before="self._changed(shard.slots, choice.sharded)",
        after="pass",
        tests="tests/parallel/test_exact.py::test_the_stages_of_placements_work_on_one_rank_too",
    ),
    Mutant(
        "evaluation-marks-dirty",
        law="An evaluation step changes no row, so it causes no write-back.",
        before="first = rows.cache.gather(plan.slots, context.where[at].slots)",
        after="first = rows.cache.mark_dirty(plan.slots) or "
        "rows.cache.gather(plan.slots, context.where[at].slots)",
        tests="tests/planner/test_replay.py::test_two_groups_and_bags[1]",
    ),
    Mutant(
        "flush-during-movement",
        law="No row moves while the tables are flushed.",
        before="self.stream.pause_movement()",
        after="pass",
        tests="tests/pipeline/test_streams.py::"
        "test_a_flush_in_the_middle_of_a_stream_changes_nothing",
    ),
    Mutant(
        "stale-plans-kept",
        law="A stream that is left early drops the plans whose rows have not moved.",
        before="if self._stale or self.planner.ingested != self.last_step + 1:",
        after="if self._stale:",
        tests="tests/embedding/test_left_early.py::test_a_halt_that_came_too_late_is_made_again",
    ),
    Mutant(
        "memory-limit-ignored",
        law="The memory check respects the limits of control groups, before memory is taken.",
        before="return max(0, min(found))",
        after="return max(0, max(found))",
        tests="tests/store/test_store.py::test_available_memory_is_the_tightest_limit",
    ),
    # --- bits of sums -------------------------------------------------------------------------
    Mutant(
        "library-sums",
        law="The bits of a row's gradient sum depend on the contributions in rank order only.",
        before="if native:",
        after="if native or plan.misses:",
        tests="tests/parallel/test_exact.py::"
        "test_every_cache_and_placement_has_the_bits_of_resident[3]",
    ),
    Mutant(
        "bits-by-position",
        law="The bits of a row's local gradient do not depend on its position in the batch.",
        before="bag_of.index_select(0, order), segments, weights)",
        after="bag_of.index_select(0, order), segments, weights)"
        " * (1 + 1e-7 * (segments[:-1, None] % 2))",
        tests="tests/ops/test_reference.py::test_bits_do_not_depend_on_labels_or_company",
    ),
    Mutant(
        "buckets-reordered",
        law="DDP sums dense gradients in one order from the first step of a run on.",
        before="for _ in range(2):",
        after="for _ in range(0):",
        tests="tests/parallel/test_hybrid.py::"
        "test_on_two_ranks[gradient_buckets_keep_their_order_from_the_first_step_on]",
    ),
    Mutant(
        "empty-rank-loss-nan",
        law="A rank without samples contributes zero to the loss of a step.",
        before="total = functional.binary_cross_entropy_with_logits("
        'logits, labels, reduction="sum")',
        after="total = functional.binary_cross_entropy_with_logits(logits, labels) * len(labels)",
        tests="tests/parallel/test_exact.py::test_awkward_shapes_train_alike_in_all_modes[3]",
    ),
    Mutant(
        "mean-not-divided",
        law="Under DDP the gradients of rows are the mean over the ranks.",
        before="gradient.mul_(1.0 / size)",
        after="gradient.mul_(1.0)",
        tests="tests/embedding/test_contract.py::test_under_ddp_it_is_torchs_embedding_bag[2]",
    ),
    # --- agreement of the ranks ---------------------------------------------------------------
    Mutant(
        "decided-too-early",
        law="Step s is decided once the ids of step s + L are known, not before.",
        before="if ready is None and len(waiting) > window:",
        after="if ready is None and len(waiting) >= max(1, window):",
        tests="tests/pipeline/test_streams.py::test_how_far_the_batches_are_read",
    ),
    Mutant(
        "gradients-before-fills",
        law="The fills that were released come before the gradient sums of a step on all ranks.",
        before="(context.stream.wait_until_issued() or context).waited(began)",
        after="context.waited(began)",
        tests="tests/parallel/test_exact.py::"
        "test_overlapped_and_serial_have_the_bits_and_counts_of_one_another[2]",
    ),
    Mutant(
        "digests-not-compared",
        law="Planners that run with different configurations raise an error.",
        before='fields.append("digest")',
        after="pass",
        tests="tests/pipeline/test_streams.py::"
        "test_nothing_is_delivered_once_a_rank_stops_and_ranks_that_differ_are_told_why",
    ),
    Mutant(
        "first-end-ignored",
        law="All ranks end with the first rank whose data end.",
        before="status = _STATUSES[max(statuses)]",
        after="status = _STATUSES[min(statuses)]",
        tests="tests/pipeline/test_streams.py::test_random_streams[2]",
    ),
    Mutant(
        "data-errors-not-shared",
        law="An error in the data of one rank is raised on all ranks.",
        before="failure = on_all_ranks(over.asking.error or _peer_error(verdict))",
        after="failure = on_all_ranks(over.asking.error)",
        tests="tests/pipeline/test_streams.py::test_random_streams[2]",
    ),
    Mutant(
        "left-stream-unnoticed",
        law="A rank that goes on with a stream that another rank has left raises an error.",
        before="if not stop():",
        after="if False:",
        tests="tests/pipeline/test_streams.py::"
        "test_a_stream_that_one_rank_has_left_is_refused_on_the_others",
    ),
    Mutant(
        "stop-of-rank-0-only",
        law="A stop request of any rank stops all ranks after the same step.",
        before="asked |= int(asks)",
        after="asked = int(by_rank[0][1])",
        tests="tests/pipeline/test_step_numbers.py::test_what_follows_from_what_the_ranks_say",
    ),
    Mutant(
        "bad-losses-forgotten",
        law="Nothing is applied after a loss that is not finite.",
        before="self._enabled = self._enabled & (said",
        after="self._enabled = (said",
        tests="tests/parallel/test_placement_ends.py::"
        "test_a_loss_that_is_not_finite_changes_no_row_and_is_sticky",
    ),
    Mutant(
        "different-steps-written",
        law="No rank writes unless all ranks have applied the same last step.",
        before="if len(set(steps)) > 1:",
        after="if False:",
        tests="tests/pipeline/test_streams.py::test_misuse_and_ranks_that_differ_are_refused",
    ),
    # --- failures -----------------------------------------------------------------------------
    Mutant(
        "failures-not-read",
        law="An exception on one rank reaches the other ranks within seconds.",
        before="if failure.rank != rank",
        after="if failure.rank < 0",
        tests="tests/pipeline/test_failures.py::"
        "test_what_fails_on_one_rank_reaches_the_others_within_seconds[model]",
    ),
    Mutant(
        "waiting-ranks-blamed",
        law="An error names the ranks that are missing, and no rank that waits as well.",
        before='if not waits_too(f"{self._key}/{rank}")',
        after="if rank >= 0",
        tests="tests/pipeline/test_failures.py::test_a_rank_that_hangs_is_named[gradients hangs]",
    ),
    Mutant(
        "deaths-unseen",
        law="A rank whose process ended without a report is named at once.",
        before="return space == _process_space() and _started(number) != started",
        after="return False",
        tests="tests/pipeline/test_failures.py::test_a_rank_that_dies_is_named[together]",
    ),
    Mutant(
        "failed-steps-continued",
        law="No rank trains or writes after a step that failed halfway.",
        before="self.failed = True",
        after="pass",
        tests="tests/pipeline/test_failures.py::"
        "test_after_a_rank_vanished_nobody_goes_on_or_writes[late rows]",
    ),
    Mutant(
        "movement-errors-lost",
        law="An error in the movement thread ends training on all ranks.",
        before="self._failure = error",
        after="pass",
        tests="tests/pipeline/test_failures.py::"
        "test_what_fails_on_one_rank_reaches_the_others_within_seconds[gather]",
    ),
    Mutant(
        "work-errors-not-shared",
        law="An error in work that all ranks do is raised on all ranks.",
        before="gather_objects((value, failure),",
        after='gather_objects((value or b"N.", None),',
        tests="tests/comm/test_worlds.py::test_all_ranks_learn_of_a_failure_and_of_a_difference",
    ),
)


def count_places(folder: Path, text: str) -> dict[Path, int]:
    """Return the files of the package that have `text`, with the number of its occurrences."""
    files = sorted((folder / "distcache").rglob("*.py"))
    counts = {file: file.read_text().count(text) for file in files}
    return {file: count for file, count in counts.items() if count}


def stale_reason(folder: Path, mutant: Mutant) -> str:
    """Return why an entry does not fit the checkout in `folder`; empty if it does."""
    count = sum(count_places(folder, mutant.before).values())
    if count != 1:
        return f"stale: {count} places of the package have {mutant.before!r}, not one"
    path, name = mutant.tests.partition("[")[0].split("::")
    file = folder / path
    if not file.is_file() or f"def {name}(" not in file.read_text():
        return f"stale: there is no test {path}::{name}"
    return ""


def run_tests(folder: Path, tests: Iterable[str], limit_s: float, *options: str) -> tuple[int, str]:
    """Run tests of a copy of the checkout; return the exit code of pytest and its output.

    `limit_s`: most seconds that one test may take.
    """
    command = [sys.executable, "-m", "pytest", *PYTEST.split(), "-m", "not slow"]
    command += [f"--timeout={limit_s:.0f}", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "400", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the ranks that the tests started
            process.wait()
        output.seek(0)
        return code, output.read()


def outcome_of(code: int, output: str) -> str:
    """Return the first failure in the `output` of pytest, or why there is none."""
    if code == 0:
        return "SURVIVES"
    if failure := re.search(r"(?m)^(?:FAILED|ERROR) ([^\s[]+)(.*)", output):
        return ("hang: " if "Timeout (>" in failure[2] else "") + failure[1]
    if code < 0:
        return f"hang or crash: {signal.Signals(-code).name}"
    if "+++ Timeout +++" in output:
        return "hang"
    return f"pytest ends with {code}: {' '.join(output.split())[-200:]}"


def durations(output: str) -> dict[str, float]:
    """Return the seconds of each test item in the output of `pytest --durations=0 -vv`."""
    seconds: dict[str, float] = {}
    for duration, item in re.findall(r"(?m)^([\d.]+)s (?:setup|call|teardown) +(.+?) *$", output):
        seconds[item] = seconds.get(item, 0.0) + float(duration)
    return seconds


def main(patterns: list[str]) -> int:
    """Print the outcome of every selected mutant; return 1 unless all are killed."""
    chosen = [
        mutant
        for mutant in MUTANTS
        if any(fnmatch.fnmatch(mutant.name, pattern) for pattern in patterns or ["*"])
    ]
    stale = [mutant for mutant in chosen if stale_reason(CHECKOUT, mutant)]
    for mutant in stale:
        print(f"{mutant.name}: {stale_reason(CHECKOUT, mutant)}")
    if stale or not chosen:
        return 1
    with tempfile.TemporaryDirectory(prefix="distcache-mutants-") as temporary:
        original = Path(temporary, "original")
        changed = Path(temporary, "changed")
        # Machine code of compiled loops lies beside the package and is copied with the times of its
        # source files. So tests compile only the files that a mutant changes.
        ignored = shutil.ignore_patterns(*IGNORED)
        shutil.copytree(CHECKOUT, original, symlinks=True, ignore=ignored)
        tests = dict.fromkeys(mutant.tests for mutant in chosen)
        code, output = run_tests(original, tests, 600, "--durations=0", "-vv")
        if code:
            print(f"tests fail without a mutant: {outcome_of(code, output)}")
            return 1
        seconds = durations(output)
        alive: list[str] = []
        for mutant in chosen:
            shutil.copytree(original, changed, symlinks=True)
            (file,) = count_places(changed, mutant.before)
            file.write_text(file.read_text().replace(mutant.before, mutant.after))
            limit_s = LIMIT_S + 3 * sum(
                of for item, of in seconds.items() if item.startswith(mutant.tests)
            )
            began = time.monotonic()
            outcome = outcome_of(*run_tests(changed, [mutant.tests], limit_s, "-x"))
            print(f"{mutant.name:23} {time.monotonic() - began:4.0f} s  {outcome}", flush=True)
            if outcome.startswith(("SURVIVES", "pytest")):
                alive.append(mutant.name)
            shutil.rmtree(changed)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants are killed", *alive)
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
