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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PACKAGE = str(ROOT / "distcache") + "/"
AROUND = ("data/", "trainer/", "config/", "cli/", "train.py", "models.py", "errors.py")
FIRST, LAST = 20, 24
SMALL = [
    "data.table_rows=[20000,5000,300]", "data.global_batch_size=256", "model.embedding_dim=8",
    "cache.rows=2500", "trainer.steps=30", "trainer.eval_steps=0", "run.save=false",
    "run.overwrite=true", "run.dir=runs/way_of_a_step", "trainer.device=cpu", "optim=adagrad",
]  # fmt: skip

calls: Counter[str] = Counter()
noting = False


def note(frame, event: str, _argument) -> None:
    """Count a call of a function of the package."""
    if noting and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
        calls[frame.f_code.co_filename.removeprefix(PACKAGE)] += 1


def main() -> int:
    """Train and print the files, with the calls of each in a step."""
    from distcache import train
    from distcache.trainer.trainer import Loop

    step = Loop.train

    def watched(loop: Loop, batch) -> bool:
        global noting
        noting = FIRST <= batch.batch.index < LAST
        return step(loop, batch)

    Loop.train = watched
    sys.argv = ["train", *SMALL, *sys.argv[1:]]
    threading.setprofile(note)
    sys.setprofile(note)
    code = train.main()
    sys.setprofile(None)
    threading.setprofile(None)
    way = {file: count for file, count in calls.items() if not file.startswith(AROUND)}
    lines = [f"{len(way)} files, {sum(way.values()) / (LAST - FIRST):.0f} calls a step"]
    lines += [f"  {count / (LAST - FIRST):7.1f}  {file}" for file, count in sorted(way.items())]
    sys.stdout.write("\n".join(lines) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
