#!/usr/bin/env bash
# Correctness on a machine with one GPU, within about four minutes and without network: one training run in
# seven variants, whose digests must be equal, then the tests marked `gpu`, steps and kernels.
#
#   bash launch/gpu_first_run.sh
#
#   OUT=gpu_first_run   folder of logs, reports and digests.txt
#   WHEELS=...          folder of wheels that python3 lacks (hydra-core, omegaconf, antlr4-python3-runtime,
#                       torchrec and fbgemm-gpu-cpu of torch's version, tensordict, pyvers, torchmetrics)
#   PYTHON=python3      interpreter
#   DEVICE=cuda         `cpu` rehearses the digests alone
set -uo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="$(realpath -m "${OUT:-gpu_first_run}")"
device="${DEVICE:-cuda}"
python="${PYTHON:-python3}"
if [[ "$python" == */* ]]; then
    python="$(realpath -s "$python")"
fi
mkdir -p "$out" && cd "$checkout" || exit 1
export PYTHONPATH="$checkout" PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
if [[ -n "${WHEELS:-}" ]]; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    timeout 60 "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" "$WHEELS"/*.whl || exit 1
    export PYTHONPATH="$checkout:$site"
fi

failed=0
# part NAME SECONDS ARGUMENTS: run python with the arguments; a part that fails does not end the others.
part() {
    local name="$1" limit="$2" began=$SECONDS code=0
    shift 2
    timeout --signal=INT --kill-after=9 "$limit" "$python" "$@" >"$out/$name.log" 2>&1 || code=$?
    echo "$name: exit code $code after $((SECONDS - began)) s: $(tail -n 1 "$out/$name.log" | cut -c -150)"
    return $code
}

train=(-m distcache.train experiment=quickstart trainer.steps=150 trainer.eval_steps=4
    "trainer.device=$device" trainer.threads=1 model.embedding_dim=64 "model.dense_arch=[128,64]"
    "data.table_rows=[200000,90000,9000,9]" cache.ratio=0.2 cache.resident=none optim=adagrad)
variants=("parallel=resident" "parallel=data" "parallel=data trainer.cuda_graph=false"
    "parallel=data cache.prefetch=3" "parallel=data trainer.steps=70 run.save=true")
if [[ "$device" == cuda ]]; then
    nvidia-smi -L
    variants+=("parallel=data store.access=zero_copy")
fi
jobs=()
for index in "${!variants[@]}"; do
    read -ra overrides <<<"${variants[index]}"
    folder="run$index"
    if [[ "${variants[index]}" == *run.save=true ]]; then
        folder=resumed
    fi
    part "$folder" 120 "${train[@]}" "run.dir=$out/$folder" "${overrides[@]}" &
    jobs+=($!)
done
for job in "${jobs[@]}"; do
    wait "$job" || failed=1
done
# The run that has stopped at step 70 goes on to the end: its first steps were replayed from a graph that
# this process records anew.
part resumed_again 90 "${train[@]}" "run.dir=$out/resumed" parallel=data run.save=true || failed=1

"$python" - "$out" <<'E2' | tee "$out/digests.txt"
import json, pathlib, sys

digests = {}
for file in sorted(pathlib.Path(sys.argv[1]).glob("*/summary.json")):
    summary = json.loads(file.read_text())
    digests[file.parent.name] = summary["loss_digest"], summary["state_digest"]
    print(file.parent.name, *(digest[:12] for digest in digests[file.parent.name]))
equal = len(set(digests.values())) == 1 and len(digests) >= 5
print(f"digests of {len(digests)} runs:", "equal" if equal else "DIFFERENT")
sys.exit(not equal)
E2
[[ "${PIPESTATUS[0]}" == 0 ]] || failed=1

if [[ "$device" == cuda ]]; then
    part tests 160 -m pytest -m gpu -q -n 6 --dist worksteal -p no:cacheprovider \
        tests/parallel/test_cuda.py tests/cache/test_cache.py tests/store/test_store.py || failed=1
    steps=(-m benchmarks.step device=cuda batch=16384 modes=data,resident,bag repetitions=3 warmup_most=60)
    part step_64 75 "${steps[@]}" widths=64 "out=$out/step_64.md" || failed=1
    part kernels 45 -m benchmarks.kernels device=cuda "out=$out/kernels.md" || failed=1
fi
exit $failed
