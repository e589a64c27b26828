"""Kernels that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import eventually, has_failed
from tests.kernel.harness import IMPORT_AHEAD, Kernel, running_kernel
from tests.kernel.page import Page

_FIRST_LAUNCH = (
    "import gc\nnotebook_launcher(lambda: None, num_processes=1, view='none')\n"
    "gc.freeze()  # or each %reset looks through all of torch"
)


def _load(kernel: Kernel, first: str) -> None:
    kernel.run(f"{first}%load_ext nblaunch\nfrom nblaunch import notebook_launcher").check()
    kernel.run(_FIRST_LAUNCH).check()


@pytest.fixture(scope="package")
def _loaded_kernel(_marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One for all files: importing torch in it and in its fork servers takes longer than most of their tests."""
    state = tmp_path_factory.mktemp("state")
    with running_kernel(NBLAUNCH_STATE_DIR=str(state), CUDA_VISIBLE_DEVICES="") as kernel:
        _load(kernel, IMPORT_AHEAD)
        yield kernel


@pytest.fixture(scope="module")
def shared_kernel(_loaded_kernel: Kernel) -> Kernel:
    """A kernel with the extension loaded, its fork server up and an empty notebook, which sees no GPU."""
    clean = "%reset -f\nimport warnings\nwarnings.resetwarnings()\nfrom nblaunch import notebook_launcher"
    _loaded_kernel.run(clean).check()
    return _loaded_kernel


@pytest.fixture
def kernel(shared_kernel: Kernel, request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """The shared kernel. That a test leaves no rank behind is asserted for all tests."""
    yield shared_kernel
    if has_failed(request):
        shared_kernel.replace()
        _load(shared_kernel, IMPORT_AHEAD)


@pytest.fixture
def folder(tmp_path: Path, kernel: Kernel) -> Path:
    """A folder for ranks to leave files in, known to the kernel as `folder`."""
    kernel.run(f"from pathlib import Path; folder = Path({str(tmp_path)!r})").check()
    return tmp_path


# ------------------------------------------------------------------ with panels
_CALLBACK = "get_ipython().kernel.shell_stream._recv_callback"
_NOTE_CALLBACK = f"import builtins; builtins.own_callback = {_CALLBACK}\n"
_THREADS = "[t.name for t in __import__('threading').enumerate() if t.name.startswith('nblaunch')]"
_LAUNCHES = "__import__('nblaunch.launch.handle', fromlist=['live_launches']).live_launches()"
_FREE = "__import__('nblaunch.transfer.parcel', fromlist=['sent_data_cache']).sent_data_cache.free()"


@pytest.fixture(scope="package")
def panel_kernel(_marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that shows panels, with the extension loaded and its fork server up."""
    state = tmp_path_factory.mktemp("state")
    with running_kernel(NBLAUNCH_VIEW="auto", NBLAUNCH_STATE_DIR=str(state)) as kernel:
        _load(kernel, _NOTE_CALLBACK)
        yield kernel


@pytest.fixture
def page(panel_kernel: Kernel, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page in the module's kernel, which has an empty notebook; afterwards no launch of the test runs."""
    pid = panel_kernel.pid
    panel_kernel.run("%reset -f\nfrom nblaunch import notebook_launcher").check()
    page = Page(panel_kernel)
    yield page
    if has_failed(request):
        panel_kernel.replace()
        _load(panel_kernel, _NOTE_CALLBACK)
        return
    assert panel_kernel.manager.is_alive()
    assert panel_kernel.pid == pid
    panel_kernel.run(f"for launch in {_LAUNCHES}: launch.kill(); launch.wait()").check()
    panel_kernel.run(_FREE).check()
    eventually(lambda: panel_kernel.ask(_THREADS) == [], otherwise=lambda: panel_kernel.ask(_THREADS))
    eventually(lambda: panel_kernel.ask(f"{_CALLBACK} == own_callback"))
    page.end_subshells()
