"""The settings that benches run at: Criteo's table sizes, or a small copy for tests."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.errors import HydraException, MissingConfigException

from distcache.cli.compose import checked_config, compose_overrides
from distcache.config.tree import Config
from distcache.data.criteo_folder import TERABYTE_ROWS
from distcache.errors import ConfigError

# fmt: off
_DCNV2_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209,
    11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)
_DCNV2_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on
_DCNV2 = (
    f"data.table_rows={[rows if rows <= 40_000 else -(-rows // 64) for rows in _DCNV2_ROWS]}",
    "model.over_arch=[512,512,256,1]",
    "optim.dense_lr=0.1",
    "optim.embedding_lr=0.1",
)
SIZES = {
    "kaggle": (),
    "terabyte": (f"data.table_rows={list(TERABYTE_ROWS)}",),
    "dcnv2": (*_DCNV2, f"data.bag_size={list(_DCNV2_BAGS)}"),
    "dcnv2_one_hot": _DCNV2,
    "small": ("data.table_rows=[20000,5000,1000,200,10,3]", "cache.ratio=0.1"),
}
"""Hydra overrides by the value of `size`, of a click stream of Criteo Kaggle's shape (26 tables,
33,762,577 rows): `terabyte` has Criteo Terabyte's 204,184,588 rows, `dcnv2` the tables and bags of
MLPerf's DLRM-DCNv2, those above 40,000 rows divided by 64."""


def compose_setting(size: str, overrides: Sequence[str]) -> Config:
    """The checked configuration of a size; later overrides win. Raises ConfigError."""
    whole = ("experiment=quickstart", "cache.lookahead=8", "cache.prefetch=1", *SIZES[size])
    try:
        text = compose_overrides([*whole, *overrides])
    except (HydraException, MissingConfigException) as error:
        raise ConfigError(str(error).strip().replace("\n", " ")) from error
    return checked_config(text)
