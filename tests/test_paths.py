"""Where the configuration folder is found, in a wheel and in a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from distcache.cli.compose import conf_dir
from distcache.errors import ConfigError


def test_checkout_has_a_conf_folder(checkout: Path) -> None:
    assert conf_dir() == checkout / "conf"
    assert (conf_dir() / "train.yaml").is_file()


def test_the_packaged_folder_comes_first(tmp_path: Path) -> None:
    package = tmp_path / "distcache"
    package.mkdir()
    with pytest.raises(ConfigError, match=r"no configuration folder at .*reinstall"):
        conf_dir(package)
    (tmp_path / "conf").mkdir()
    assert conf_dir(package) == tmp_path / "conf"
    (package / "conf").mkdir()
    assert conf_dir(package) == package / "conf"
