"""The kernels as the GPU's compiler sees them: Triton compiles for a GPU that need not be there.

`python test_triton_compiles.py <compute capability> <width> ...`, without TRITON_INTERPRET, prints
one JSON line per launch: kernel, width, the constants that name the variant, and counts of
instructions in the PTX. ptxas must accept it too. The bodies run on CPU tensors with the launches
recorded, so tile sizes, strides and options are those of real calls.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jagged import bag_of, segments_of

from distcache.ops import long_segments
from distcache.ops.formulas import FORMULAS
from distcache.ops.long_segments import segment_chunks
from distcache.ops.reference import Rule

triton = pytest.importorskip("triton", reason="Triton is not installed")

COUNTED = {
    "wide_loads": r"ld\.global[^;]*\.v4\.b32",
    "fused": r"fma\.rn\.f32|mad\.f32",
    "sqrt": r"sqrt\.rn\.f32",
    "division": r"div\.rn\.f32",
    "approximate": r"\.approx|div\.full",
    "atomics": r"\batom|\bred\.",
    "barriers": r"bar\.sync",
    "rounded": r"cvt\.rn\.(bf16|f16)",
}
TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16"}
TYPES |= {
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    float: "fp32",
    int: "i32",
}
VARIANT = ("HOPS", "WEIGHTED", "SCATTER", "MOST", "RULE", "DECAY", "MASKED", "FROM", "TO")


class Recorder:
    """Stands for a kernel: notes launches instead of running them."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.launches.append((self.kernel, arguments, constants))

        return launch


def call_all(width):
    """Every operation in every variant that callers can reach."""
    from distcache.ops import triton as bodies

    positions = torch.zeros(40, dtype=torch.int64)
    offsets = torch.arange(0, 41, 2)
    order, segments = segments_of(positions, 1)
    rows = torch.zeros(4, width)
    for weights in (None, torch.ones(40)):
        bodies.pooled_lookup(rows, positions, offsets, weights)
        upstream = torch.zeros(20, width)
        for chunk in (2, 40):
            long_segments.CHUNK = chunk
            call = (upstream, bag_of(offsets), order, segments, weights)
            bodies.row_gradients(*call, segment_chunks(segments))
    at = torch.arange(3)
    bodies.copy_rows(rows, at, torch.zeros(3, width), None)
    bodies.copy_rows(torch.zeros(3, width), None, rows, at)
    for name, decays in (*((name, "") for name in FORMULAS), ("sgd", "decoupled"), ("adam", "l2")):
        formula, exponent = FORMULAS[name], 2 * (name == "ftrl")
        others = 3 + len(formula.state) + (exponent > 0)
        numbers = (0.1,) * (formula.step.__code__.co_argcount - others)
        rule = Rule(name, numbers, exponent, decays, 0.1)
        state = torch.zeros(4, FORMULAS[rule.name].width(width)) if name != "sgd" else None
        for enabled in (None, torch.ones((), dtype=torch.bool)):
            bodies.update_rows(rule, rows, state, torch.arange(3), torch.zeros(3, width), enabled)
    for dtype in (torch.float16, torch.bfloat16):  # with the last of these
        bodies.update_rows(rule, rows.to(dtype), state, torch.arange(3), torch.zeros(3, width))


def compiled(kernel, arguments, constants, capability):
    """The PTX and the machine code of one launch, its pointers aligned to 16 bytes, but those of
    indices, for whose alignment there is one code."""
    options = {key: constants.pop(key) for key in ("num_warps", "enable_fp_fusion")}
    names = kernel.arg_names
    given = dict(zip(names, arguments, strict=False))
    signature = {name: "constexpr" for name in names}
    signature |= {name: TYPES[getattr(v, "dtype", type(v))] for name, v in given.items()}
    pointers = [index for index, name in enumerate(names) if signature[name].startswith("*")]
    aligned = [at for at in pointers if not kernel.params[at].do_not_specialize_on_alignment]
    assert not any(signature[names[at]] == "*i64" for at in aligned), "a piece may begin anywhere"
    source = triton.compiler.ASTSource(
        kernel,
        signature,
        constexprs=dict(constants),
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    return triton.compile(
        source, target=triton.backends.compiler.GPUTarget("cuda", capability, 32), options=options
    ).asm


def main(capability, widths):
    from distcache.ops import triton_kernels

    for width in widths:
        launches: list = []
        for name in ("segment_sums", "update_rows", "copy_rows"):
            kernel = getattr(triton_kernels, name)
            kernel = kernel.kernel if isinstance(kernel, Recorder) else kernel
            setattr(triton_kernels, name, Recorder(kernel, launches))
        call_all(width)
        seen = set()
        for kernel, arguments, constants in launches:
            variant = {key: constants[key] for key in VARIANT if key in constants}
            variant |= {"RULE": constants["RULE"].__name__} if "RULE" in constants else {}
            dtype = str(arguments[0].dtype).removeprefix("torch.")
            variant |= {"kernel": kernel.__name__, "width": width, "dtype": dtype}
            if (key := tuple(variant.items())) in seen:
                continue
            seen.add(key)
            asm = compiled(kernel, arguments, dict(constants), capability)
            counts = {name: len(re.findall(p, asm["ptx"])) for name, p in COUNTED.items()}
            print(json.dumps(variant | counts | {"bytes": len(asm["cubin"])}), flush=True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ptxas is only tried on x86-64")
@pytest.mark.parametrize(
    ("capability", "widths"),
    [(80, (128,)), pytest.param(90, (4, 16, 33, 128), marks=pytest.mark.slow)],
)
def test_every_launch_compiles_and_rounds_as_it_says(
    capability: int, widths: tuple[int, ...], checkout: Path, tmp_path: Path
) -> None:
    """No fused multiply-add, no approximate quotient or root, no atomics; 16-byte loads for widths
    of 4 floats; no exchange between threads in sums."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join((str(checkout), str(checkout / "tests")))
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, __file__, str(capability), *map(str, widths)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert {one["width"] for one in found} == set(widths)
    for width in widths:
        sums = [one for one in found if (one["kernel"], one["width"]) == ("segment_sums", width)]
        updates = [one for one in found if (one["kernel"], one["width"]) == ("update_rows", width)]
        copies = [one for one in found if (one["kernel"], one["width"]) == ("copy_rows", width)]
        assert {one["HOPS"] for one in sums} == {0, 1, 2} and len(updates) == 22
        assert {(one["FROM"], one["TO"]) for one in copies} == {(True, False), (False, True)}
        for one in sums + updates + copies:
            assert one["bytes"] > 0
            assert one["fused"] == one["approximate"] == one["atomics"] == 0, one
            # At width 4 a program has fewer elements than its threads can load at once.
            assert (one["wide_loads"] > 0) == (width % 4 == 0 and width > 4), one
        assert all(one["barriers"] == 0 for one in sums + copies)
        for one in updates:
            rooted = one["RULE"] not in ("sgd", "momentum_sgd")
            assert (one["sqrt"] > 0) == (one["division"] > 0) == rooted, one
            assert (one["rounded"] > 0) == (one["dtype"] != "float32"), one


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(width) for width in sys.argv[2:]])
