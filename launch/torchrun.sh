#!/usr/bin/env bash
# One training job under torchrun, with one rank per GPU (without GPUs: two ranks) on each node.
#
#   [RANKS=4] bash launch/torchrun.sh [--dry-run] [key=value ...]
#   NODES=2 MASTER_ADDR=<host of one of them> [NODE_RANK=0] bash launch/torchrun.sh [key=value ...]
#
# The second line is run on every node, with the same arguments in the same folder (launch/README.md).
# By hand:  torchrun --standalone --nproc-per-node 4 -m distcache.train key=value ...
#           torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-id 1 \
#               --rdzv-endpoint <host>:29400 -m distcache.train key=value ...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
dry=()
if [[ "${1:-}" == --dry-run ]]; then
    dry=(--dry-run)
    shift
fi
for name in NODES RANKS NODE_RANK; do
    value="${!name:-}" least=1
    if [[ "$name" == NODE_RANK ]]; then
        least=0
    fi
    if [[ -n "$value" ]] && { [[ ! "$value" =~ ^(0|[1-9][0-9]*)$ ]] || ((value < least)); }; then
        echo "torchrun.sh: $name=$value is no whole number of at least $least" >&2
        exit 1
    fi
done
nodes="${NODES:-1}"
if ((nodes > 1)) && [[ -z "${MASTER_ADDR:-}" ]]; then
    echo "torchrun.sh: NODES=$nodes needs MASTER_ADDR, the host name or address of one of the nodes" >&2
    exit 1
fi
distcache_setup "${dry[@]}"

ranks="${RANKS:-}"
if [[ -z "$ranks" && ${#dry[@]} -eq 0 ]]; then
    ranks="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')"
fi
meeting=(--standalone)
if ((nodes > 1)); then
    meeting=(
        --nnodes "$nodes" --rdzv-backend c10d --rdzv-id "${JOB_ID:-distcache}"
        --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29400}"
    )
    if [[ -n "${NODE_RANK:-}" ]]; then # else torchrun looks whether MASTER_ADDR is its own host
        meeting+=(--rdzv-conf "is_host=$((NODE_RANK == 0))")
    fi
fi
# Else ranks that torchrun starts again find the addresses of those before them in its store.
job=(
    env "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}" "$PYTHON"
    -m torch.distributed.run "${meeting[@]}" --nproc-per-node "${ranks:-<GPUs, or 2>}"
    -m distcache.train "$@"
)
if [[ ${#dry[@]} -gt 0 ]]; then
    echo "then:"
    echo "  ${job[*]@Q}"
    exit
fi
threads=$(($(nproc) / ranks))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
exec "${job[@]}"
