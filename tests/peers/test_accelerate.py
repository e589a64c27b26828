"""accelerate in a launch: it finds rank and world size, and uses the existing process group or makes its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from nblaunch.errors import ArgumentError
from tests.peers import documents
from tests.peers.accelerate_examples import EXAMPLES
from tests.peers.conftest import GOOD, STEPS, TEST_IMAGES
from tests.processes.conftest import Launcher


# ------------------------------------------------------------------ what ranks run
def place(rank: int, group: str) -> tuple[int, int, bool, list[int]]:
    """Where accelerate sees itself; whether the group is the one from before; what it gathers."""
    from accelerate import Accelerator

    if group == "accelerate's":
        dist.destroy_process_group()
    elif group == "the document's":
        documents.setup(rank, 2)
    before = dist.group.WORLD
    accelerator = Accelerator()
    gathered = accelerator.gather(torch.tensor([accelerator.process_index]))
    return accelerator.process_index, accelerator.num_processes, dist.group.WORLD is before, gathered.tolist()


def places(rank: int) -> list[Any]:
    """As found; with a group by the document's setup, for which ours steps aside; with one that accelerate makes."""
    from accelerate.state import AcceleratorState, PartialState

    found = []
    for group in ("ours", "the document's", "accelerate's"):
        found.append(place(rank, group))
        AcceleratorState._reset_state()
        PartialState._reset_state()
    return found


def evaluated_exactly() -> tuple[int, str]:
    """`evaluate` of a module that accelerate has wrapped, over the loader from before; and over the prepared one."""
    from accelerate import Accelerator

    from nblaunch.training import Accuracy, evaluate

    loader = DataLoader(TensorDataset(torch.eye(7), torch.arange(7)), batch_size=2)
    model, prepared = Accelerator().prepare(torch.nn.Linear(7, 7), loader)
    accuracy = Accuracy()
    evaluate(model, loader, metrics=accuracy)
    try:
        evaluate(model, prepared)
    except ArgumentError as error:
        return accuracy.count, str(error)
    return accuracy.count, "no error"


# ------------------------------------------------------------------ the tests
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def all_examples() -> dict[str, list[Any]]:
    from accelerate.state import AcceleratorState, GradientState

    found = {}
    for example in EXAMPLES:
        found[example.__name__] = example()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return found


def test_examples_have_the_losses_of_accelerates_launcher(launch: Launcher, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.peers.accelerate_examples", str(tmp_path), str(unused_port())]
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, by_name in enumerate(launch(all_examples)):
        for name, found in by_name.items():
            expected = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            assert len(expected) > 20
            assert found == pytest.approx(expected, abs=1e-6), name


@pytest.mark.usefixtures("port_of_the_document")
def test_accelerate_finds_the_group_or_makes_one(launch: Launcher) -> None:
    for rank, found in enumerate(launch(places)):
        as_found, made_by_the_document, made_by_accelerate = found
        assert as_found == (rank, 2, True, [0, 1])
        assert made_by_the_document == (rank, 2, True, [0, 1])
        assert made_by_accelerate == (rank, 2, False, [0, 1])


def test_train_ddp_accelerate(launch: Launcher, readers_folder: Path) -> None:
    result = launch(documents.train_ddp_accelerate)
    for came in result:
        assert came == {**came, "seen": TEST_IMAGES, "steps": STEPS, "processes": 2, "model": "DistributedDataParallel"}
        assert came["accuracy"] > GOOD
    assert result[0]["accuracy"] == result[1]["accuracy"]


def test_evaluate_counts_exactly_beside_accelerate(launch: Launcher) -> None:
    for counted, refused in launch(evaluated_exactly):
        assert counted == 7
        assert "DataLoaderShard prepared by accelerate" in refused
