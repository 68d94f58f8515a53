"""A cluster as a file: `cluster.json`, which `distcache.plan` writes and `cache.cluster` reads."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from distcache.cost.links import Cluster, Compute, Link
from distcache.errors import ConfigError

FILE = "cluster.json"

_LINKS = ("host", "inside", "between")


def write_cluster(cluster: Cluster, folder: Path) -> Path:
    """Write `cluster.json` into `folder`; its path."""
    path = folder / FILE
    path.write_text(json.dumps(asdict(cluster), indent=1) + "\n")
    return path


def read_cluster(path: str | Path, key: str = "cache.cluster") -> Cluster:
    """The cluster that a file, or the folder that has it, describes.

    Raises ConfigError naming `key`, the file and the way out where it cannot be read, or describes
    none.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    how = f"give the {FILE} of python -m distcache.plan, or leave {key} out to measure"
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{key}={path}: cannot be read ({error.strerror}): {how}") from error
    except ValueError as error:
        raise ConfigError(f"{key}={path} is no JSON ({error}): {how}") from error
    try:
        return _cluster(values)
    except ConfigError as error:
        raise ConfigError(f"{key}={path}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{key}={path} describes no cluster ({error!r}): {how}") from error


def _cluster(values: dict[str, Any]) -> Cluster:
    for key in ("ranks", "host", "inside"):
        if values.get(key) is None:
            raise ConfigError(f"{key} is missing: give the {FILE} of python -m distcache.plan")
    links = {name: _link(name, values[name]) for name in _LINKS if values.get(name) is not None}
    others = {name: value for name, value in values.items() if name not in (*_LINKS, "compute")}
    return Cluster(**links, **others, compute=Compute(**values.get("compute", {})))


def _link(which: str, values: dict[str, Any]) -> Link:
    """The link of key `which`, by whose name an error calls it."""
    name = values.get("name", "given")
    for key in ("bandwidth", "latency"):
        if not isinstance(values.get(key, 0.0), int | float):
            raise ConfigError(f"{which}.{key}={values[key]} is no number: give one")
    return replace(Link(**{**values, "name": which}), name=name)
