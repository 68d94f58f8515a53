# Sourced by the other scripts: makes or reuses the environment (see launch/install.py, also for
# the DISTCACHE_* variables) and sets CHECKOUT and PYTHON. By itself: bash launch/setup.sh [--dry-run]
# DISTCACHE_PYTHON: the Python 3.11 or 3.12 to make the environment with, else the first found.

CHECKOUT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

distcache_find_python() {
    local candidate
    local check='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))'
    for candidate in ${DISTCACHE_PYTHON:+"$DISTCACHE_PYTHON"} python3.11 python3.12 python3 python; do
        if "$candidate" -c "$check" >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
        if [[ "$candidate" == "${DISTCACHE_PYTHON:-}" ]]; then
            echo "setup: DISTCACHE_PYTHON=$candidate is no Python 3.11 or 3.12 with venv and ensurepip" >&2
            return 1
        fi
    done
    echo "setup: no Python 3.11 or 3.12 that can make virtual environments (tried python3.11," \
        "python3.12, python3, python)." >&2
    echo "  way out: install one (Debian, Ubuntu: python3.12 and python3.12-venv; conda: create -n" \
        "distcache python=3.12), or name it in DISTCACHE_PYTHON" >&2
    return 1
}

# distcache_setup [--dry-run]: sets PYTHON; returns 1 with an explanation on stderr.
distcache_setup() {
    local base said
    base="$(distcache_find_python)" || return 1
    said="$("$base" "$CHECKOUT/launch/install.py" "$@")" || return 1
    PYTHON="${said##*$'\n'}"
    if [[ "$said" == *$'\n'* ]]; then
        echo "${said%$'\n'*}"
    fi
}

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    distcache_setup "$@" && echo "$PYTHON"
fi
