"""What is installed where: the torch that is there and the GPU decide, from complete locks; the
launch scripts themselves: dry runs of both branches, errors, the slow tests' budget."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.cache import CacheOptions
from benchmarks.kernels import KernelOptions
from benchmarks.report import parse
from benchmarks.step import StepOptions, compose
from launch import pick
from launch.pick import InstallError, State, Target, Torch


def bash(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    """Run a launch script outside any activated environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DISTCACHE_")}
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH"):
        clean.pop(name, None)
    command = ["bash", str(pick.CHECKOUT / "launch" / script), *arguments]
    clean |= {"DISTCACHE_PYTHON": sys.executable} | env
    return subprocess.run(command, env=clean, capture_output=True, text=True, cwd="/")


def refused(script: str, says: str, *arguments: str, **env: str) -> None:
    """A script ends with an error that says so."""
    run = bash(script, *arguments, **env)
    assert run.returncode == 1 and says in run.stderr, run.stderr


def program(path: Path, text: str) -> Path:
    """A stand-in for another program."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def venv(tmp_path: Path) -> dict[str, str]:
    """Variables of a set-up that makes an environment for the CPU, where there is none yet."""
    return {"DISTCACHE_VENV": str(tmp_path / "new"), "DISTCACHE_ACCELERATOR": "cpu"}


@pytest.mark.parametrize(
    ("accelerator", "fbgemm"), [("cpu", "fbgemm-gpu-cpu==1.8.0"), ("cuda", "fbgemm-gpu==1.8.0")]
)
def test_dry_run_says_what_it_would_install(accelerator: str, fbgemm: str, venv: dict) -> None:
    index = "https://index.example/simple"
    venv |= {"DISTCACHE_ACCELERATOR": accelerator, "DISTCACHE_TORCH_INDEX": index}
    run = bash("quickstart.sh", "--dry-run", "trainer.steps=3", **venv)
    assert run.returncode == 0, run.stderr
    said = run.stdout.splitlines()
    locked = [line.strip() for line in said if line.startswith("      ")]
    assert locked == pick.lines(pick.LOCK, pick.TEST)
    (torch,) = [line for line in said if f"torch=={pick.TORCH}" in line]
    assert torch.endswith(f"--extra-index-url {index}")
    (pair,) = [line for line in said if "torchrec==" in line]
    assert {fbgemm, "--no-deps"} <= set(pair.split())
    assert said[-1].endswith("'trainer.steps=3'")
    assert "'modes=data,hybrid' 'world_size=2'" in said[-1]
    assert not Path(venv["DISTCACHE_VENV"]).exists()


def test_torchrun_on_one_node_and_on_several(venv: dict) -> None:
    venv |= {"RANKS": "3"}
    run = bash("torchrun.sh", "--dry-run", "trainer.steps=3", **venv)
    assert run.returncode == 0, run.stderr
    job = run.stdout.splitlines()[-1]
    assert "'--standalone' '--nproc-per-node' '3' '-m' 'distcache.train' 'trainer.steps=3'" in job
    assert job.split()[:2] == ["'env'", "'TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1'"]
    several = {"NODES": "2", "MASTER_ADDR": "node7", "JOB_ID": "9"} | venv
    for rank, host in ((0, "is_host=1"), (1, "is_host=0")):
        run = bash("torchrun.sh", "--dry-run", "a=b c", NODE_RANK=str(rank), **several)
        job = run.stdout.splitlines()[-1]
        assert "'--nnodes' '2' '--rdzv-backend' 'c10d' '--rdzv-id' '9'" in job
        assert f"'--rdzv-endpoint' 'node7:29400' '--rdzv-conf' '{host}'" in job
        assert "--standalone" not in job and job.endswith("'a=b c'")
    for name, value in (("RANKS", "0"), ("RANKS", "two"), ("NODES", "-1"), ("NODE_RANK", "x")):
        says = f"{name}={value} is no whole number"
        refused("torchrun.sh", says, "--dry-run", **venv | {name: value})
    alone = {"NODES": "2", "MASTER_ADDR": ""} | venv
    refused("torchrun.sh", "NODES=2 needs MASTER_ADDR", "--dry-run", **alone)


def test_slurm_starts_torchrun_on_every_node(tmp_path: Path, venv: dict) -> None:
    """With stand-ins for Slurm's programs; srun runs the command for each of two nodes."""
    hosts = '[[ "$*" == "show hostnames n[3-4]" ]] && printf "n3\\nn4\\n"'
    program(tmp_path / "scontrol", hosts)
    nodes = 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done'
    program(tmp_path / "srun", f'echo "$1 $2 $3" >{tmp_path}/how; shift 3; {nodes}')
    slurm = {
        "SLURM_CPUS_ON_NODE": "96",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[3-4]",
        "SLURM_JOB_ID": "71234",
        "SLURM_SUBMIT_DIR": str(pick.CHECKOUT),
    }
    path = f"{tmp_path}:{os.environ['PATH']}"
    given = venv | slurm | {"PATH": path, "RANKS": "8"}
    run = bash("slurm.sbatch", "--dry-run", "trainer.steps=3", **given)
    assert run.returncode == 0, run.stderr
    jobs = [line for line in run.stdout.splitlines() if "distcache.train" in line]
    assert len(jobs) == 2
    how = (tmp_path / "how").read_text()
    assert how == "--kill-on-bad-exit=1 --cpus-per-task=96 --cpu-bind=none\n"
    for number, job in enumerate(jobs):
        assert "'--nnodes' '2'" in job and "'--rdzv-id' '71234'" in job
        assert f"'--rdzv-endpoint' 'n3:21234' '--rdzv-conf' 'is_host={1 - number}'" in job
        assert job.endswith("'--nproc-per-node' '8' '-m' 'distcache.train' 'trainer.steps=3'")
    refused("slurm.sbatch", "submit this with sbatch")


def test_errors_of_the_set_up_name_the_way_out(tmp_path: Path, venv: dict) -> None:
    says = "DISTCACHE_ACCELERATOR=tpu: use cpu, cuda or auto"
    refused("test.sh", says, **venv | {"DISTCACHE_ACCELERATOR": "tpu"})
    says = "DISTCACHE_PYTHON=/no/python is no Python 3.11 or 3.12"
    refused("test.sh", says, DISTCACHE_PYTHON="/no/python")
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    command = ["/bin/bash", str(pick.CHECKOUT / "launch" / "setup.sh")]
    env = {"PATH": str(tmp_path)}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 1 and "no Python 3.11 or 3.12" in run.stderr
    assert "name it in DISTCACHE_PYTHON" in run.stderr
    failing = "echo 'OSError: undefined symbol: _ZN' >&2\nexit 1"
    python = program(tmp_path / "bin" / "python", failing)
    code = "import install, sys; print(install.explain(sys.argv[1], None))"
    command, folder = [sys.executable, "-c", code, str(python)], pick.CHECKOUT / "launch"
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    assert "undefined symbol: _ZN" in said and str(tmp_path) in said
    assert "way out: DISTCACHE_ACCELERATOR=cpu" in said


@pytest.mark.parametrize(("seconds", "outcome"), [("0", "1 skipped"), ("60", "1 passed")])
def test_slow_tests_stop_when_their_time_is_over(
    seconds: str, outcome: str, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text((pick.CHECKOUT / "tests" / "conftest.py").read_text())
    text = "import pytest\n@pytest.mark.slow\ndef test_one(): pass\n"
    (tmp_path / "test_one.py").write_text(text)
    config = str(pick.CHECKOUT / "pyproject.toml")
    command = [sys.executable, "-m", "pytest", "-c", config, "--rootdir", str(tmp_path)]
    env = {**os.environ, "DISTCACHE_SLOW_S": seconds}
    run = subprocess.run([*command, str(tmp_path)], env=env, capture_output=True, text=True)
    assert outcome in run.stdout, run.stdout + run.stderr


def test_the_parts_of_the_gpu_run_are_commands_that_parse(tmp_path: Path) -> None:
    parts: dict[str, str] = {}
    for given in ((), ("quick",)):
        run = bash("gpu.sh", "--dry-run", *given, PYTHON="py", OUT=str(tmp_path))
        assert run.returncode == 0, run.stderr
        parts |= dict(line.split(": py ") for line in run.stdout.splitlines())
    assert {"quick_step_64", "quick_step_128"} <= parts.keys()
    tests = parts.pop("tests")
    assert tests.startswith("-m pytest -m gpu ")
    marked = {
        file.relative_to(pick.CHECKOUT).as_posix()
        for file in (pick.CHECKOUT / "tests").rglob("test_*.py")
        if re.search(r"(pytestmark =|@|marks=)\s?pytest.mark.gpu", file.read_text())
    }
    assert {word for word in tests.split() if word.startswith("tests/")} == marked
    options = {"kernels": KernelOptions, "cache": CacheOptions, "step": StepOptions}
    for part, command in parts.items():
        _, module, *arguments = command.split()
        name = module.removeprefix("benchmarks.")
        given, more = parse(options[name], arguments)
        assert given.device == "cuda" and given.out == f"{tmp_path}/{part}.md"
        if name == "step":
            config = compose(given, ["trainer.device=cpu", *more])
            assert config.data.global_batch_size == given.batch
    assert len(parts) > 5
    says = "steps is no part: choose among tests kernels"
    refused("gpu.sh", says, "kernels", "steps", PYTHON="py")


PYTHON_OF_PARTS = """case "$*" in
    *is_available*) exit "${NO_GPU:-0}" ;;
    *benchmarks.cache*) echo "no room"; exit 3 ;;
    *why_no_fbgemm*) echo "the CPU build" ;;
    *benchmarks.kernels*) echo "up"; exec sleep 30 ;;
    *modes=data,resident,fused*model=embeddings*) kill -KILL $$ ;;
    *) echo "all is well" ;;
esac"""


def test_a_part_of_the_gpu_run_that_fails_stops_no_other(tmp_path: Path) -> None:
    python = program(tmp_path / "python", PYTHON_OF_PARTS)
    given = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "PART_S": "3"}
    run = bash("gpu.sh", "kernels", "cache", "embeddings_64", "fbgemm_64", "step_64", **given)
    said = [re.sub(r"after \d+ s", "after", line) for line in run.stdout.splitlines()]
    assert said == [
        "kernels: cut off after: up",
        "cache: failed with exit code 3 after: no room",
        "embeddings_64: failed with exit code 137 after: ",
        "fbgemm_64: left out: the CPU build; torch's tables (modes=bag) and the bench of kernels "
        "stand for it",
        "step_64: done after: all is well",
    ]
    assert run.returncode == 1
    assert (tmp_path / "out" / "cache.log").read_text() == "no room\n"
    assert bash("gpu.sh", "step_64", **given).returncode == 0
    elsewhere = given | {"OUT": str(tmp_path / "none"), "NO_GPU": "1"}
    assert bash("gpu.sh", "step_64", **elsewhere).returncode == 1
    assert not (tmp_path / "none").exists()


PYTHON_OF_DIGESTS = """case "$*" in
    *distcache.train*) ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
for word in "$@"; do
    case "$word" in run.dir=*) folder="${word#run.dir=}" ;; esac
done
digest=same
case "$folder" in */"${OTHER:-none}") digest=other ;; esac
mkdir -p "$folder"
echo "{\\"loss_digest\\": \\"$digest\\", \\"state_digest\\": \\"same\\"}" >"$folder/summary.json"
"""


@pytest.mark.parametrize(("other", "code", "verdict"), [("", 0, "equal"), ("run2", 1, "DIFFERENT")])
def test_the_first_gpu_run_compares_digests(tmp_path: Path, other, code, verdict) -> None:
    python = program(tmp_path / "python", PYTHON_OF_DIGESTS)
    variables = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "DEVICE": "cpu"}
    run = bash("gpu_first_run.sh", REAL_PYTHON=sys.executable, OTHER=other, **variables)
    assert run.stdout.splitlines()[-1] == f"digests of 5 runs: {verdict}"
    assert run.returncode == code


def test_ctrl_c_ends_the_gpu_run_and_its_part(tmp_path: Path) -> None:
    program(tmp_path / "python", PYTHON_OF_PARTS)
    command = ["bash", str(pick.CHECKOUT / "launch" / "gpu.sh"), "kernels", "step_64"]
    env = os.environ | {"PYTHON": "./python", "OUT": "out"}  # from where it was started
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, env=env, cwd=tmp_path, start_new_session=True, **pipes)
    log, deadline = tmp_path / "out" / "kernels.log", time.monotonic() + 30
    while not (log.exists() and "up" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    said, error = run.communicate(timeout=20)
    assert run.returncode == 130 and said == ""
    assert f"gpu: stopped; what was done is in {tmp_path}/out" in error
    assert not (tmp_path / "out" / "step_64.log").exists()
    found = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert found.stdout == ""


CPU, CUDA = Torch("2.13.0+cpu", None), Torch("2.13.0", "13.0")
OWN, THEIRS = Target(Path("/e"), own=True), Target(Path("/e"), own=False)


def everything(torch: Torch, *extra: str) -> State:
    """An environment with the whole lock and `extra` requirements."""
    wanted = [*pick.lines(pick.BUILD, pick.LOCK, pick.TEST), *extra]
    return State((3, 11), dict(map(pick.normalised, wanted)), torch)


@pytest.mark.parametrize(
    ("torch", "accelerator", "pair", "reason"),
    [
        (CPU, "cpu", ["torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0"], "no GPU"),
        (CUDA, "cuda", ["torchrec==1.8.0", "fbgemm-gpu==1.8.0"], "CUDA 13.0"),
        (CUDA, "cpu", ["torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0"], "no GPU"),
        (CPU, "cuda", ["torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0"], "will not use it. Way out"),
        (Torch("2.12.1", "13.0"), "cuda", ["torchrec==1.7.0", "fbgemm-gpu==1.7.0"], "torch 2.12"),
        (Torch("2.11.0", None), "cpu", ["torchrec==1.6.1", "fbgemm-gpu-cpu==1.6.0"], "torch 2.11"),
    ],
)
def test_pair_follows_torch_and_gpu(torch, accelerator, pair, reason) -> None:
    picked, why = pick.pick_pair(torch, accelerator)
    assert picked == pair and reason in why


def test_what_no_pair_fits_is_refused() -> None:
    with pytest.raises(InstallError, match=r"torch 2\.14\.1 is there.*2\.13.*pip install torch=="):
        pick.pick_pair(Torch("2.14.1", None), "cpu")
    assert Torch(pick.TORCH, None).minor in pick.FITS
    assert pick.pinned(State((3, 11), torch=CPU))
    assert not pick.pinned(State((3, 11), torch=Torch("2.12.0", None)))


@pytest.mark.parametrize(
    ("given", "nodes", "listed", "found"),
    [
        ("cpu", True, "", "cpu"),
        ("cuda", False, "", "cuda"),
        ("auto", True, "", "cuda"),
        (None, False, "GPU 0: H100\n", "cuda"),
        (None, False, "No devices found.\n", "cpu"),
        (None, False, None, "cpu"),
    ],
)
def test_accelerator(given, nodes, listed, found, monkeypatch, tmp_path: Path) -> None:
    if listed is not None:
        program(tmp_path / "nvidia-smi", f"printf '{listed.strip()}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self] if nodes else []))
    env = {"DISTCACHE_ACCELERATOR": given} if given else {}
    assert pick.find_accelerator(env) == found


def test_environment_is_ours_unless_an_activated_one_has_a_suitable_torch() -> None:
    ours = Target(pick.CHECKOUT / ".venv", own=True)
    active = {"VIRTUAL_ENV": "/active"}
    good, old = State((3, 12), torch=CUDA), State((3, 12), torch=Torch("2.4.0", None))
    assert pick.choose_target({}, lambda python: None) == ours
    assert pick.choose_target(active, lambda python: good) == Target(Path("/active"), own=False)
    for unfit in (None, State((3, 12)), old, State((3, 10), torch=CUDA)):
        assert pick.choose_target(active, lambda python, state=unfit: state) == ours
    assert pick.choose_target({"VIRTUAL_ENV": str(ours.folder)}, lambda python: good) == ours
    named = {"DISTCACHE_VENV": "/named", **active}
    assert pick.choose_target(named, lambda python: good) == Target(Path("/named"), own=True)


def test_own_environment_gets_torch_before_the_rest() -> None:
    index = ["--extra-index-url", "https://index"]
    venv, tools, torch = pick.torch_commands(OWN, None, index)
    assert venv[1:] == ["-m", "venv", "/e"]
    assert "--no-deps" in tools and tools[-1].startswith("setuptools==")
    assert torch[4:] == [f"torch=={pick.TORCH}", "-c", str(pick.LOCK), *index]
    assert pick.torch_commands(OWN, everything(CPU), index) == []
    lock, pair, checkout = pick.rest_commands(OWN, everything(CPU), "cpu", index)[0]
    assert all("--no-deps" in command for command in (lock, pair, checkout))
    assert lock[-4:] == ["-r", str(pick.LOCK), "-r", str(pick.TEST)]
    assert pair[-4:] == ["torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0", *index]
    assert checkout[-2:] == ["-e", str(pick.CHECKOUT)]
    state = everything(CUDA, "torchrec==1.8.0", "fbgemm_gpu-cpu==1.8.0")  # one replaces the other
    _, gone, came, _ = pick.rest_commands(OWN, state, "cuda", [])[0]
    assert gone[3:] == ["uninstall", "-y", "fbgemm-gpu-cpu"]
    assert came[-1] == "fbgemm-gpu==1.8.0"


def test_activated_environment_is_only_completed() -> None:
    torch = Torch("2.12.0", None)
    full = everything(torch, "torchrec==1.7.0", "fbgemm-gpu==1.7.0")
    (checkout,), why = pick.rest_commands(THEIRS, full, "cpu", [])
    assert checkout[-2] == "-e" and "kept" in why
    assert pick.torch_commands(THEIRS, full, []) == []
    packages = {n: "0.1" for n in full.packages if n not in ("hydra-core", "torchrec")}
    commands, _ = pick.rest_commands(THEIRS, State((3, 11), packages, torch), "cpu", [])
    assert [command[6:] for command in commands[:2]] == [
        ["hydra-core==1.3.8"],
        ["torchrec==1.7.0", "fbgemm-gpu-cpu==1.7.0"],
    ]


def test_fingerprint_changes_with_what_decides() -> None:
    state, env = everything(CPU), {"DISTCACHE_ACCELERATOR": "cpu"}
    base = pick.fingerprint(OWN, state, env)
    assert base == pick.fingerprint(OWN, everything(CPU), env)
    others = [
        pick.fingerprint(OWN, state, {"DISTCACHE_ACCELERATOR": "cuda"}),
        pick.fingerprint(OWN, state, env | {"DISTCACHE_TORCH_INDEX": "https://index"}),
        pick.fingerprint(OWN, everything(CPU, "numpy==1.0"), env),
        pick.fingerprint(THEIRS, state, env),
    ]
    assert base not in others


OUTSIDE = {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"}


def required(name: str) -> set[str]:
    """Names that an installed distribution requires here, without its extras."""
    wanted = map(Requirement, importlib.metadata.requires(name) or [])
    here = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return {canonicalize_name(one.name) for one in here}


def test_every_line_is_pinned_once() -> None:
    wanted = pick.lines(pick.BUILD, pick.LOCK, pick.TEST)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in wanted)
    names = [pick.normalised(line)[0] for line in wanted]
    assert len(names) == len(set(names))


def test_requirements_of_the_locked_are_locked() -> None:
    names = {pick.normalised(line)[0] for line in pick.lines(pick.BUILD, pick.LOCK, pick.TEST)}
    for name in sorted(names | {"torchrec"}):
        assert required(name) <= names | OUTSIDE, name


def test_triton_is_the_one_that_torch_wants() -> None:
    wanted = [Requirement(one) for one in importlib.metadata.requires("torch") or []]
    named = [one for one in wanted if canonicalize_name(one.name) == "triton"]
    if not named:
        pytest.skip("a CPU build of torch names no triton")
    if importlib.metadata.version("torch").split("+")[0] != pick.TORCH:
        pytest.skip("another torch than the pinned one brings its own triton")
    (ours,) = (v for n, v in map(pick.normalised, pick.lines(pick.TEST)) if n == "triton")
    assert all(ours in one.specifier for one in named)
