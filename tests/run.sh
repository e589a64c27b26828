#!/usr/bin/env bash
# Everything that must pass: lint, types, all tests. It first makes the environment and installs what tests need.
#
#   bash tests/run.sh                 all tests: four files at a time, then those marked `alone` one by one
#   bash tests/run.sh ARGUMENT...     one plain pytest with these arguments: bash tests/run.sh tests/unit -k plan
#
# notebooks/venv.sh says which variables choose the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../notebooks/venv.sh"

install_chromium() {
    local sudo=()
    if command -v chromium > /dev/null; then return; fi
    command -v apt-get > /dev/null || die "tests/browser needs \`chromium\` on the PATH, and there is no apt-get here to install it."
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo > /dev/null || die "tests/browser needs Debian's chromium: as root, run apt-get install chromium"
        sudo=(sudo)
    fi
    say "Installing Debian's chromium for tests/browser"
    ${sudo[@]+"${sudo[@]}"} apt-get update -qq
    ${sudo[@]+"${sudo[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null
}

check() { say "» $*"; "$python" -m "$@"; }

install_chromium
use_venv test
cd "$root"
check ruff check .
check ruff format --check .
check mypy
if [ $# -gt 0 ]; then
    check pytest "$@"
else
    status=0
    check pytest -m "not alone" -n 4 --dist loadfile --no-loadscope-reorder || status=$?
    check pytest -m alone || status=$?
    exit $status
fi
