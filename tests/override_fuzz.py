"""Training command lines with drawn overrides, run in this process.

`python tests/override_fuzz.py COUNT SEED FOLDER` runs COUNT command lines of one step each over two
small tables. Each must train, or end with an error in words. It prints every command line that ends
with a traceback, and exits with 1 if there is one.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import shutil
import sys
import traceback
from pathlib import Path

from omegaconf import OmegaConf

from distcache import train
from distcache.cli.compose import compose_overrides

BASE = [
    "data.table_rows=[50,30]",
    "data.global_batch_size=16",
    "model.embedding_dim=4",
    "model.dense_arch=[8,4]",
    "model.over_arch=[8,1]",
    "trainer.steps=1",
    "trainer.eval_steps=0",
    "trainer.timeout_s=5",
    "trainer.threads=1",
    "run.save=false",
    "run.dir=run",
]

NUMBERS = "0 -1 1 2 7 0.5 1e-3 1e308 -1e308 inf nan -inf 9223372036854775807 9223372036854775808"
WORDS = "null true false auto all none '' ' ' a/b .. é 1s 30min end 0s 2g sum mean adam cpu float64"
LISTS = "[] [1] [1,2] [0] [-1] [a,b] [9223372036854775808] [9223372036854775807,1] [1e300] [null]"
NESTED = "[[1]] {} {a:1} {1:2} {t_cat_0:-1} {t_cat_0:3} {a:{b:c}}"
REFERENCES = "'${x}' '${data.table_rows}' '${oc.env:UNSET}' '${' '${now:}' ??? '???'"
VALUES = [*NUMBERS.split(), *WORDS.split(), *LISTS.split(), *NESTED.split(), *REFERENCES.split()]


def leaf_keys() -> list[str]:
    """Return the dotted keys of training that have values of their own, ascending."""
    keys: list[str] = []

    def collect(prefix: str, values: dict) -> None:
        for name, value in values.items():
            if isinstance(value, dict) and value:
                collect(f"{prefix}{name}.", value)
            else:
                keys.append(f"{prefix}{name}")

    config = OmegaConf.create(compose_overrides([]))
    collect("", OmegaConf.to_container(config))
    return sorted(keys)


def draw_overrides(generator: random.Random, keys: list[str]) -> list[str]:
    """Return one or two overrides, each of a drawn key with a drawn value."""
    chosen = generator.sample(keys, generator.choice([1, 1, 2]))
    return [f"{key}={generator.choice(VALUES)}" for key in chosen]


def traceback_of(overrides: list[str], folder: Path) -> str:
    """Return the output of one command line, run in the empty `folder`, if it has a traceback."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    keys = {text.partition("=")[0] for text in overrides}
    base = [text for text in BASE if text.partition("=")[0] not in keys]
    sys.argv = ["train", *base, *overrides]
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            train.main()
        except BaseException as error:
            output.write("".join(traceback.format_exception(error)))
    text = output.getvalue()
    return text if "Traceback (most recent call last)" in text else ""


def main() -> int:
    """Run all drawn command lines; 1 if one ended with a traceback."""
    count, seed, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]).resolve()
    generator = random.Random(seed)
    keys = leaf_keys()
    failures = 0
    for _ in range(count):
        overrides = draw_overrides(generator, keys)
        text = traceback_of(overrides, folder / "work")
        if text:
            failures += 1
            last_lines = "\n".join(text.rstrip().splitlines()[-12:])
            sys.stdout.write(f"{overrides}\n{last_lines}\n\n")
    logging.getLogger().handlers.clear()
    sys.stdout.write(f"{failures} of {count} command lines ended with a traceback\n")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
