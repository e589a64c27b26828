#!/usr/bin/env bash
# Everything that must pass: lint, types, all tests. It first makes the environment and installs what tests need.
#
#   bash tests/run.sh                 all tests, three files at a time
#   bash tests/run.sh --quick         lint, types, tests/unit, and one test of a launch, a session and a kernel: 3 minutes
#   bash tests/run.sh ARGUMENT...     one plain pytest with these arguments: bash tests/run.sh tests/unit -k plan
#   bash tests/run.sh --gpu           what needs a GPU, and nothing else: tests/gpu/README.md
#   bash tests/run.sh --platforms     tests/platforms with each platform's own torch, and its Python if it is found (30 GB)
#
# notebooks/venv.sh says which variables choose the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../notebooks/venv.sh"

install() {  # PURPOSE PACKAGE...: Debian's packages, whose services do not start
    local sudo=() policy=/usr/sbin/policy-rc.d purpose=$1
    shift
    command -v apt-get > /dev/null || die "$purpose, and there is no apt-get here to install it."
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo > /dev/null || die "$purpose: as root, run apt-get install $*"
        sudo=(sudo)
    fi
    say "Installing Debian's packages: $purpose"
    ${sudo[@]+"${sudo[@]}"} apt-get update -qq
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' | ${sudo[@]+"${sudo[@]}"} tee $policy > /dev/null
        ${sudo[@]+"${sudo[@]}"} chmod +x $policy
        trap "${sudo[*]+${sudo[*]}} rm -f $policy" EXIT
    fi
    ${sudo[@]+"${sudo[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" > /dev/null
}

install_programs() {
    command -v chromium > /dev/null || install "tests/browser needs \`chromium\` on the PATH" chromium
    local program
    for program in slurmctld slurmd srun munged sshd ssh ip tc ps; do
        PATH="$PATH:/usr/sbin:/sbin" command -v $program > /dev/null && continue
        install "tests/engines needs Slurm, OpenSSH, ip, tc and ps" \
            slurmctld slurmd slurm-client munge openssh-server openssh-client iproute2 procps
        break
    done
}

check() { say "» $*"; "$python" -m "$@"; }

if [ "${1:-}" = --gpu ]; then
    shift
    compgen -G '/dev/nvidia[0-9]*' > /dev/null || [ -e /dev/dxg ] || die "--gpu: no NVIDIA GPU is here (/dev/nvidia0)."
    use_venv gpu
    cd "$root"
    exec "$python" -m tests.gpu "$@"
fi

if [ "${1:-}" = --platforms ]; then
    shift
    use_venv test
    cd "$root"
    NBLAUNCH_REAL_PLATFORMS=1 exec "$python" -m pytest tests/platforms "$@"
fi

[ "${1:-}" = --quick ] || install_programs
use_venv test
unset PYTHONDONTWRITEBYTECODE  # every kernel, server and rank would compile what it imports
cd "$root"
check ruff check .
check ruff format --check .
check mypy &  # beside the tests, which wait much
types=$! status=0
if [ "${1:-}" = --quick ]; then
    check pytest -n 2 --dist loadfile tests/unit tests/processes/test_several.py tests/kernel/test_magics.py || status=$?
elif [ $# -gt 0 ]; then
    check pytest "$@" || status=$?
else
    check pytest -n 3 --dist loadfile --no-loadscope-reorder --maxfail 20 || status=$?
    say "$("$python" -m tests.gpu --look)"
fi
wait $types || status=$?
exit $status
