"""The machines that ranks are placed on, which may have to be waited for: a job in a queue, agents that start."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from nblaunch.engines.protocol import Engine
from nblaunch.errors import LaunchStoppedError
from nblaunch.launch.frontend import host
from nblaunch.launch.views.base import View
from nblaunch.launch.views.events import Preparing
from nblaunch.machine import timeouts
from nblaunch.machine.inventory import Machine


def machines_of(engine: Engine, view: View) -> Sequence[Machine]:
    """Return the machines of an engine. Meanwhile a view says what is awaited, and its user may cancel.

    Raises:
        StartError: One cannot be used.
        LaunchStoppedError: The user has cancelled.
        KeyboardInterrupt: The user has interrupted the cell.
    """
    return engine.machines(lambda text: None) if engine.is_local else _Wait(engine, view).run()


class _Wait:
    """A wait for machines. A thread starts them: this one answers pages meanwhile."""

    def __init__(self, engine: Engine, view: View) -> None:
        self._engine, self._view = engine, view
        self._is_over, self._is_cancelled = threading.Event(), threading.Event()
        self._has_shown = False
        self._machines: Sequence[Machine] = ()
        self._error: BaseException | None = None

    def run(self) -> Sequence[Machine]:
        threading.Thread(target=self._start, name="nblaunch-nodes", daemon=True).start()
        try:
            host().wait(self._is_over)
        except BaseException:  # an interrupt
            self._is_cancelled.set()
            with contextlib.suppress(KeyboardInterrupt):  # the user is impatient: the thread frees them in any case
                self._is_over.wait(timeouts.NODES_CANCEL_TIMEOUT_S)
            raise
        finally:
            if self._has_shown:
                self._view.on(Preparing(""))
        if self._is_cancelled.is_set():
            raise LaunchStoppedError("cancelled, before the nodes were there")
        if self._error is not None:
            raise self._error
        return self._machines

    def _start(self) -> None:
        try:
            self._machines = self._engine.machines(self._show, self._is_cancelled.is_set)
        except BaseException as error:  # noqa: BLE001  # `run` raises it
            self._error = error
        finally:
            self._is_over.set()

    def _show(self, text: str) -> None:
        self._has_shown = True
        self._view.on(Preparing(text, self._is_cancelled.set))
