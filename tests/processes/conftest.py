"""Fixtures for real ranks: launches with the test's start method, and free ports."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nblaunch import notebook_launcher, session
from nblaunch.engines import fork_servers
from nblaunch.engines.fork_servers import servers
from nblaunch.engines.local import serve_store
from tests.conftest import settled_server

Launcher = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def _libuv_met() -> None:
    """From its first loop on libuv keeps a pipe in this process, which is no leak of the test that comes first."""
    serve_store(1)


@pytest.fixture(scope="module")
def imported_ahead(_marked: None) -> None:
    """Have a fork server with what an optimizer imports, for files whose ranks train: that takes each rank a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NBLAUNCH_PRELOAD")
        patch.setattr(fork_servers, "KNOWN_SAFE", frozenset())  # and nothing else
        settled_server()


@pytest.fixture
def _warm() -> None:
    """Start this process's fork server, so that it is no leak of the test that comes first."""
    servers.warm_up()


@pytest.fixture
def launch(start_method: str) -> Launcher:
    """`notebook_launcher` of two ranks over this start method, which shows nothing."""
    return functools.partial(notebook_launcher, num_processes=2, start_method=start_method, view="none")


@pytest.fixture(scope="module")
def on_ranks(imported_ahead: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Run a function on two ranks (or four) that the file keeps: a launch for each would take ten times as long."""

    def divides() -> None:
        from torch import nn

        from nblaunch.training import Accelerator, Parallelism

        Accelerator(compute_setup="cpu", parallelism=Parallelism()).prepare(nn.Linear(2, 2))

    with pytest.MonkeyPatch.context() as patched, contextlib.ExitStack() as stack:
        patched.setenv("NBLAUNCH_STATE_DIR", str(tmp_path_factory.mktemp("kept")))
        kept = {ranks: stack.enter_context(session(ranks, name=f"kept{ranks}", device="cpu")) for ranks in (2, 4)}
        for each in kept.values():
            each.run(divides, view="none")  # its first group of some ranks opens a connection, which stays
        yield lambda function, ranks=2: kept[ranks].run(function, view="none")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show nothing, where the code that launches takes no `view`."""
    monkeypatch.setenv("NBLAUNCH_VIEW", "none")


@pytest.fixture
def few(start_method: str) -> int:
    """How many ranks are enough where the second only does the same: importing torch is most of a spawned one."""
    return 1 if start_method == "spawn" else 2


@pytest.fixture
def free_port() -> int:
    """A free loopback port, below those that the system hands out, and in a range of this worker's own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in random.Random(os.urandom(8)).sample(range(20_000 + 1000 * worker, 21_000 + 1000 * worker), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("100 ports are in use")
