"""The settings that benches run at: Criteo's table sizes, or a small copy for tests."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.errors import HydraException, MissingConfigException

from distcache.cli.compose import checked_config, compose_overrides
from distcache.comm.rendezvous import Place
from distcache.config.tree import Config
from distcache.data.raw.settings import TERABYTE_ROWS
from distcache.errors import ConfigError

_AHEAD = ("cache.lookahead=8", "cache.prefetch=1")

SIZES = {
    "kaggle": ("experiment=quickstart", *_AHEAD),
    "terabyte": (
        "experiment=quickstart",
        *_AHEAD,
        f"data.table_rows={list(TERABYTE_ROWS)}",
    ),
    "small": (
        "experiment=quickstart",
        *_AHEAD,
        "data.table_rows=[20000,5000,1000,200,10,3]",
        "cache.ratio=0.1",
    ),
}
"""Hydra overrides by the value of `size`; `quickstart` is a click stream of Criteo Kaggle's shape
(26 tables, 33,762,577 rows), `terabyte` has Criteo Terabyte's (204,184,588 rows)."""


def compose_setting(size: str, overrides: Sequence[str], place: Place) -> Config:
    """The checked configuration of a size; later overrides win. Raises ConfigError."""
    if size not in SIZES:
        raise ConfigError(f"size={size} is not {' or '.join(SIZES)}")
    try:
        text = compose_overrides([*SIZES[size], *overrides])
    except (HydraException, MissingConfigException) as error:
        raise ConfigError(str(error).strip().replace("\n", " ")) from error
    return checked_config(text, place)
