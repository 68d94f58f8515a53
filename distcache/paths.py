"""Where the package finds files that are not Python."""

from __future__ import annotations

from pathlib import Path

from distcache.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent


def conf_dir(package: Path = PACKAGE) -> Path:
    """The folder of Hydra's groups and `train.yaml`, absolute.

    A wheel carries it as `distcache/conf`; in a checkout it is `conf` beside `package`.
    Raises ConfigError where neither is there.
    """
    places = [package / "conf", package.parent / "conf"]
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(
        f"no configuration folder at {places[0]} or {places[1]}: "
        "reinstall distcache, or run it from a complete checkout"
    )
