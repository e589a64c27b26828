"""Nodes by Ray: a placement group reserves them, and an actor on each starts an agent.

The notebook runs on a machine of the cluster. Ray starts the agents and ends them; logs, results, interrupts and errors
do not go through it.

The kernel itself does not connect to Ray, because Ray ends its driver's process when the cluster's head is lost. The
driver is this module in a process of its own. It reads `RayRequest` and then `Boot` from its stdin, as lines of JSON,
and writes `RayState` to its stdout, whenever it changes. It frees the nodes at EOF, and when its parent has exited. If
it is killed, Ray frees them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any, NoReturn

from nblaunch.engines.command_starter import said_in
from nblaunch.errors import ArgumentError, StartError
from nblaunch.machine import timeouts
from nblaunch.wire.link_messages import Boot, Proof

RAY_CONNECT_TIMEOUT_S = 60.0
"""For Ray's driver to connect to its cluster: it imports Ray first."""
_OF_WORKERS = (
    "OMP_NUM_THREADS",
    "PYTHONBREAKPOINT",
    "RAY_CLIENT_MODE",
    "RAY_JOB_ID",
    "RAY_LD_PRELOAD_ON_WORKERS",
    "RAY_RAYLET_PID",
    "SPT_NOENV",
)
"""Variables that Ray sets in every worker. The others, such as the visible accelerators, are for agents too."""
_MAX_SAID = 2000
"""Bytes of an agent's stderr, and characters of Ray's errors."""
RAY_PROBE_TIMEOUT_S = 5.0
"""For the address of a Ray cluster to accept a connection: Ray itself would try for minutes."""


@dataclass(frozen=True, slots=True)
class RayRequest:
    address: str
    """Of the cluster; empty: what ``RAY_ADDRESS`` names, or the cluster that this machine is a node of."""
    count: int
    num_cpus: float
    """Of each agent."""
    num_gpus: float | None
    """Of each agent; None: as many as `count` agents can have."""
    resources: Mapping[str, float]
    """Others, of each agent."""
    python: str
    """What runs agents; empty: the Python of Ray's workers."""


@dataclass(frozen=True, slots=True)
class RayState:
    addresses: Sequence[str] = ()
    """Of the cluster's nodes; empty: not connected yet."""
    state: str = ""
    """What the placement group waits for; empty: nothing."""
    problem: str = ""
    """Why agents cannot join any more."""


# ------------------------------------------------------------------ the kernel's end
class RayStarter:
    """A `node_engine.Starter`.

    Args:
        words: ``--address ADDRESS``: the cluster; default: the one that the notebook has connected to with
            ``ray.init``, else ``RAY_ADDRESS``, else the one that this machine is a node of. What each node reserves:
            ``--num-gpus N``, by default as many as `num_nodes` nodes have; ``--num-cpus N``, by default 1, because
            ranks use every CPU of the node anyway; ``--resources JSON``, such as ``{"TPU": 4}``.
        num_nodes: The number of nodes. Default: 1.
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
            raise StartError("engine='ray': Ray is not installed here: pip install ray")
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
            [sys.executable, "-m", "nblaunch.engines.ray"],
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
                why = self._heard.problem or f"no response within {RAY_CONNECT_TIMEOUT_S:.0f} s"
                raise StartError(
                    f"engine='ray' cannot connect to {where} ({why}). The notebook must run on a machine of the "
                    "cluster. `ray start --head` starts a cluster here, and `ray start --address=HOST:6379` joins one. "
                    "Choose a cluster with engine='ray --address HOST:6379' or RAY_ADDRESS"
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

    def _write(self, message: dict[str, Any]) -> None:
        assert self._driver is not None
        assert self._driver.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has exited: `_read` says why
            self._driver.stdin.write(json.dumps(message).encode() + b"\n")
            self._driver.stdin.flush()

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
            self._heard = RayState(problem=f"ray: the driver exited with status {status}: {said}")


def _request_of(words: Sequence[str], count: int) -> RayRequest:
    def refuse(message: str) -> NoReturn:
        raise ArgumentError(f"engine={shlex.join(['ray', *words])!r}: {message}")

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("--address", default="")
    parser.add_argument("--num-cpus", type=_number, default=1)
    parser.add_argument("--num-gpus", type=_number)
    parser.add_argument("--resources", type=_resources, default={})
    return RayRequest(count=count, python=os.environ.get("NBLAUNCH_PYTHON", ""), **vars(parser.parse_args(words)))


def _number(text: str) -> float:
    if (number := float(text)) < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number


def _resources(text: str) -> dict[str, float]:
    try:
        return {name: float(most) for name, most in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError):
        raise argparse.ArgumentTypeError("must be a JSON object of numbers, as in '{\"TPU\": 4}'") from None


def _address_of_notebook() -> str:
    """Return the address of the cluster that the notebook itself has connected to; empty if it has not."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().gcs_address)


# ------------------------------------------------------------------ the driver
class AgentActor:
    """Runs one agent.

    Ray pickles this class by value, because it is of ``__main__``: a node without nblaunch can start it, and reports
    what the agent's Python says.
    """

    def run(self, python: str, boot_line: str) -> tuple[str, int, str]:
        """Run an agent until it exits; return the node's host name, the status, and the end of the agent's stderr."""
        env = {name: value for name, value in os.environ.items() if name not in _OF_WORKERS}
        with tempfile.TemporaryFile() as errors:
            try:
                agent = subprocess.Popen(
                    [python or sys.executable, "-m", "nblaunch.engines.agent", str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=env,
                )
            except OSError as error:
                return socket.gethostname(), 127, str(error)
            assert agent.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                agent.stdin.write(boot_line.encode())
                agent.stdin.close()
            status = agent.wait()
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MAX_SAID))
            return socket.gethostname(), status, errors.read().decode(errors="replace").strip()


@dataclass
class Driver:
    """See the module. The parent is the kernel."""

    request: RayRequest
    parent: int
    _said: RayState = field(default_factory=RayState)
    _out: int = -1
    _group: Any = None
    _actors: list[Any] = field(default_factory=list)
    _runs: list[Any] = field(default_factory=list)

    def connect(self) -> None:
        """Connect to the cluster. Ray raises many kinds of exceptions if it cannot."""
        import ray

        address = self.request.address or os.environ.get("RAY_ADDRESS") or "auto"
        host, _, port = address.rpartition(":")
        if port.isdigit() and "://" not in address:  # Ray would try for minutes
            socket.create_connection((host, int(port)), RAY_PROBE_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)

    def serve(self) -> None:
        """Hold the nodes until the kernel closes the pipe, or has exited."""
        self._tell(RayState(addresses=[node["NodeManagerAddress"] for node in self._nodes()]))
        unread = b""
        looked_at = 0.0
        while os.getppid() == self.parent:
            if select.select([0], [], [], timeouts.NODES_POLL_S)[0]:
                read = os.read(0, 1 << 16)
                if not read:
                    break
                unread += read
                if self._group is None and unread.endswith(b"\n"):
                    self._start(Boot(**json.loads(unread)))
            if self._group is not None and time.monotonic() - looked_at > timeouts.QUEUE_POLL_S:
                looked_at = time.monotonic()
                self._tell(replace(self._said, state=self._state(), problem=self._said.problem or self._problem()))

    def _tell(self, state: RayState) -> None:
        if state != self._said:
            self._said = state
            with contextlib.suppress(BrokenPipeError):
                os.write(self._out, json.dumps(asdict(state)).encode() + b"\n")

    @staticmethod
    def _nodes() -> list[dict[str, Any]]:
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    # -------------------------------------------------------------- the actors
    def _start(self, boot: Boot) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        request = self.request
        if request.num_gpus is None:
            counts = [int(node["Resources"].get("GPU", 0)) for node in self._nodes()]
            self.request = request = replace(request, num_gpus=most_gpus(counts, request.count))
        made: Any = ray.remote(AgentActor)
        self._group = placement_group([_bundle(request)] * request.count, strategy="STRICT_SPREAD")
        line = json.dumps(asdict(boot)) + "\n"  # the kernel numbers nodes by name: the order of bundles is Ray's
        for number in range(request.count):
            options = {
                "num_cpus": request.num_cpus,
                "num_gpus": request.num_gpus,
                "resources": dict(request.resources),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, number),
                "max_restarts": 0,
            }
            actor = made.options(**options).remote()
            self._actors.append(actor)
            self._runs.append(actor.run.remote(request.python, line))

    @property
    def _is_placed(self) -> bool:
        from ray.util.placement_group import placement_group_table

        return bool(placement_group_table(self._group)["state"] == "CREATED")

    def _state(self) -> str:
        import ray

        if self._is_placed:
            return ""
        bundle, free = _bundle(self.request), ray.available_resources()
        fit = [n for n in self._nodes() if all(n["Resources"].get(name, 0) >= most for name, most in bundle.items())]
        asked = ", ".join(f"{name}: {most:g}" for name, most in bundle.items())
        left = ", ".join(f"{name}: {free.get(name, 0):g}" for name in bundle)
        count = self.request.count
        return f"ray: waiting for nodes: {count} with {asked}; the cluster has {len(fit)}; free in total: {left}"

    def _problem(self) -> str:
        import ray

        for run in ray.wait(self._runs, num_returns=len(self._runs), timeout=0)[0]:
            try:
                host, status, said = ray.get(run)
            except Exception as error:  # noqa: BLE001  # an actor that died, or could not be made
                return f"ray: the actor of an agent failed: {str(error).strip()[:_MAX_SAID]}"
            return f"ray: {host}: the agent exited with status {status}" + (f": {said}" if said else "")
        return ""

    def end(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._group is not None and self._is_placed:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=timeouts.AGENT_EXIT_TIMEOUT_S)
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()


def most_gpus(counts: Sequence[int], agents: int) -> int:
    """Return the most GPUs that each of so many agents can have, each on a node of its own of these."""
    return sorted(counts, reverse=True)[agents - 1] if agents <= len(counts) else 0


def _bundle(request: RayRequest) -> dict[str, float]:
    asked = {"CPU": request.num_cpus, "GPU": request.num_gpus or 0, **request.resources}
    return {name: most for name, most in asked.items() if most}


def main() -> NoReturn:
    parent, line = os.getppid(), b""
    while not line.endswith(b"\n"):
        read = os.read(0, 1)  # not what follows: that is for `select`
        if not read:
            os._exit(0)
        line += read
    out = os.dup(1)
    os.dup2(2, 1)  # what Ray prints goes to stderr
    driver = Driver(RayRequest(**json.loads(line)), parent, _out=out)
    try:
        driver.connect()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # Ray raises many kinds; the kernel says what to do
        driver._tell(RayState(problem=f"{type(error).__name__}: {str(error).strip()[:_MAX_SAID]}"))
        os._exit(1)
    try:
        driver.serve()
    finally:
        driver.end()
    os._exit(0)  # Ray's threads must not delay it


if __name__ == "__main__":
    main()
