#!/usr/bin/env bash
# Open JupyterLab on the quickstart, in an environment that this script makes; or execute the quickstart.
#
#   bash notebooks/run.sh [ARGUMENT...]   further arguments go to jupyter lab
#   bash notebooks/run.sh --headless      execute it without a browser, and print the accuracy
#
# notebooks/venv.sh says which variables choose the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

use_venv lab

if [ "${1:-}" = --headless ]; then
    [ $# -eq 1 ] || die "--headless takes no further arguments, but got: ${*:2}"
    exec "$python" "$root/notebooks/headless.py" "$root/notebooks/quickstart.ipynb"
fi

# Running a notebook changes its file: work on copies. Later runs keep the notebooks there, and renew the other files.
copies=$root/notebooks/copies
mkdir -p "$copies"
cp "$root"/notebooks/*.md "$root"/notebooks/*_or_digits.py "$copies"
for notebook in "$root"/notebooks/*.ipynb; do
    [ -e "$copies/$(basename "$notebook")" ] || cp "$notebook" "$copies"
done
# notebooks/labconfig answers JupyterLab's question about news, which would cover the notebook, and shows .md as pages.
export JUPYTER_CONFIG_PATH=${JUPYTER_CONFIG_PATH:+$JUPYTER_CONFIG_PATH:}$root/notebooks

options=(--ServerApp.root_dir="$copies" --LabApp.default_url=/lab/tree/quickstart.ipynb)
if [ "$(id -u)" -eq 0 ]; then options+=(--allow-root); fi  # Jupyter refuses root otherwise
# JupyterLab's log hides the address: say it again, last and alone, once the server has written its file.
tell_address() {
    local file
    file=$("$python" -m jupyter --runtime-dir)/jpserver-$1.json
    while kill -0 "$1" 2> /dev/null && [ ! -s "$file" ]; do sleep 0.5; done
    sleep 3  # the rest of its log
    "$python" - "$file" 2> /dev/null << 'END' || true
import json, sys
server = json.load(open(sys.argv[1]))
print("\nYou work in notebooks/copies: delete a notebook there to get a new copy. Ctrl-C twice ends JupyterLab. Open:")
print(f"\n    {server['url']}lab/tree/quickstart.ipynb?token={server['token']}\n", flush=True)
END
}
tell_address $$ >&2 &
exec "$python" -m jupyterlab "${options[@]}" "$@"
