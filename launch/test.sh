#!/usr/bin/env bash
# Set-up, then pytest with the arguments given; without an -m among them, all but the slow tests, and
# without an -n (or --pdb) in several processes: half as many as there are processors, 2 to 8.
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
workers=$(($(nproc) / 2))
workers=$((workers < 2 ? 2 : workers > 8 ? 8 : workers))
# A file's tests share what is expensive to make, and conftest.py puts the longest files first.
spread=(-n "$workers" --dist loadfile --no-loadscope-reorder)
for argument in "$@"; do
    case "$argument" in
        -m*) marks=() ;;
        -n* | --numprocesses* | --pdb) spread=() ;;
    esac
done
cd "$CHECKOUT"
exec "$PYTHON" -m pytest "${marks[@]}" "${spread[@]}" "$@"
