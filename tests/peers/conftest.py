"""Fixtures for other libraries: a launch of two CPU ranks, and a folder with the programs' data."""

from __future__ import annotations

import functools
from pathlib import Path

import mnist_or_digits
import pytest

from nblaunch import notebook_launcher
from tests.processes.conftest import Launcher, _libuv_met, _warm, imported_ahead  # noqa: F401  # fixtures that pytest finds by name

TRAINING_IMAGES = 960
TEST_IMAGES = 199
"""Fewer than there are, for speed; two ranks cannot divide them evenly."""
STEPS = 8
"""Of two ranks with batches of 64 in one epoch."""
GOOD = 0.5
"""An accuracy that one epoch gives, by far; guessing gives 0.1."""


@pytest.fixture
def launch(imported_ahead: None) -> Launcher:  # noqa: F811  # which saves a launch's ranks some 15 s
    """`notebook_launcher` of two CPU ranks over the fork server, which shows nothing."""
    return functools.partial(notebook_launcher, num_processes=2, device="cpu", start_method="forkserver", view="none")


@pytest.fixture(scope="session")
def _images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real images in MNIST's format: scikit-learn's digits, so that it is the same with and without a network."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(mnist_or_digits.SOURCE_VARIABLE, "digits")
        root = mnist_or_digits.prepare(tmp_path_factory.mktemp("images"))
    for name, count in (("train", TRAINING_IMAGES), ("t10k", TEST_IMAGES)):
        _cut(root / "MNIST" / "raw" / f"{name}-images-idx3-ubyte", count, header=16, size=28 * 28)
        _cut(root / "MNIST" / "raw" / f"{name}-labels-idx1-ubyte", count, header=8, size=1)
    return root


def _cut(file: Path, count: int, header: int, size: int) -> None:
    """Keep the first `count` items of `size` bytes: the second word of MNIST's format is their number."""
    content = file.read_bytes()
    file.write_bytes(content[:4] + count.to_bytes(4, "big") + content[8 : header + count * size])


@pytest.fixture
def readers_folder(_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which ``datasets.MNIST('data')`` finds the images."""
    folder = tmp_path / "reader"
    folder.mkdir()
    (folder / "data").symlink_to(_images, target_is_directory=True)
    monkeypatch.chdir(folder)
    return folder
