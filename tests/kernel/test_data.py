"""A notebook's data in a real kernel: what the magic shows and frees, and the note on large data."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.kernel.harness import Kernel

DATA = "import torch\ndata = torch.ones(1_000_000)"


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Iterator[Kernel]:
    """The shared kernel, which keeps what it sends, however little memory is free."""
    shared_kernel.run("import os; os.environ['NBLAUNCH_KEEP_BYTES'] = '1000000000'").check()
    yield shared_kernel
    shared_kernel.run("del os.environ['NBLAUNCH_KEEP_BYTES']\n%distributed clear-cache").check()


def test_a_cells_data_is_sent_once_and_freed_when_asked(kernel: Kernel) -> None:
    kernel.run(DATA).check()
    for copied in (4_000_000, 0):
        assert kernel.run("%%distributed -n 2 -o sums\ndata[rank] = 0\nfloat(data.sum())").check().value == "999999.0"
        assert kernel.ask("sums.payload.copied, sums.payload.parts[0][0], list(sums)") == (
            copied,
            "data",
            [999999.0, 999999.0],
        )
    assert kernel.ask("float(data.sum())") == 1_000_000
    assert "cached for the next launch: 4 MB of data from earlier launches" in kernel.run("%distributed status").stdout
    assert kernel.run("%distributed clear-cache").check().stdout == "freed 4 MB\n"
    assert kernel.run("%distributed clear-cache").check().stdout == "freed 0 bytes\n"
    assert "kept" not in kernel.run("%distributed status").stdout


def test_a_large_payload_is_reported_once(kernel: Kernel) -> None:
    kernel.run(f"{DATA}\nfrom nblaunch.launch import result as launches").check()
    kernel.run("noted, launches.NOTED_BYTES = launches.NOTED_BYTES, 1_000_000").check()
    said = [kernel.run("%%distributed -n 2\nfloat(data[0])").check().text for _ in range(2)]
    kernel.run("launches.NOTED_BYTES = noted").check()
    assert re.search(r"nblaunch: the ranks are sent 4 MB, and share one copy in memory: data 4 MB", said[0])
    assert "are sent" not in said[1]


def test_a_result_is_the_notebooks_own(kernel: Kernel) -> None:
    kernel.run("%%distributed -n 2 -o made\nimport torch\ntorch.full((1_000_000,), float(rank))").check()
    kernel.run("made[0][3] = 7.0\nmade[1].add_(1)").check()
    assert kernel.ask("float(made[0].sum()), float(made[1].sum())") == (7.0, 2_000_000.0)
