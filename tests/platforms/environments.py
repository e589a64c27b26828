"""Where a platform's kernel runs: its packages before this Python's, or an environment with its Python and torch."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = tuple(sorted(file.stem for file in HERE.glob("*.txt")))
_MADE = Path(sys.prefix, "share", "nblaunch-platforms")
"""Kept from run to run, like the environment that it is in."""
_IS_REAL = "NBLAUNCH_REAL_PLATFORMS"


@dataclass(frozen=True)
class Platform:
    """A platform, by its file: the packages that it pins, and its versions of Python and torch."""

    name: str
    pins: dict[str, str]
    python: str
    torch: str

    @property
    def command(self) -> list[str]:
        """What starts its kernel, without the file of the connection."""
        kernel = [str(HERE / "colab_kernel.py")] if self.name == "colab" else ["-m", "ipykernel_launcher"]
        return [str(_environment(self) / "bin" / "python") if is_real() else sys.executable, *kernel]

    @property
    def env(self) -> dict[str, str]:
        """What its kernel has in its environment besides."""
        return {} if is_real() or not self.pins else {"PYTHONPATH": str(_packages(self))}


def is_real() -> bool:
    """Return True if each platform gets its own Python, where this machine has it, and its own torch."""
    return os.environ.get(_IS_REAL, "") not in ("", "0")


@functools.cache
def platform(name: str) -> Platform:
    """Read a platform's file."""
    head, *lines = (HERE / f"{name}.txt").read_text().splitlines()
    found = re.search(r"Python ([\d.]+), torch ([\d.]+)$", head)
    assert found is not None, head
    return Platform(
        name, {package: version for package, _, version in (line.partition("==") for line in lines)}, *found.groups()
    )


def _packages(platform: Platform) -> Path:
    """Return a folder with the packages alone: everything else is that of this Python."""
    folder = _folder(platform)
    if not folder.exists():
        fresh = folder.with_suffix(f".{os.getpid()}")
        _pip(sys.executable, "--no-deps", "--target", str(fresh / "site-packages"), *_requirements(platform))
        fresh.rename(folder)
    return folder / "site-packages"


def _environment(platform: Platform) -> Path:
    """Return a virtual environment with the packages, torch and nblaunch, which may change none of them."""
    folder = _folder(platform)
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([_python(platform.python), "-m", "venv", folder], check=True)
        wanted = [*_requirements(platform), f"torch=={platform.torch}"]
        _pip(str(folder / "bin" / "python"), *wanted, "numpy", "--editable", str(ROOT))
        (folder / "done").touch()
    return folder


def _folder(platform: Platform) -> Path:
    text = repr((platform, is_real(), (ROOT / "pyproject.toml").read_text() if is_real() else sys.version))
    return _MADE / f"{platform.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _requirements(platform: Platform) -> list[str]:
    return [f"{package}=={version}" for package, version in platform.pins.items()]


def _python(version: str) -> str:
    """Return a Python of this version, or this one."""
    found = [*map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")), f"python{version}"]
    runs = [
        each
        for each in found
        if shutil.which(each) and not subprocess.run([each, "-V"], capture_output=True).returncode
    ]
    return runs[0] if runs else sys.executable


def _pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
