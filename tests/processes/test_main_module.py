"""Functions and classes of a script's ``__main__`` in ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.processes import in_main

Outcomes = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What came of the checks of in_main.py, by start method: one script has all, as importing torch is most of it."""
    state = str(tmp_path_factory.mktemp("state"))
    done = subprocess.run(
        [sys.executable, in_main.__file__],
        env={**os.environ, "NBLAUNCH_STATE_DIR": state, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: Outcomes = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("start_method", "check"),
    [(start_method, check.__name__) for start_method, checks in in_main.CHECKS.items() for check in checks],
)
def test_definitions_of_a_script_work_on_ranks_and_come_back(start_method: str, check: str, outcomes: Outcomes) -> None:
    assert outcomes[start_method][check] == "ok", outcomes[start_method][check]
