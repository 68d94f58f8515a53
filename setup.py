"""Everything is in pyproject.toml, but for one thing: a wheel carries conf/ as distcache/conf."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConf(build_py):
    """Copy the checkout's conf/ into the built package; an editable install reads it in place."""

    def run(self) -> None:
        """Build as usual, then copy."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "distcache", "conf")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("conf", target)


setup(cmdclass={"build_py": BuildWithConf})
