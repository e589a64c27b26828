# Sourced by notebooks/run.sh and tests/run.sh: one virtual environment for both.
#
#   NBLAUNCH_VENV   where it is (default: .venv in the repository's root)
#   PYTHON          the interpreter that makes it (default: the first Python >= 3.10 that is found)
#
# use_venv EXTRA leaves the environment's interpreter in $python.

SAY_EVERY_S=20
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*" >&2; }
die() { say "$(basename "$0"): $*"; exit 1; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" || die "PYTHON=$PYTHON does not run, or is older than Python 3.10."
        printf '%s\n' "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if is_new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python 3.10 or later was found. Install one, or name it: PYTHON=/path/to/python3 bash $0"
}

# What an installed environment must match: this checkout, and its pyproject.toml as it is now.
wanted() { printf '# %s\n' "$root"; cat "$root/pyproject.toml"; }

make_venv() {
    local venv=$1 base
    base=$(find_python)
    say "Making a virtual environment with $("$base" --version) in $venv"
    "$base" -m venv "$venv" || die "could not make $venv. On Debian and Ubuntu: apt-get install python3-venv"
}

# Run pip install; without a terminal, say every 20 s what it does. A failure shows all that it has printed.
pip_install() (  # in a subshell, which has traps of its own
    local command=("$python" -m pip install --disable-pip-version-check "$@") log status=0 pid
    if [ -t 2 ]; then "${command[@]}" >&2; exit; fi
    log=$(mktemp)
    "${command[@]}" --progress-bar off > "$log" 2>&1 &
    pid=$!
    trap 'kill $pid 2> /dev/null || true; rm -f "$log"' EXIT  # `set -e` holds in it
    trap 'exit 130' INT
    trap 'exit 143' TERM
    local begin=$SECONDS next=$((SECONDS + SAY_EVERY_S))
    while kill -0 $pid 2> /dev/null; do
        sleep 0.2
        [ $SECONDS -lt $next ] && continue
        next=$((SECONDS + SAY_EVERY_S))
        say "  $((SECONDS - begin)) s: $(tail -n 1 "$log" | sed 's/^ *//' | cut -c -100)"
    done
    wait $pid || status=$?
    [ $status -eq 0 ] || cat "$log" >&2
    exit $status
)

install_extra() {
    local venv=$1 extra=$2 size=""
    if [ "$(uname -s)" = Linux ]; then size="about 6 GB, most of it PyTorch's CUDA libraries; "; fi
    say "Installing nblaunch[$extra] in $venv (${size}the first time takes some minutes)"
    pip_install -e "$root[$extra]" ||
        die "pip could not install nblaunch[$extra]: see its message above, then run this again."
    say "Installed after $SECONDS s"
    wanted > "$venv/.nblaunch-$extra"
    if [ "$extra" = test ]; then cp "$venv/.nblaunch-test" "$venv/.nblaunch-lab"; fi  # test includes lab and gpu
    if [ "$extra" = test ]; then cp "$venv/.nblaunch-test" "$venv/.nblaunch-gpu"; fi
}

use_venv() {
    local extra=$1 venv=${NBLAUNCH_VENV:-$root/.venv}
    case $(uname -s) in
        Linux | Darwin) ;;
        *) die "nblaunch runs on Linux and macOS. On Windows, run this in WSL 2." ;;
    esac
    python=$venv/bin/python
    "$python" -m pip --version > /dev/null 2>&1 || make_venv "$venv"
    is_new_enough "$python" || die "$venv has a Python older than 3.10: remove it, or set NBLAUNCH_VENV."
    wanted | cmp -s - "$venv/.nblaunch-$extra" || install_extra "$venv" "$extra"
}
