#!/usr/bin/env bash
# One training job on this node: torchrun with one rank per GPU (without GPUs: two ranks).
#
#   [RANKS=4] bash launch/torchrun.sh [key=value ...]
#
# The same by hand:  torchrun --standalone --nproc-per-node 4 -m distcache.train key=value ...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
if [[ "${1:-}" == --dry-run ]]; then
    distcache_setup --dry-run
    exit
fi
distcache_setup

ranks="${RANKS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')}"
threads=$(($(nproc) / ranks))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    -m distcache.train "$@"
