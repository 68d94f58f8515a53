"""Which files of the package a training step passes, from its ids to the write-back.

    python tests/way_of_a_step.py [key=value ...]
    torchrun --standalone --nproc-per-node 2 tests/way_of_a_step.py cache.placement=mixed ...

Trains some steps and notes, for all threads, the files whose functions run while a few steps in the
middle pass. What draws the batches, the loop around the steps and the report are not counted.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = f"{ROOT}/distcache/"
AROUND = (
    "data/",
    "trainer/",
    "checkpoint/",
    "config/",
    "cli/",
    "train.py",
    "models.py",
    "errors.py",
)
STEPS = range(20, 24)
SMALL = """
    data.table_rows=[20000,5000,300] data.global_batch_size=256 model.embedding_dim=8
    cache.rows=2500 trainer.steps=30 trainer.eval_steps=0 trainer.device=cpu optim=adagrad
    run.save=false run.overwrite=true run.dir=runs/way_of_a_step
"""


def main() -> int:
    """Train and print the files, with the calls of each in a step."""
    sys.path.insert(0, str(ROOT))
    from distcache import train
    from distcache.trainer.trainer import Loop

    calls, noting, step = Counter[str](), threading.Event(), Loop.train

    def note(frame, event: str, _argument) -> None:
        file = frame.f_code.co_filename
        if noting.is_set() and event == "call" and file.startswith(PACKAGE):
            calls[file.removeprefix(PACKAGE)] += 1

    def watched(loop: Loop, batch) -> bool:
        noting.set() if batch.batch.index in STEPS else noting.clear()
        return step(loop, batch)

    threading.setprofile(note)
    sys.setprofile(note)
    with (
        patch.object(Loop, "train", watched),
        patch("sys.argv", ["", *SMALL.split(), *sys.argv[1:]]),
    ):
        code = train.main()
    sys.setprofile(None)
    way = {file: count / len(STEPS) for file, count in calls.items() if not file.startswith(AROUND)}
    print(f"{len(way)} files, {sum(way.values()):.0f} calls a step")
    for file, count in sorted(way.items()):
        print(f"  {count:7.1f}  {file}")
    return code


if __name__ == "__main__":
    sys.exit(main())
