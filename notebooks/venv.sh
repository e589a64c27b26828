# Sourced by notebooks/run.sh and tests/run.sh: one virtual environment for both.
#
#   NBLAUNCH_VENV   where it is (default: .venv in the repository's root)
#   PYTHON          the interpreter that makes it (default: the first Python >= 3.10 that is found)
#
# use_venv EXTRA leaves the environment's interpreter in $python.

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

install_extra() {
    local venv=$1 extra=$2
    say "Installing nblaunch[$extra] (the first time takes some minutes: PyTorch is large)"
    "$python" -m pip install --quiet --disable-pip-version-check -e "$root[$extra]" ||
        die "pip could not install nblaunch[$extra]: see its message above, then run this again."
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
