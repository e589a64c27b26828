"""The notebooks and the toolkit page, executed from the first cell to the last on real data."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from nblaunch import training
from tests.kernel.executed import NOTEBOOKS, execute
from tests.kernel.harness import IMPORT_AHEAD, Kernel, running_kernel
from tests.kernel.test_readme import README, blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="module")
def shared_kernel(_marked: None, folder: Path) -> Iterator[Kernel]:
    """A kernel in the folder of all notebooks, where they have the same images with and without a network."""
    state = str(folder.with_name("state"))
    env = {"NBLAUNCH_QUICKSTART_DATA": "digits", "HF_HOME": str(folder / "huggingface"), "CUDA_VISIBLE_DEVICES": ""}
    with running_kernel(NBLAUNCH_STATE_DIR=state, **env) as kernel:
        kernel.run(f"{IMPORT_AHEAD}fork_servers._PRELOAD += ('torchvision',)").check()
        kernel.run(f"import os\nos.chdir({str(folder)!r})").check()
        yield kernel


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Iterator[Kernel]:
    yield shared_kernel
    shared_kernel.run("%distributed session stop")  # there is one if a cell has failed


# ------------------------------------------------------------------ training loops
@pytest.mark.usefixtures("port_of_the_document")
def test_ddp(kernel: Kernel, folder: Path) -> None:
    notebook = execute(kernel, "ddp", folder)

    (in_notebook,) = re.findall(r"^in the notebook: (0\.\d+)$", notebook.printed, flags=re.MULTILINE)
    assert float(in_notebook) == notebook.accuracy >= 0.8
    assert "7 ranks: 364 draws of 360 test images, 4 repeated" in notebook.printed
    assert "rank 1 raised IndexError: Target 11 is out of bounds" in notebook.printed


def test_accelerator(kernel: Kernel, folder: Path) -> None:
    notebook = execute(kernel, "accelerator", folder)

    before, after = re.findall(r"^(?:before|after): (0\.\d+)$", notebook.printed, flags=re.MULTILINE)
    assert float(before) < 0.3 < 0.8 <= float(after)  # the notebook's own model
    assert notebook.accuracy >= 0.8
    assert "100 images" in notebook.printed
    assert "gathered in the dataset's order: True" in notebook.printed


def test_sessions(kernel: Kernel, folder: Path) -> None:
    notebook = execute(kernel, "sessions", folder)

    trained, went_on = re.findall(r"^after .*: (0\.\d+)$", notebook.printed, flags=re.MULTILINE)
    assert 0.8 <= float(trained) <= float(went_on) + 0.05
    assert notebook.accuracy >= 0.9
    assert "wait was stopped after" in notebook.printed
    assert "rank 1 was killed by SIGKILL" in notebook.printed


def test_runs(kernel: Kernel, folder: Path) -> None:
    notebook = execute(kernel, "runs", folder)

    (start, resumed) = re.findall(r"^training starts after step (\d+)$", notebook.printed, flags=re.MULTILINE)
    assert int(start) == 0 < int(resumed)
    assert f"the latest checkpoint: step-{resumed}.pt\n" in notebook.printed
    assert re.search(r"^digits +train +running +2 ", notebook.cells[3].value, flags=re.MULTILINE)
    assert re.search(r"^digits +train +stopped +2 ", notebook.cells[6].stdout, flags=re.MULTILINE)
    assert "train was stopped after" in notebook.printed
    assert notebook.accuracy >= 0.85
    assert list(folder.with_name("state").glob("run-*")) == []


def test_debugging(kernel: Kernel, folder: Path) -> None:
    kernel.run("from nblaunch.machine import timeouts\ntimeouts.STUCK_AFTER_S /= 5").check()
    notebook = execute(kernel, "debugging", folder)
    kernel.run("from nblaunch.machine import timeouts\ntimeouts.STUCK_AFTER_S *= 5").check()

    waits = r"Stuck for \d+ s: rank 0 waits in all_reduce #26 .*; rank 1 waits in barrier #26"
    assert re.search(waits, notebook.printed)
    assert sum(len(cell.prompts) for cell in notebook.cells) == 6
    assert notebook.accuracy >= 0.85


def test_profiling(kernel: Kernel, folder: Path) -> None:
    notebook = execute(kernel, "profiling", folder)

    slow = (
        r"Rank 0 waits \d+% of the time for rank 1, whose data loading takes .* \(Cell In\[\d+\], line 10: time\.sleep"
    )
    assert re.search(slow, notebook.printed)
    (before, after) = re.findall(r"^(\d+) steps per second before, (\d+) after$", notebook.printed, flags=re.MULTILINE)[
        0
    ]
    assert int(after) > int(before)
    assert re.search(r"^profile1\.json\.gz: \d+ KB in ", notebook.printed, flags=re.MULTILINE)


def test_machines_without_a_cluster(kernel: Kernel, folder: Path) -> None:
    notebook = execute(kernel, "machines", folder)

    name = socket.gethostname()
    assert f"rank 0 of 2 runs on {name}\nrank 1 of 2 runs on {name}\n" in notebook.printed
    assert f"rank 1 raised ValueError: a damaged image on {name}\n" in notebook.printed
    assert notebook.accuracy >= 0.9


# ------------------------------------------------------------------ data
def test_data_loading(kernel: Kernel, folder: Path) -> None:
    notebook = execute(kernel, "data_loading", folder)

    assert notebook.accuracy >= 0.25  # plain SGD for three epochs; chance is 0.1
    assert "719 + 718 = 1437 images" in notebook.printed
    assert "images of each rank, in two epochs: [64, 64]\n" in notebook.printed
    found = re.search(r"^recall of rare classes: (0\.\d+) -> (0\.\d+)$", notebook.printed, flags=re.MULTILINE)
    assert found
    assert float(found[2]) > float(found[1])


def test_large_data(kernel: Kernel, folder: Path) -> None:
    printed = execute(kernel, "large_data", folder).printed

    found = re.search(r"^4 ranks read 246 MB each; together they grew by (\d+) MB$", printed, flags=re.MULTILINE)
    assert found
    assert int(found[1]) < 2 * 246  # and not four copies
    assert "unchanged: 0 MB copied" in printed
    assert "changed:   246 MB copied" in printed
    assert "the notebook sees zeros in: []" in printed
    assert "views are still tied: [True, True]" in printed
    assert "sum: 10,000,000; rows by rank, in the notebook: [2500, 2500, 2500, 2500]" in printed
    assert "of the file's 40 MB, 0 MB were copied" in printed
    assert "4 ranks returned 246 MB" in printed
    assert "cached for the next launch: 2" in printed
    assert "MB of data from earlier launches" in printed
    assert re.search(r"^freed 2\d\d MB$", printed, flags=re.MULTILINE)
    assert "after %distributed clear-cache: 246 MB copied" in printed


# ------------------------------------------------------------------ trainers, ours and other libraries'
def test_trainer(kernel: Kernel, folder: Path) -> None:
    notebook = execute(kernel, "trainer", folder)

    assert f"last valid_accuracy: {notebook.accuracy:.4f}\n" in notebook.printed
    assert notebook.accuracy >= 0.85
    assert "rank 1: out of luck" in notebook.printed
    assert "8 of 8 weights are equal to the last bit" in notebook.printed
    assert re.search(r"^best (0\.\d+) at step \d+, predicted \1$", notebook.printed, flags=re.MULTILINE)


def test_finetune(kernel: Kernel, folder: Path) -> None:
    notebook = execute(kernel, "finetune", folder)

    lines = re.findall(r"^step (\d+): validation loss (\d\.\d+)$", notebook.printed, flags=re.MULTILINE)
    losses = [float(loss) for _, loss in lines]
    assert [int(step) for step, _ in lines] == [20, 40, 60, 80]  # of both runs: the second one has continued the first
    assert losses == sorted(losses, reverse=True)
    assert f"today ends at step 40, with a validation loss of {losses[1]:.3f}" in notebook.printed
    last, best, restored = (
        float(loss)
        for loss in re.findall(
            r"^(?:last step \d+|best step \d+|the restored model): validation loss (\d\.\d+)$",
            notebook.printed,
            flags=re.MULTILINE,
        )
    )
    assert best == restored < last
    found = re.search(r"^(\d+) predictions for (\d+) examples: ", notebook.printed, flags=re.MULTILINE)
    assert found
    assert found[1] == found[2]
    assert notebook.accuracy >= 0.3  # one in five by chance; mostly 0.4 to 0.5
    predicted = re.findall(r"^--- predicted (\S+) ", notebook.printed, flags=re.MULTILINE)
    assert len({*predicted}) == len(predicted) >= 4  # mistakes of different kinds


def test_peers(kernel: Kernel, folder: Path) -> None:
    notebook = execute(kernel, "peers", folder)

    for line in (
        r"accelerate: 2 processes, 0\.\d+",
        r"transformers: loss .* \d\.\d+",
        r"Lightning: 2 ranks, .* 0\.\d+",
    ):
        assert re.search(f"^{line}$", notebook.printed, flags=re.MULTILINE)
    assert notebook.accuracy >= 0.7


def test_kaggle(kernel: Kernel, folder: Path) -> None:
    notebook = execute(kernel, "kaggle", folder)

    found = dict(re.findall(r"^(accelerate|Lightning): (0\.\d+)$", notebook.printed, flags=re.MULTILINE))
    assert found.keys() == {"accelerate", "Lightning"}
    assert min(map(float, found.values())) >= 0.8
    assert notebook.accuracy >= 0.8


def test_every_python_block_of_the_toolkit_page_runs(kernel: Kernel) -> None:
    cells = blocks("python", README.parent / "notebooks/toolkit.md")
    examples = "\n".join(cells)
    assert [name for name in training.__all__ if not re.search(rf"\b{name}\b", examples)] == []
    kernel.run("%reset -f").check()
    for cell in cells:
        kernel.run(cell).check()
    kernel.run("import shutil; shutil.rmtree(folder)").check()


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)

    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not [cell.id for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_short_and_leads_to_the_next(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells

    assert len(cells) <= 20
    assert re.search(r"^(\*\*)?Next:?.*\]\(\w+\.(ipynb|md)\)", cells[-1].source, flags=re.MULTILINE)
