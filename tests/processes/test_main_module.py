"""Functions and classes of a script's ``__main__`` in ranks."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.processes import in_main


@functools.cache
def outcomes(start_method: str, checks: tuple[Callable[..., None], ...], state: str) -> dict[str, str]:
    """What came of these checks of in_main.py: they run at once, as importing torch is most of their time."""
    done = subprocess.run(
        [sys.executable, in_main.__file__, start_method, *(check.__name__ for check in checks)],
        env={**os.environ, "NBLAUNCH_STATE_DIR": state, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("state"))


@pytest.mark.parametrize("check", [check.__name__ for check in (*in_main.ON_RANKS, *in_main.AT_HOME)])
def test_definitions_of_a_script_work_on_ranks_and_come_back(check: str, start_method: str, state: str) -> None:
    came = outcomes(start_method, (*in_main.ON_RANKS, *in_main.AT_HOME), state)[check]
    assert came == "ok", came


@pytest.mark.parametrize("check", [check.__name__ for check in in_main.ON_ONE_RANK])
def test_definitions_of_a_script_work_on_spawned_ranks(check: str, state: str) -> None:
    came = outcomes("spawn", in_main.ON_ONE_RANK, state)[check]
    assert came == "ok", came


@pytest.mark.parametrize("check", [check.__name__ for check in in_main.EVERYWHERE])
def test_definitions_of_a_script_come_back_from_its_forks(check: str, state: str) -> None:
    came = outcomes("fork", in_main.EVERYWHERE, state)[check]
    assert came == "ok", came
