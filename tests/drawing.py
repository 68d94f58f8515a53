"""How many examples a property test draws: few by default, its full number among the slow tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

FEW, ALL = "few", "all"
_PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # on a busy machine
settings.register_profile(FEW, max_examples=25, **_PATIENT)
settings.register_profile(ALL, max_examples=1_000_000, **_PATIENT)


def examples(full: int) -> settings:
    """A test's settings: `full` examples, or as many as the profile has where these are fewer."""
    return settings(max_examples=min(full, settings.default.max_examples))
