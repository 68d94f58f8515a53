"""The examples run as they say, and scripts that stop in the middle end in peace."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment
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


def run(checkout: Path, *command: str, start=subprocess.run) -> subprocess.CompletedProcess:
    env = environment(PYTHONPATH=f"{checkout}:{checkout / 'tests'}")
    return start([sys.executable, *command], env=env, capture_output=True, text=True, timeout=200)


EXAMPLES = {  # rows of the state_dict that it prints, highest first loss
    "train_dlrm.py": ("embedding_bags.t_0.weight': (200000, 16)", 0.8),
    "next_item.py": ("embeddings.items.weight': (100000, 16)", 2.9),
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_learns(checkout, ranks, name) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    example = (str(checkout / "examples" / name), "--steps", "100", "--batch-size", "64")
    done = run(checkout, *(launch if ranks == 2 else ()), *example, start=forked)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0] < EXAMPLES[name][1]
    assert EXAMPLES[name][0] in done.stdout


@pytest.mark.parametrize("error", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_script_may_end_in_the_middle_of_a_look_ahead(checkout, error) -> None:
    done = run(checkout, "-c", LEFT, *(["error"] if error else []))
    assert done.returncode == int(error), done.stderr
    assert ("on purpose" in done.stderr) == error
