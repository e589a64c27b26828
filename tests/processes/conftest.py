"""Fixtures for real ranks: launches with the test's start method, and free ports."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import Any

import pytest

from nblaunch import notebook_launcher
from nblaunch.engines.generations import servers
from nblaunch.launch.rendezvous import Rendezvous

Launcher = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def _libuv_met() -> None:
    """From its first loop on libuv keeps a pipe in this process, which is no leak of the test that comes first."""
    with Rendezvous(1):
        pass


@pytest.fixture
def _warm() -> None:
    """Start this process's fork server, so that it is no leak of the test that comes first."""
    servers.warm_up()


@pytest.fixture
def launch(start_method: str) -> Launcher:
    """`notebook_launcher` of two ranks over this start method, which shows nothing."""
    return functools.partial(notebook_launcher, num_processes=2, start_method=start_method, view="none")


@pytest.fixture
def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
