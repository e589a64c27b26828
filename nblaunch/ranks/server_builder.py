"""How a child of a fork server becomes the next one: it imports more, tidies its memory, and only then serves.

The server that forked it serves meanwhile, so whatever an import does here costs no launch anything. A package that
ranks must not share (it starts threads, keeps files open, ...) ends this process, and the kernel builds again without
it. So does one that hangs or crashes, as the kernel is told each package before its import.
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

from nblaunch.machine import processes
from nblaunch.machine.packages import KNOWN_SAFE, differs, edited, package_of
from nblaunch.ranks import environment, worker
from nblaunch.wire.channel import Channel
from nblaunch.wire.messages import Hello, Importing, LeftOut, Succeed

_OURS = frozenset({"sympy", "torch"})
"""What the first optimizer of a process imports: triton looks for leaks at the exit, which no rank needs."""


def build(message: Succeed, channel: Channel, before: Hello) -> Hello:
    """Import what `message` names, and give the successor's Hello; never returns where a package must be left out.

    Args:
        message: What to import, and the environment and folder that it may read.
        channel: To the kernel.
        before: The Hello of the server that forked this process.
    """
    begin = time.monotonic()
    own = processes.pidfd(os.getpid())
    channel.send(Importing("", os.getpid()), [] if own is None else [own])
    if own is not None:
        os.close(own)
    os.environ.clear()
    os.environ.update(message.env)
    with contextlib.suppress(OSError):  # the folder is gone, and the ranks will say so
        os.chdir(message.cwd)
    present, filters = _packages(), list(warnings.filters)
    witness, package = _Witness(), ""
    for name in message.modules:
        if name in sys.modules:
            continue
        if package_of(name) != package:
            _leave_if_unfit(channel, package, witness)
            package = package_of(name)
            channel.send(Importing(package, os.getpid()))
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # whatever a module raises
            if name == package:
                _leave(channel, package, f"importing it raises {type(error).__name__}: {error}", witness)
            # a submodule that cannot be imported here is left to the ranks
    _leave_if_unfit(channel, package, witness)
    witness.close()
    environment.note_filters(filters)
    os.chdir(os.sep)
    worker.prepare()
    settle()
    for _ in processes.collapse_heap():
        pass
    imported = before.packages | (_packages() - present)
    return replace(before, pid=os.getpid(), seconds=time.monotonic() - begin, packages=imported)


def settle() -> None:
    """Keep what is imported out of the collector's way: it would write to every page that ranks share."""
    gc.collect()
    gc.freeze()


def unfit() -> str:
    """Why ranks must not be forked from this process; empty where they may."""
    threads = processes.thread_count()
    if threads > 1:
        return f"the preload left {threads} threads running, and forking them is not safe"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the preload initialised CUDA, which does not survive a fork"
    return ""


def _packages() -> frozenset[str]:
    return frozenset(map(package_of, sys.modules))


def _leave_if_unfit(channel: Channel, package: str, witness: _Witness) -> None:
    try:
        reason = unfit() or witness.objection(package)
    except Exception as error:  # noqa: BLE001  # the package may have put anything anywhere
        reason = f"what it does while it is imported cannot be seen: {error!r}"
    if reason:
        _leave(channel, package, reason, witness)


def _leave(channel: Channel, package: str, reason: str, witness: _Witness) -> None:
    witness.undo()  # first: the kernel kills a successor that has said its last message
    channel.send(LeftOut(package, reason))
    os._exit(1)  # a failure, so that the server ends the processes that the package has started


class _Environment(os._Environ[str]):
    """``os.environ``, which counts what is read."""

    read: Counter[str]

    def __getitem__(self, name: str) -> str:
        if isinstance(name, str):  # subprocess looks for b"PATH" too
            self.read[name] += 1
        return super().__getitem__(name)


class _Witness:
    """Sees what an import leaves in this process that ranks must not share, or that each must have for itself."""

    def __init__(self) -> None:
        self._modules = set(sys.modules)
        self._files = _open_files()
        self._finalizers = _finalizers()
        self._exits: list[Callable[[], object]] = []
        self._register = atexit.register
        atexit.register = self._note_exit
        environment: Any = os.environ
        environment.__class__ = _Environment
        environment.read = self._read = Counter[str]()

    def objection(self, package: str) -> str:
        """Why `package`, just imported, must be left out; empty if it need not."""
        if _open_files() > self._files:
            return "it keeps files open"
        if processes.has_children():  # this process adopts those that were left behind
            return "it starts processes"
        new = [name for name in list(sys.modules) if name not in self._modules]
        if name := edited(new):
            return f"it imports {name}, whose files may be edited between launches"
        self._modules.update(new)
        if package in KNOWN_SAFE | _OURS:
            return ""
        if self._exits or _finalizers() - self._finalizers:
            return "it arranges something for the exit of the process"
        copies = min((self._read[name] for name in os.environ), default=0)  # fsspec copies the whole environment
        read = [name for name, count in self._read.items() if count > copies * (name in os.environ) and differs(name)]
        return f"it reads {read[0]} while it is imported" if read else ""

    def close(self) -> None:
        """Stop looking."""
        environment: Any = os.environ
        environment.__class__ = os._Environ
        del environment.read
        atexit.register = self._register

    def undo(self) -> None:
        """Do what was arranged for the exit, as an interpreter would: remove temporary folders."""
        with contextlib.suppress(BaseException):  # other people's functions
            for function in reversed(self._exits):
                function()
            atexit._run_exitfuncs()

    def _note_exit(self, function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        """Keep exit functions out of the ranks: triton's search for leaks takes each rank 4 ms."""
        self._exits.append(lambda: function(*args, **kwargs))
        return function


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


def _finalizers() -> set[int]:
    """``weakref.finalize`` objects that act at the exit; those of torch's own libraries are forgotten in ranks."""
    registry: dict[object, Any] = getattr(weakref.finalize, "_registry", {})
    live = [(id(each), str(getattr(info.func, "__module__", ""))) for each, info in registry.items() if info.atexit]
    return {number for number, home in live if not home.startswith("torch.")}
