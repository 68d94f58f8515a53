#!/usr/bin/env bash
# Set-up, then one comparison on a click stream of Criteo Kaggle's shape: two ranks under torchrun
# train DLRM data-parallel with 1.5 % of the rows cached, then with TorchRec's hybrid layout.
#
#   bash launch/quickstart.sh [--dry-run] [key=value ...]
#
# Further arguments go to distcache.compare and override those below. --dry-run prints what would
# be installed and run. Variables for the set-up: launch/install.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

dry=()
if [[ "${1:-}" == --dry-run ]]; then
    dry=(--dry-run)
    shift
fi
distcache_setup "${dry[@]}"

compare=(
    "$PYTHON" -m distcache.compare modes=data,hybrid world_size=2 experiment=quickstart "$@"
)
cd "$CHECKOUT"
if [[ ${#dry[@]} -gt 0 ]]; then
    echo "then, in $CHECKOUT:"
    echo "  ${compare[*]@Q}"
    exit
fi
exec "${compare[@]}"
