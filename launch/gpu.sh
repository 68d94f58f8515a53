#!/usr/bin/env bash
# Set-up, then everything that only a GPU can tell: the tests marked `gpu`, and the benches of kernels, of
# rows between host and device, and of whole steps. A report for each part, and a line that says how it went.
#
#   bash launch/gpu.sh [--dry-run] [part ...]      all parts, or those named
#   bash launch/gpu.sh [--dry-run] quick           what says most, in eight minutes after the set-up
#
#   OUT=docs/results/gpu   folder of reports and logs
#   PART_S=900             seconds after which a part is cut off; of `quick`, each has its own
#   PYTHON=...             an interpreter that has distcache's packages; then nothing is set up
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
parts=(tests kernels access step_64 step_128 zero_copy_64 embeddings_64 small_batch_64 fbgemm_64
    fbgemm_adam_64 terabyte_64)

# The arguments of python for a part, in `command`; 1 for a part that there is not.
arguments_of() {
    case "$1" in
        tests) command=(-m pytest -m gpu -q -p no:cacheprovider tests) ;;
        kernels) command=(-m benchmarks.kernels device=cuda) ;;
        access) command=(-m benchmarks.rows parts=device device=cuda) ;;
        step_64) command=("${step[@]}" batch=16384 widths=64 "modes=$all,serial") ;;
        step_128) command=("${step[@]}" batch=16384 widths=128 "modes=$all") ;;
        zero_copy_64) command=("${step[@]}" batch=16384 widths=64 modes=data,resident store.access=zero_copy) ;;
        embeddings_64) command=("${step[@]}" batch=16384 widths=64 "modes=$all" model=embeddings) ;;
        small_batch_64) command=("${step[@]}" batch=4096 widths=64 "modes=$all") ;;
        fbgemm_64) command=("${step[@]}" batch=16384 widths=64 modes=data,uvm,uvm_prefetch) ;;
        fbgemm_adam_64)
            command=("${step[@]}" batch=16384 widths=64 modes=data,uvm,uvm_prefetch optimizer=adam)
            ;;
        quick_steps)
            command=("${step[@]}" batch=16384 widths=64,128 "modes=$all" repetitions=3 warmup_most=100)
            ;;
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
    wanted=(quick_steps tests kernels access)
    limits=([quick_steps]=210 [tests]=130 [kernels]=80 [access]=50)
fi
for part in "${wanted[@]}"; do
    if ! arguments_of "$part"; then
        echo "gpu: $part is no part: choose among ${parts[*]}" >&2
        exit 1
    fi
done
if [[ -z "${PYTHON:-}" ]]; then
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
    "$PYTHON" -c 'import torch; from benchmarks.yardsticks import why_no_fbgemm; print(why_no_fbgemm(torch.device("cuda")))'
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
