"""Kernels with a GPU. Without one nothing here is collected: the run ends with one line, and not as passed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import gpus
from tests.kernel.harness import Kernel, running_kernel

LIMIT = 60.0
"""Seconds for what takes few: a check that hangs must leave time for the others."""
LOAD = "%load_ext nblaunch\nimport torch\nassert torch.ones(1, device='cuda').item() == 1"
BEGIN = """
%reset -f
import gc, os, time
from pathlib import Path
import torch
import torch.distributed as dist
import nblaunch
from nblaunch import notebook_launcher

def wait_for(*paths):
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, [path.name for path in paths if not path.exists()]
        time.sleep(0.005)

gc.collect()
torch.cuda.empty_cache()
"""
"""The first cell of each test: an empty notebook that holds nothing on a GPU."""
_ended: list[Kernel] = []
"""Kernels that were ended as a test has left a cell running."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tests by what is there: none is skipped, and the table lists what was left out."""
    if not any(Path(__file__).parent in item.path.parents for item in items):
        return
    try:
        present = gpus.found().has
    except gpus.NoGpuError as error:
        raise pytest.UsageError(f"tests/gpu: {error}") from None
    left_out = [item for item in items if not set(needs(item)) <= present]
    items[:] = [item for item in items if item not in left_out]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Restart the shared kernel if a test has hung: before it is noted which processes there are."""
    while _ended:
        kernel = _ended.pop()
        kernel.restart()
        kernel.run(LOAD).check()


def needs(item: pytest.Item) -> list[str]:
    """What a test needs, by its markers."""
    return [need for marker in item.iter_markers("needs") for need in marker.args]


@pytest.fixture(scope="package")
def _gpu_kernel(_marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One for all files, in whose notebook CUDA runs from the beginning."""
    state = tmp_path_factory.mktemp("state")
    with running_kernel(NBLAUNCH_STATE_DIR=str(state), **gpus.ORDER) as kernel:
        kernel.run(LOAD).check()
        yield kernel


@pytest.fixture
def kernel(_gpu_kernel: Kernel) -> Iterator[Kernel]:
    """The shared kernel with an empty notebook. A test that fails must not cost those after it their kernel."""
    _gpu_kernel.run(BEGIN, LIMIT).check()
    yield _gpu_kernel
    if not all(cell.idle for cell in _gpu_kernel.cells.values()):
        _gpu_kernel.end()
        _ended.append(_gpu_kernel)
    _gpu_kernel.cells.clear()


@pytest.fixture
def new_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel of the test's own, in which CUDA has not started; its first cell has loaded nblaunch."""
    with running_kernel(NBLAUNCH_STATE_DIR=str(tmp_path / "own-state"), **gpus.ORDER) as kernel:
        kernel.run("%load_ext nblaunch\nimport os\nimport torch\nfrom nblaunch import notebook_launcher").check()
        yield kernel


@pytest.fixture
def folder(tmp_path: Path, kernel: Kernel) -> Path:
    """A folder for ranks to leave files in, known to the kernel as `folder`."""
    kernel.run(f"folder = Path({str(tmp_path)!r})").check()
    return tmp_path
