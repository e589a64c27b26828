"""A kernel that the tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.harness import Kernel, running_kernel


@pytest.fixture(scope="module")
def shared_kernel(_marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with the extension loaded and its fork server up, which sees no GPU."""
    state = tmp_path_factory.mktemp("state")
    with running_kernel(NBLAUNCH_STATE_DIR=str(state), CUDA_VISIBLE_DEVICES="") as kernel:
        kernel.run("%load_ext nblaunch\nfrom nblaunch import notebook_launcher").check()
        kernel.run("notebook_launcher(lambda: None, num_processes=1, view='none')").check()
        yield kernel


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Kernel:
    """The shared kernel. That a test leaves no rank behind is asserted for all tests."""
    return shared_kernel


@pytest.fixture
def folder(tmp_path: Path, kernel: Kernel) -> Path:
    """A folder for ranks to leave files in, known to the kernel as `folder`."""
    kernel.run(f"from pathlib import Path; folder = Path({str(tmp_path)!r})").check()
    return tmp_path
