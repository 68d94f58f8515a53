#!/usr/bin/env bash
# Set-up, then pytest with the arguments given; without an -m among them, all but the slow tests.
#
#   bash launch/test.sh [--dry-run] [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [[ "${1:-}" == --dry-run ]]; then
    distcache_setup --dry-run
    exit
fi
distcache_setup

marks=(-m "not slow")
for argument in "$@"; do
    if [[ "$argument" == -m* ]]; then
        marks=()
    fi
done
cd "$CHECKOUT"
exec "$PYTHON" -m pytest "${marks[@]}" "$@"
