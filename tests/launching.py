"""Start training commands as a user does, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
STUB = str(CHECKOUT / "tests" / "cli" / "stub_train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: this checkout, one thread, no rank of ours."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return kept | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"} | more


def train(
    arguments: Sequence[str], folder: Path, ranks: int = 1, program: Sequence[str] = (STUB,)
) -> subprocess.CompletedProcess[str]:
    """Run a training program with `ranks` ranks in `folder`, and wait at most 100 s for its end."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher = [*TORCHRUN, "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launcher, *program, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
