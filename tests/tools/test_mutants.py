"""Entries of `tools/mutants.py` that fit the package. `python tools/mutants.py` runs them."""

from __future__ import annotations

from pathlib import Path

from tools.mutants import MUTANTS, stale_reason


def test_every_entry_has_one_place_in_the_package_and_a_test(checkout: Path) -> None:
    assert [reason for mutant in MUTANTS if (reason := stale_reason(checkout, mutant))] == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 37
