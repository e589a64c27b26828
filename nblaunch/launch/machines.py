"""What a launch may have to wait for before it begins: a job in a queue, agents that start, an import of torch."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from nblaunch.engines import current
from nblaunch.engines.protocol import Engine, GivenUpError
from nblaunch.errors import LaunchStoppedError
from nblaunch.launch.failures import interruption
from nblaunch.launch.frontend import host
from nblaunch.launch.options import Options
from nblaunch.launch.plan import ANY_MACHINE, Plan, make_plan
from nblaunch.launch.views import Preparing, ShieldedView, View
from nblaunch.machine import timeouts
from nblaunch.machine.inventory import Machine

_log = logging.getLogger(__name__)


def planned(options: Options, view: View) -> tuple[Engine, Plan]:
    """Return the engine and the plan of a launch or session. Its start method is not yet known to work."""
    engine = current.chosen(options.engine, options.num_nodes)
    if not engine.is_local:
        make_plan([ANY_MACHINE], engine, options)  # before a node is asked for
    machines = engine.machines(lambda text: None) if engine.is_local else _Wait(engine, ShieldedView(view)).run()
    return engine, make_plan(machines, engine, options)


def with_usable_method(plan: Plan, engine: Engine, view: View) -> Plan:
    """Return the plan with a start method that works. Meanwhile a view says what is waited for."""
    shielded, shown = ShieldedView(view), []

    def show(text: str) -> None:
        shown.append(text)
        shielded.on(Preparing(text))

    try:
        return replace(plan, method=engine.usable(plan.method, plan.env, plan.named, show))
    finally:
        if shown:
            shielded.on(Preparing(""))


class _Wait:
    """A wait for machines. A view shows it, and its user may cancel. A thread starts them: this one answers pages."""

    def __init__(self, engine: Engine, view: ShieldedView) -> None:
        self._engine, self._view = engine, view
        self._is_over, self._is_cancelled = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        """Guards what is shown: nothing follows the end."""
        self._shown = ""
        self._found: Future[Sequence[Machine]] = Future()

    def run(self) -> Sequence[Machine]:
        try:
            threading.Thread(target=self._start, name="nblaunch-nodes", daemon=True).start()
            host().wait(self._is_over)
        except KeyboardInterrupt:
            self._is_cancelled.set()
            with contextlib.suppress(KeyboardInterrupt):  # the thread ends what it has started in any case
                self._is_over.wait(timeouts.NODES_CANCEL_TIMEOUT_S)
            raise interruption("interrupted while waiting for nodes: everything started was stopped", {}) from None
        finally:
            with self._lock:
                if self._shown:
                    self._view.on(Preparing(""))
                self._is_cancelled.set()
        try:
            return self._found.result()
        except GivenUpError:
            raise LaunchStoppedError("cancelled while waiting for nodes") from None

    def _start(self) -> None:
        try:
            self._found.set_result(self._engine.machines(self._show, self._is_cancelled.is_set))
        except BaseException as error:  # noqa: BLE001  # `run` raises it
            self._found.set_exception(error)
            if self._is_cancelled.is_set() and not isinstance(error, GivenUpError):
                _log.warning("nblaunch: error after the wait for nodes was cancelled: %s", error)
        finally:
            host().forget_thread()
            self._is_over.set()

    def _show(self, text: str) -> None:
        with self._lock:
            if not self._is_cancelled.is_set() and text != self._shown:
                self._shown = text
                self._view.on(Preparing(text, self._is_cancelled.set))
