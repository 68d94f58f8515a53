"""Which packages are here, and whether torch, fbgemm and torchrec fit together.

Nothing here imports torchrec or fbgemm before `require_hybrid` is called: the other modes need
neither.
"""

from __future__ import annotations

import functools
import importlib
import platform
import zlib
from importlib import metadata
from pathlib import Path

from distcache.errors import ConfigError

FBGEMM_DISTRIBUTIONS = ("fbgemm-gpu", "fbgemm-gpu-cpu")
"""One import name, `fbgemm_gpu`; the CUDA build and the CPU build."""

DISTRIBUTIONS = (
    "distcache",
    "torch",
    "torchrec",
    *FBGEMM_DISTRIBUTIONS,
    "numpy",
    "numba",
    "triton",
    "hydra-core",
)
"""What the ranks of a job compare, and a run records."""

NOT_INSTALLED = "not installed"

SOURCE = "distcache's source"
"""Name of the checksum of this package's files: a checkout has no version of its own."""

FITTING = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}
"""torch minor version -> the one fbgemm minor version that was built for it."""

OTHER_MODES = "parallel=data, resident and host need neither torchrec nor fbgemm"


def installed(distribution: str) -> str | None:
    """Version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions_here() -> dict[str, str]:
    """Python, `DISTRIBUTIONS` and `SOURCE`, each as words; torch's with its build."""
    import torch

    found = {name: installed(name) or NOT_INSTALLED for name in DISTRIBUTIONS}
    return found | {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        SOURCE: source_checksum(),
    }


@functools.cache
def source_checksum() -> str:
    """A checksum of the Python files of this package, by name and content."""
    folder, total = Path(__file__).parent, 0
    for file in sorted(folder.rglob("*.py")):
        total = zlib.crc32(str(file.relative_to(folder)).encode(), total)
        total = zlib.crc32(file.read_bytes(), total)
    return f"{total:08x}"


def minor(version: str) -> str:
    """`2.13` of `2.13.0+cpu`."""
    return ".".join(version.split("+")[0].split(".")[:2])


def fbgemm_here() -> dict[str, str]:
    """The installed fbgemm distributions and their versions."""
    found = {name: installed(name) for name in FBGEMM_DISTRIBUTIONS}
    return {name: version for name, version in found.items() if version is not None}


def way_out(torch_version: str, cuda: bool) -> str:
    """What to install beside this torch so that `hybrid` runs."""
    fitting = FITTING.get(minor(torch_version))
    if fitting is None:
        known = f"no fbgemm built for torch {torch_version} (it knows torch {', '.join(FITTING)})"
        return f"distcache knows {known}; {OTHER_MODES}"
    name = "fbgemm-gpu" if cuda else "fbgemm-gpu-cpu"
    packages = f"'{name}=={fitting}.*' 'torchrec=={fitting}.*'"
    return f"pip install --no-deps {packages}; {OTHER_MODES}"


def check_versions(torch_version: str, cuda: bool, fbgemm: dict[str, str], torchrec: str | None):
    """Raise ConfigError where `hybrid` cannot run with these versions, before importing anything.

    `fbgemm`: installed fbgemm distributions and their versions; `torchrec`: version or None.
    """
    missing = [name for name, there in (("torchrec", torchrec), ("fbgemm", fbgemm)) if not there]
    advice = way_out(torch_version, cuda)
    if missing:
        raise ConfigError(
            f"parallel=hybrid needs {' and '.join(missing)}, which is not installed: {advice}"
        )
    builds = {fits: torch for torch, fits in FITTING.items()}
    for name, version in fbgemm.items():
        built_for = builds.get(minor(version), "another version")
        if built_for != minor(torch_version):
            raise ConfigError(
                f"parallel=hybrid: {name} {version} was built for torch {built_for}, "
                f"but torch {torch_version} is installed: {advice}"
            )


def require_hybrid() -> None:
    """Import fbgemm and torchrec, or raise a ConfigError that says what is wrong and the way out.

    fbgemm may refuse to load with OSError or AttributeError (undefined symbols), or load without
    registering its operators when two builds overwrote each other.
    """
    import torch

    cuda = torch.version.cuda is not None
    fbgemm = fbgemm_here()
    check_versions(torch.__version__, cuda, fbgemm, installed("torchrec"))
    try:
        importlib.import_module("fbgemm_gpu")
        # Looking an operator up raises AttributeError where it was not registered.
        _ = torch.ops.fbgemm.asynchronous_complete_cumsum.default
        importlib.import_module("torchrec")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        both = " and ".join(fbgemm) if len(fbgemm) > 1 else ""
        twice = f" (both {both} are installed and overwrite each other: keep one)" if both else ""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"parallel=hybrid: fbgemm or torchrec does not load beside torch {torch.__version__}: "
            f"{reason}{twice}; {way_out(torch.__version__, cuda)}"
        ) from error
