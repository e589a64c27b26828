"""A plain DistributedDataParallel program, which creates a process group on its own port."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.peers import documents
from tests.peers.conftest import GOOD
from tests.processes.conftest import Launcher


@pytest.mark.usefixtures("port_of_the_document")
@pytest.mark.filterwarnings("ignore:each of the 2 ranks goes through all:UserWarning")  # ours: the program does
def test_train_ddp(launch: Launcher, readers_folder: Path) -> None:
    result = launch(documents.train_ddp)
    assert result[0] > GOOD
    for accuracy, logs in zip(result, result.logs, strict=True):
        (printed,) = re.findall(r"^Accuracy: (.+)$", logs.out.read_text(), re.MULTILINE)
        assert float(printed) == pytest.approx(100 * accuracy)
