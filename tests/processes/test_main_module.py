"""Functions and classes of a script's ``__main__`` in ranks."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.kernel.harness import Kernel, running_kernel
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


@pytest.mark.parametrize("check", [check.__name__ for check in in_main.CHECKS])
def test_definitions_of_a_script_work_on_ranks(check: str, start_method: str, state: str) -> None:
    came = outcomes(start_method, (*in_main.CHECKS, *in_main.AT_HOME), state)[check]
    assert came == "ok", came


@pytest.mark.parametrize("check", [check.__name__ for check in in_main.AT_HOME])
def test_definitions_of_a_script_come_back_as_its_own(check: str, start_method: str, state: str) -> None:
    came = outcomes(start_method, (*in_main.CHECKS, *in_main.AT_HOME), state)[check]
    assert came == "ok", came


SPAWNED = (
    in_main.pickles_by_name,
    in_main.main_has_the_names_it_was_sent,
    in_main.globals_are_one_and_the_same,
    in_main.pool_by_fork,
    in_main.objects_come_back_as_this_processs_own,
    in_main.its_own_exception_can_be_caught,
)


@pytest.mark.parametrize("check", [check.__name__ for check in SPAWNED])
def test_definitions_of_a_script_work_on_spawned_ranks(check: str, state: str) -> None:
    came = outcomes("spawn", SPAWNED, state)[check]
    assert came == "ok", came


@pytest.mark.parametrize("check", [check.__name__ for check in in_main.EVERYWHERE])
def test_definitions_of_a_script_come_back_from_its_forks(check: str, state: str) -> None:
    came = outcomes("fork", in_main.EVERYWHERE, state)[check]
    assert came == "ok", came


# ------------------------------------------------------------------ cells, which no file holds
CELL = """
import torch, io, pickle, multiprocessing
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from nblaunch import notebook_launcher

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

class Squares(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return square(index)

def square(number):
    return number * number

def run():
    file = io.BytesIO()
    torch.save(Net(), file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is Net
    gathered = [None, None]
    dist.all_gather_object(gathered, Net())
    assert all(type(net) is Net for net in gathered)
    if dist.get_rank() == 1:
        return None  # importing torch in children is most of the time
    pools = []
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            pools.append(pool.map(square, [3]))
    batches = list(DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context="spawn"))
    return pools, batches[0].tolist()
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with running_kernel() as running:
        running.run(CELL).check()
        running.run(
            "from nblaunch.engines.fork_servers import servers; servers.warm_up()"
        ).check()  # it stays for both tests
        yield running


def test_definitions_of_a_cell_pickle_in_ranks_and_their_children(kernel: Kernel, start_method: str) -> None:
    launched = f"notebook_launcher(run, num_processes=2, start_method={start_method!r}, view='none')"
    assert kernel.ask(f"list({launched})") == [([[9], [9]], [0, 1, 4, 9]), None]
