"""The examples run as they say, and scripts that stop in the middle end in peace."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import TORCHRUN, environment
from launching import run as forked

LEFT = """
import sys
import torch
torch.set_num_threads(1)
from ebc_cases import batches, cached, dlrm, train
from distcache import lookahead
ebc = cached()
model = dlrm(ebc)
stream = lookahead(batches(), ebc)
train(model, ebc, [next(stream)])
if len(sys.argv) > 1:
    raise ValueError("on purpose")
"""


def run(checkout: Path, *command: str, start=subprocess.run, **how) -> subprocess.CompletedProcess:
    path = [str(checkout), str(checkout / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    how |= {"env": environment(PYTHONPATH=os.pathsep.join(path)), "timeout": 200}
    return start([sys.executable, *command], capture_output=True, text=True, **how)


STEPS = ("--steps", "100", "--batch-size", "64")
EXAMPLES = {  # arguments, what it prints, highest first loss
    "train_dlrm.py": (STEPS, "embedding_bags.t_0.weight': (200000, 16)", 0.8),
    "next_item.py": (STEPS, "embeddings.items.weight': (100000, 16)", 2.9),
    "own_data.py": ((), "20 steps, final loss 0.", None),
    "with_lightning.py": ((), "'loss': 0.", None),
    "with_accelerate.py": ((), "loss 0.", None),
    "with_torchtnt.py": ((), "loss 0.", None),
    "with_ignite.py": ((), "loss 0.", None),
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_example_learns(checkout, ranks, name, tmp_path) -> None:
    arguments, said, most = EXAMPLES[name]
    library = Path(name).stem.partition("with_")[2]
    if library and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: it is in requirements/loops.txt")
    launch = [*TORCHRUN[1:], "--local-addr=127.0.0.1", "--nproc-per-node=2"] if ranks == 2 else []
    example = (str(checkout / "examples" / name), *arguments)
    done = run(checkout, *launch, *example, start=forked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert most is None or (len(losses) == 2 and losses[1] < losses[0] < most)


@pytest.mark.parametrize("error", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_script_may_end_in_the_middle_of_a_look_ahead(checkout, error) -> None:
    done = run(checkout, "-c", LEFT, *(["error"] if error else []))
    assert done.returncode == int(error), done.stderr
    assert ("on purpose" in done.stderr) == error
