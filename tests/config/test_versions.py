"""What is said of each combination of torch, fbgemm and torchrec."""

from __future__ import annotations

import sys

import pytest
import torch

from distcache import versions
from distcache.errors import ConfigError
from distcache.versions import check_versions, require_hybrid


def test_fitting_versions_pass():
    check_versions("2.13.0+cpu", False, {"fbgemm-gpu-cpu": "1.8.0"}, "1.8.0")
    check_versions("2.11.0+cu130", True, {"fbgemm-gpu-cpu": "1.6.0"}, "1.6.1")


@pytest.mark.parametrize(
    ("release", "cuda", "fbgemm", "torchrec", "words"),
    [
        ("2.13.0", False, {}, None, ["torchrec and fbgemm", "fbgemm-gpu-cpu==1.8.*"]),
        ("2.13.0", True, {}, "1.8.0", ["needs fbgemm", "'fbgemm-gpu==1.8.*'", "--no-deps"]),
        ("2.12.1", False, {"fbgemm-gpu-cpu": "1.7.0"}, None, ["needs torchrec", "torchrec==1.7.*"]),
        ("2.13.0+cpu", False, {"fbgemm-gpu-cpu": "1.6.0"}, "1.6.1",
         ["fbgemm-gpu-cpu 1.6.0 was built for torch 2.11", "torch 2.13.0+cpu", "1.8.*"]),
        ("2.13.0", True, {"fbgemm-gpu": "0.9.0"}, "1.8.0",
         ["another version", "fbgemm-gpu==1.8.*"]),
        ("2.20.0", False, {"fbgemm-gpu": "1.8.0"}, "1.8.0", ["torch 2.20.0", "parallel=data"]),
    ],
)  # fmt: skip
def test_misfits_name_the_way_out(release, cuda, fbgemm, torchrec, words):
    with pytest.raises(ConfigError) as caught:
        check_versions(release, cuda, fbgemm, torchrec)
    for word in words:
        assert word in str(caught.value)
    assert "parallel=data" in str(caught.value)


@pytest.fixture
def load(monkeypatch):
    """Sets what importing fbgemm gives, or raises, where the versions fit."""

    def set_to(found) -> None:
        def load(name: str):
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(versions.importlib, "import_module", load)

    monkeypatch.setattr(versions, "check_versions", lambda *values: None)
    return set_to


@pytest.mark.parametrize(
    "error",
    [OSError("undefined symbol: _ZN3c10\nmore"), ImportError("no module"), AttributeError()],
)
def test_what_does_not_load_is_explained(load, error):
    load(error)
    with pytest.raises(ConfigError, match="does not load beside torch") as caught:
        require_hybrid()
    text = str(caught.value)
    assert "pip install" in text and "more" not in text
    assert (str(error).splitlines() or ["AttributeError"])[0] in text


def test_two_builds_over_each_other_are_named(monkeypatch, load):
    load(OSError("undefined symbol"))
    both = {"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}
    monkeypatch.setattr(versions, "fbgemm_here", lambda: both)
    with pytest.raises(ConfigError, match="fbgemm-gpu and fbgemm-gpu-cpu are installed"):
        require_hybrid()


def test_operators_that_were_not_registered_are_noticed(monkeypatch, load):
    load(sys)
    monkeypatch.setattr(torch.ops, "fbgemm", object(), raising=False)
    with pytest.raises(ConfigError, match="asynchronous_complete_cumsum"):
        require_hybrid()
