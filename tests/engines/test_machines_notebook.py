"""The notebook on several machines, executed from the first cell to the last over ssh."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.ssh_hosts import SshHosts
from tests.kernel.executed import execute
from tests.kernel.harness import running_kernel


@pytest.mark.timeout(300)
def test_machines(ssh_hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder, with the images, is on none of the machines: the ranks have what was sent."""
    monkeypatch.chdir(tmp_path)
    engine = f"ssh -F {ssh_hosts.config} n1 n2"
    with running_kernel(NBLAUNCH_QUICKSTART_DATA="digits") as kernel:
        notebook = execute(kernel, "machines", tmp_path, engine)

    assert "rank 0 of 2 runs on n1\nrank 1 of 2 runs on n2\n" in notebook.printed
    assert "n2: epoch 2, loss 0." in notebook.printed
    assert "rank 1 raised ValueError: a damaged image on n2\n" in notebook.printed
    assert "rank 0 is number 0 on n1\nrank 1 is number 0 on n2\n" in notebook.printed
    assert "hosts: ['n1', 'n2']\n" in notebook.printed
    assert notebook.accuracy >= 0.9
    assert "\nssh n1 n2: n1, n2\n" in notebook.printed  # %distributed status
    assert "released ssh n1 n2: n1, n2" in notebook.cells[-1].text
