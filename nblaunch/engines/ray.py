"""Nodes by Ray: a placement group reserves them, and an actor on each starts an agent.

The notebook runs on a machine of the cluster. Ray starts the agents and ends them; logs, results, interrupts and errors
do not go through it. The kernel itself does not connect to Ray: `nblaunch.engines.ray_driver` does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO, Any

from nblaunch.engines.command_starter import said_in
from nblaunch.engines.ray_driver import RayRequest, RayState
from nblaunch.errors import ArgumentError, StartError
from nblaunch.machine import timeouts
from nblaunch.wire.link_messages import Boot, Proof

_DRIVER = "nblaunch.engines.ray_driver"
RAY_CONNECT_TIMEOUT_S = 60.0
"""For Ray's driver to connect to its cluster: it imports Ray first."""


class RayStarter:
    """A `node_engine.Starter`.

    Args:
        words: ``--address ADDRESS``: the cluster; default: the one that the notebook has connected to with
            ``ray.init``, else ``RAY_ADDRESS``, else the one that this machine is a node of. What each node reserves:
            ``--num-gpus N``, by default as many as `num_nodes` nodes have (with ``--pack``: can share);
            ``--num-cpus N``, by default 1, because ranks use every CPU of the node anyway; ``--resources JSON``, such
            as ``{"TPU": 4}``. ``--pack``: several agents may share a node.
        num_nodes: The number of nodes. Default: 1.

    Raises:
        ArgumentError: An option is not known, or its value is wrong.
    """

    proof: Proof = ""

    def __init__(self, words: Sequence[str], num_nodes: int | None = None) -> None:
        self.count = num_nodes or 1
        self.name = shlex.join(["ray", *words])
        self._request = _request_of(words, self.count)
        self._driver: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._unread, self._heard = b"", RayState()

    def addresses(self, check: Callable[[], None]) -> Sequence[str]:
        spec = importlib.util.find_spec("ray")
        if spec is None or spec.origin is None:  # a folder that only has the name
            raise StartError("engine='ray': Ray is not installed here: pip install nblaunch[ray]")
        self.stop()
        try:
            self._connect(self._request.address or _address_of_notebook(), check)
        except BaseException:
            self.stop()
            raise
        return self._heard.addresses

    def _connect(self, address: str, check: Callable[[], None]) -> None:
        request = {**asdict(self._request), "address": address}
        self._errors = tempfile.TemporaryFile()
        self._driver = subprocess.Popen(
            [sys.executable, "-m", _DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # the notebook's Interrupt is not for it
        )
        self._write(request)
        deadline = time.monotonic() + RAY_CONNECT_TIMEOUT_S
        while not self._heard.addresses:
            self._read(timeouts.NODES_POLL_S)
            check()
            late = time.monotonic() > deadline
            if late or self._heard.problem:
                where = address or os.environ.get("RAY_ADDRESS") or "this machine's cluster"
                why = self._heard.problem or f"no answer within {RAY_CONNECT_TIMEOUT_S:.0f} s"
                raise StartError(
                    f"engine='ray' cannot connect to {where} ({why}). The notebook must run on a machine of the "
                    "cluster: `ray start --head` starts one here, `ray start --address=HOST:6379` joins one, and "
                    "engine='ray --address HOST:6379' or RAY_ADDRESS chooses one"
                )

    def start(self, boot: Boot) -> None:
        self._write(asdict(boot))

    def state(self) -> str:
        self._read()
        return self._heard.state

    def problem(self) -> str:
        self._read()
        return self._heard.problem

    def stop(self) -> None:
        """End the agents' actors, remove the placement group, and disconnect. Idempotent."""
        driver, errors, is_connected = self._driver, self._errors, bool(self._heard.addresses)
        self._driver, self._errors, self._unread, self._heard = None, None, b"", RayState()
        if driver is None or errors is None:
            return
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.close()
        try:
            if not is_connected:
                driver.kill()
            driver.wait(timeouts.AGENT_EXIT_TIMEOUT_S + timeouts.SERVER_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            driver.kill()  # Ray ends its actors and removes its placement group
            driver.wait()
        driver.stdout.close()
        errors.close()

    # -------------------------------------------------------------- the driver
    def _write(self, message: dict[str, Any]) -> None:
        assert self._driver is not None
        assert self._driver.stdin is not None
        try:
            self._driver.stdin.write(json.dumps(message).encode() + b"\n")
            self._driver.stdin.flush()
        except BrokenPipeError:
            pass  # it has exited: `_read` says why

    def _read(self, seconds: float = 0.0) -> None:
        """Read what the driver has written, waiting up to `seconds` for it."""
        if self._driver is None or self._heard.problem:
            return
        assert self._driver.stdout is not None
        poller = select.poll()
        poller.register(self._driver.stdout, select.POLLIN)
        if not poller.poll(int(seconds * 1000)):
            return
        read = os.read(self._driver.stdout.fileno(), 1 << 16)
        *lines, self._unread = (self._unread + read).split(b"\n")
        if lines:
            self._heard = RayState(**json.loads(lines[-1]))
        elif not read:
            assert self._errors is not None
            status, said = self._driver.wait(), said_in(self._errors)
            self._heard = RayState(problem=f"ray: its driver has exited with status {status}: {said}")


def _request_of(words: Sequence[str], count: int) -> RayRequest:
    engine = f"engine={shlex.join(['ray', *words])!r}"
    values: dict[str, Any] = {"--address": "", "--num-cpus": 1, "--num-gpus": None, "--resources": {}, "--pack": False}
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while rest:
        option = rest.pop(0)
        if option not in values:
            raise ArgumentError(f"{engine}: {option!r} is none of {', '.join(values)}")
        if option == "--pack":
            values[option] = True
        elif not rest:
            raise ArgumentError(f"{engine}: {option} needs a value")
        else:
            values[option] = _value_of(engine, option, rest.pop(0))
    address, cpus, gpus, resources, pack = values.values()
    return RayRequest(address, count, cpus, gpus, resources, pack, os.environ.get("NBLAUNCH_PYTHON", ""))


def _value_of(engine: str, option: str, text: str) -> Any:
    if option == "--address":
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    numbers = value.values() if isinstance(value, dict) else [value]
    is_right = isinstance(value, dict) == (option == "--resources")
    if not is_right or not all(type(number) in (int, float) and number >= 0 for number in numbers):
        must = "a JSON object of numbers, as in '{\"TPU\": 4}'" if option == "--resources" else "a number"
        raise ArgumentError(f"{engine}: {option} must be {must}")
    return value


def _address_of_notebook() -> str:
    """Return the address of the cluster that the notebook itself has connected to; empty if it has not."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().gcs_address)
