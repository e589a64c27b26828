"""The notebook on several machines, executed from the first cell to the last over ssh."""

from __future__ import annotations

from pathlib import Path

import headless
import pytest

from tests.engines.ssh_hosts import SshHosts
from tests.kernel.executed import execute


@pytest.mark.timeout(300)
def test_machines(ssh_hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder, with the images, is on none of the machines: the ranks have what was sent."""
    notebook = execute("machines", tmp_path, monkeypatch, engine=f"ssh -F {ssh_hosts.config} n1 n2")

    printed = headless.printed(notebook)
    assert "rank 0 of 2 runs on n1\nrank 1 of 2 runs on n2\n" in printed
    assert "n2: epoch 2, loss 0." in printed
    assert "rank 1 raised ValueError: a damaged image on n2\n" in printed
    assert "rank 0 is number 0 on n1\nrank 1 is number 0 on n2\n" in printed
    assert "hosts: ['n1', 'n2']\n" in printed
    assert headless.accuracy(notebook) >= 0.9
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]
    assert [text for text in shown if text.endswith("\nssh n1 n2: n1, n2")]  # %distributed status
    assert shown[-1] == "released ssh n1 n2: n1, n2"
