#!/usr/bin/env bash
# The tests and benchmarks that need a GPU: tests marked `gpu`, kernels, the published cache benchmark, and
# whole steps. Each part writes a report and a log when it ends, and a part that fails does not end the others.
#
#   bash launch/gpu.sh [--dry-run] [part ...]      all parts, or the named ones
#   bash launch/gpu.sh [--dry-run] quick           the most important ones, within eight minutes
#
#   OUT=docs/results/gpu   folder of reports and logs
#   PART_S=900             time limit of a part in seconds; each part of `quick` has its own
#   PYTHON=...             interpreter with distcache's packages; by default python3, if it has them and its
#                          torch sees a GPU, else that of launch/setup.sh
#   WHEELS=...             folder of wheels that this interpreter lacks, for a machine without network; they
#                          are installed into a temporary folder
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

out="${OUT:-$CHECKOUT/docs/results/gpu}"
dry=""
if [[ "${1:-}" == --dry-run ]]; then
    dry=1
    shift
fi

step=(-m benchmarks.step device=cuda repetitions=7)
all=data,resident,fused
cache=(-m benchmarks.cache device=cuda)
quick=("${step[@]}" batch=16384 "modes=$all" repetitions=3 warmup_most=60)
# Their files by name: collecting the whole suite takes longer than these tests.
tests=(-m pytest -m gpu -q -n 6 --dist worksteal -p no:cacheprovider
    tests/cache/test_cache.py tests/parallel/test_cuda.py tests/store/test_store.py)
parts=(tests kernels cache step_64 step_128 zero_copy_64 embeddings_64 small_batch_64 fbgemm_64
    fbgemm_adam_64 terabyte_64)

# The arguments of python for a part, in `command`; 1 for a part that there is not.
arguments_of() {
    case "$1" in
        tests) command=("${tests[@]}") ;;
        kernels) command=(-m benchmarks.kernels device=cuda) ;;
        cache) command=("${cache[@]}" rows=4000000) ;;
        quick_cache) command=("${cache[@]}" rows=400000 slots=1.5x warmup=40) ;;
        step_64) command=("${step[@]}" batch=16384 widths=64 "modes=$all,serial") ;;
        step_128) command=("${step[@]}" batch=16384 widths=128 "modes=$all") ;;
        zero_copy_64) command=("${step[@]}" batch=16384 widths=64 modes=data,resident store.access=zero_copy) ;;
        embeddings_64) command=("${step[@]}" batch=16384 widths=64 "modes=$all" model=embeddings) ;;
        small_batch_64) command=("${step[@]}" batch=4096 widths=64 "modes=$all") ;;
        fbgemm_64) command=("${step[@]}" batch=16384 widths=64 modes=data,uvm,uvm_prefetch) ;;
        fbgemm_adam_64)
            command=("${step[@]}" batch=16384 widths=64 modes=data,uvm,uvm_prefetch optimizer=adam)
            ;;
        quick_step_64) command=("${quick[@]}" widths=64) ;;
        quick_step_128) command=("${quick[@]}" widths=128) ;;
        terabyte_64) command=("${step[@]}" batch=16384 widths=64 modes=data,resident size=terabyte) ;;
        *) return 1 ;;
    esac
    if [[ "$1" != tests ]]; then
        command+=("out=$out/$1.md")
    fi
}

wanted=("${@:-${parts[@]}}")
declare -A limits=()
if [[ "${wanted[*]}" == quick ]]; then
    wanted=(tests quick_step_64 kernels quick_step_128 quick_cache)
    limits=([tests]=160 [quick_step_64]=75 [kernels]=45 [quick_step_128]=85 [quick_cache]=60)
fi
for part in "${wanted[@]}"; do
    if ! arguments_of "$part"; then
        echo "gpu: $part is no part: choose among ${parts[*]}" >&2
        exit 1
    fi
done
# Whether an interpreter has all that the parts need, and a GPU.
complete() {
    "$1" -c 'import hydra, numba, omegaconf, pytest, torch, tqdm, sys; sys.exit(not torch.cuda.is_available())' \
        2>/dev/null
}

if [[ -n "${WHEELS:-}" ]]; then
    if ! compgen -G "$WHEELS/*.whl" >/dev/null; then
        echo "gpu: WHEELS=$WHEELS has no *.whl file" >&2
        exit 1
    fi
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    timeout 60 "${PYTHON:-python3}" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
        --upgrade --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$CHECKOUT:$site${PYTHONPATH:+:$PYTHONPATH}"
else
    export PYTHONPATH="$CHECKOUT${PYTHONPATH:+:$PYTHONPATH}"
fi
if [[ -z "${PYTHON:-}" ]] && complete python3; then
    PYTHON=python3
elif [[ -z "${PYTHON:-}" ]]; then
    distcache_setup ${dry:+--dry-run}
fi
if [[ -n "$dry" ]]; then
    for part in "${wanted[@]}"; do
        arguments_of "$part"
        echo "$part: ${PYTHON:-python} ${command[*]}"
    done
    exit
fi
out="$(realpath -m "$out")"
if [[ "$PYTHON" == */* ]]; then
    PYTHON="$(realpath -s "$PYTHON")"
fi
cd "$CHECKOUT"
"$PYTHON" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "gpu: torch sees no GPU here; --dry-run shows the commands")'
mkdir -p "$out"

# Ctrl-C and kill end the part that runs, which `timeout` keeps in a process group of its own, and this.
stop() {
    trap - INT TERM
    kill -INT "$running" 2>/dev/null || true
    wait "$running" || true
    echo "gpu: stopped; what was done is in $out" >&2
    exit 130
}

# Why FBGEMM's own cache does not run here; nothing where it does.
why_no_fbgemm() {
    "$PYTHON" -c 'import torch; from benchmarks.baselines import why_no_fbgemm; print(why_no_fbgemm(torch.device("cuda")))'
}

failed=0
for part in "${wanted[@]}"; do
    if [[ "$part" == fbgemm_* ]] && why="$(why_no_fbgemm)" && [[ -n "$why" ]]; then
        echo "$part: left out: $why; torch's tables (modes=bag) and the bench of kernels stand for it"
        continue
    fi
    arguments_of "$part"
    began=$SECONDS code=0 limit="${PART_S:-${limits[$part]:-900}}"
    timeout --signal=INT --kill-after=20 "$limit" "$PYTHON" "${command[@]}" >"$out/$part.log" 2>&1 &
    running=$!
    trap stop INT TERM
    wait "$running" || code=$?
    trap - INT TERM
    said=done
    if ((code != 0 && SECONDS - began >= limit)); then
        said="cut off"
    elif ((code != 0)); then
        said="failed with exit code $code"
    fi
    echo "$part: $said after $((SECONDS - began)) s: $(tail -n 1 "$out/$part.log" | cut -c -200)"
    failed=$((failed + (code != 0)))
done
exit $((failed > 0))
