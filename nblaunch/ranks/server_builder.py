"""Building a fork server's successor: import more packages, compact the heap, then serve.

Runs in a successor, a child of the fork server, which serves meanwhile: a slow import here delays no launch. A
package that ranks must not share (it starts threads, keeps files open, ...) makes the successor exit, and the kernel
builds again without it. The same goes for a package that hangs or crashes: `Importing` messages name it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nblaunch.machine import heap, processes
from nblaunch.machine.inventory import has_used_cuda
from nblaunch.machine.packages import KNOWN_SAFE, differs, edited, package_of
from nblaunch.ranks import environment, worker
from nblaunch.wire.channel import Channel
from nblaunch.wire.messages import Hello, Importing, LeftOut, Succeed

_EXEMPT = frozenset({"nblaunch", "sympy", "torch"})
"""Packages that every server imports, whose exit functions ranks can do without: triton, torch's, reports leaks."""


def build(message: Succeed, channel: Channel, predecessor: Hello) -> Hello:
    """Import the packages in `message` and return the successor's Hello; exit if a package must be left out.

    Args:
        message: The modules to import, and the environment and working directory to import them in.
        channel: To the kernel.
        predecessor: The Hello of the server that forked this process.
    """
    begin = time.monotonic()
    own = processes.pidfd(os.getpid())
    channel.send(Importing("", os.getpid()), [] if own is None else [own])
    if own is not None:
        os.close(own)
    os.environ.clear()
    os.environ.update(message.env)
    with contextlib.suppress(OSError):  # the directory is gone; ranks will report it
        os.chdir(message.cwd)
    present, filters = _packages(), list(warnings.filters)
    monitor, package = _ImportMonitor(), ""
    for name in message.modules:
        if name in sys.modules:
            continue
        if package_of(name) != package:
            _check(channel, package, monitor)
            package = package_of(name)
            channel.send(Importing(package, os.getpid()))
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # whatever a module raises
            if name == package:
                _leave_out(channel, package, f"importing it raises {type(error).__name__}: {error}", monitor)
            # a submodule that fails to import here is left to the ranks
    _check(channel, package, monitor)
    monitor.close()
    environment.keep_filters_since(filters)
    os.chdir(os.sep)
    worker.prepare()
    freeze_heap()
    for _ in heap.collapse():
        pass
    imported = predecessor.packages | (_packages() - present)
    return replace(predecessor, pid=os.getpid(), seconds=time.monotonic() - begin, packages=imported)


def freeze_heap() -> None:
    """Hide imported objects from the garbage collector: it would write to every page that ranks share."""
    gc.collect()
    gc.freeze()


def fork_problem() -> str:
    """Return why ranks must not be forked from this process; empty if they may."""
    threads = processes.thread_count()
    if threads > 1:
        return f"the preload left {threads} threads running, and forking them is not safe"
    if has_used_cuda():
        return "the preload initialised CUDA, which does not survive a fork"
    return ""


def _packages() -> frozenset[str]:
    return frozenset(map(package_of, sys.modules.copy()))  # a package's thread may be importing


def _check(channel: Channel, package: str, monitor: _ImportMonitor) -> None:
    """Leave `package`, just imported, out if ranks must not share it."""
    try:
        reason = fork_problem() or monitor.objection(package)
    except Exception as error:  # noqa: BLE001  # the package may have replaced anything
        reason = f"the effects of its import cannot be checked: {error!r}"
    if reason:
        _leave_out(channel, package, reason, monitor)


def _leave_out(channel: Channel, package: str, reason: str, monitor: _ImportMonitor) -> None:
    """Send the kernel that `package` must be left out, and exit."""
    monitor.run_exit_functions()  # before the message: the kernel kills the successor once it has read it
    channel.send(LeftOut(package, reason))
    os._exit(1)  # non-zero makes the server kill the processes that the package has started


class _Environment(os._Environ[str]):
    """``os.environ`` that counts reads by name."""

    read: Counter[str]

    def __getitem__(self, name: str) -> str:
        if isinstance(name, str):  # subprocess reads b"PATH" too
            self.read[name] += 1
        return super().__getitem__(name)


class _ImportMonitor:
    """Detects effects of an import that ranks must not share, or must each repeat for themselves."""

    def __init__(self) -> None:
        self._modules = set(sys.modules)
        self._files = _open_files()
        self._finalizers = _finalizers()
        self._exits: list[Callable[[], object]] = []
        self._register = atexit.register
        atexit.register = self._record_exit_function
        environment: Any = os.environ
        environment.__class__ = _Environment
        environment.read = self._read = Counter[str]()

    def objection(self, package: str) -> str:
        """Return why `package`, just imported, must be left out; empty if it need not."""
        if _open_files() > self._files:
            return "it keeps files open"
        if processes.has_children():  # including orphans of its children: this process is their subreaper
            return "it starts processes"
        new = [name for name in sys.modules.copy() if name not in self._modules]
        if name := edited(new):
            return f"it imports {name}, whose files may be edited between launches"
        self._modules.update(new)
        if package in KNOWN_SAFE | _EXEMPT:
            return ""
        if self._exits or _finalizers() - self._finalizers:
            return "it registers an exit function"
        copies = min((self._read[name] for name in os.environ), default=0)  # fsspec copies the whole environment
        read = [name for name, count in self._read.items() if count > copies * (name in os.environ) and differs(name)]
        return f"it reads {read[0]} while it is imported" if read else ""

    def close(self) -> None:
        """Stop monitoring."""
        environment: Any = os.environ
        environment.__class__ = os._Environ
        del environment.read
        atexit.register = self._register

    def run_exit_functions(self) -> None:
        """Run the exit functions as an interpreter would: they remove temporary directories."""
        with contextlib.suppress(BaseException):  # the packages' own functions
            for function in reversed(self._exits):
                function()
            atexit._run_exitfuncs()

    def _record_exit_function(self, function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        """Stand in for ``atexit.register``, to keep exit functions out of ranks: triton's takes each rank 4 ms."""
        self._exits.append(lambda: function(*args, **kwargs))
        return function


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


def _finalizers() -> set[int]:
    """Return the ids of ``weakref.finalize`` objects that run at exit, without those of torch: ranks forget them."""
    registry: dict[object, Any] = getattr(weakref.finalize, "_registry", {})
    live = [(id(each), str(getattr(info.func, "__module__", ""))) for each, info in registry.items() if info.atexit]
    return {number for number, home in live if not home.startswith("torch.")}
