"""What tests of other people's tools share: a launch of two CPU ranks, and a folder as a reader of the documents has it."""

from __future__ import annotations

import functools
from pathlib import Path

import mnist_or_digits
import pytest

from nblaunch import notebook_launcher
from tests.processes.conftest import Launcher, _libuv_met  # noqa: F401  # a fixture that pytest finds by its name


@pytest.fixture
def launch() -> Launcher:
    """`notebook_launcher` of two CPU ranks over the fork server, which shows nothing."""
    return functools.partial(notebook_launcher, num_processes=2, device="cpu", start_method="forkserver", view="none")


@pytest.fixture(scope="session")
def _images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real images in MNIST's format: scikit-learn's digits, so that it is the same with and without a network."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(mnist_or_digits.SOURCE_VARIABLE, "digits")
        return mnist_or_digits.prepare(tmp_path_factory.mktemp("images"))


@pytest.fixture
def readers_folder(_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which ``datasets.MNIST('data')`` finds the images."""
    folder = tmp_path / "reader"
    folder.mkdir()
    (folder / "data").symlink_to(_images, target_is_directory=True)
    monkeypatch.chdir(folder)
    return folder
