"""Which installed modules a launch has imported: the fork server may have them ready for the next.

Never a module of the notebook's own folders, nor of an editable installation: those are edited between launches.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from nblaunch.installed import differs, is_installed
from nblaunch.ranks import overheard, shared
from nblaunch.ranks.bindings import Bindings

_REALTIME_COARSE = 5
"""Linux's clock for files, which Python has no name for."""
_roots: tuple[str, ...] = ()
"""The folders that the fork server finds installed modules in, with a separator at the end."""


def note_roots() -> None:
    """Note in the fork server, before it forks, where what it can import is installed."""
    global _roots
    _roots = tuple(os.path.join(os.path.realpath(entry), "") for entry in sys.path if is_installed(entry))


def latest() -> str:
    """The module that was imported last."""
    return next(reversed(sys.modules))


def installed_since(latest: str) -> tuple[str, ...]:
    """The modules that have been imported since that one was the latest, and are installed; in order.

    Those before it are not looked at: counting a reference to each of their names would copy pages that all ranks
    share, which takes 10 ms.
    """
    present = list(sys.modules)  # a thread may import something meanwhile
    fresh = list(itertools.takewhile(lambda name: name != latest, reversed(present)))
    names = [name for name in reversed(fresh) if not name.startswith("nblaunch")]
    return tuple(name for name in names if _is_installed(name, sys.modules.get(name)))


def _is_installed(name: str, module: ModuleType | None) -> bool:
    spec = getattr(module, "__spec__", None)
    if spec is None or getattr(spec, "name", None) != name:  # another name of a module, or made by hand
        return False
    origin = getattr(spec, "origin", None)
    if origin in ("built-in", "frozen"):
        return True
    return isinstance(origin, str) and os.path.realpath(origin).startswith(_roots)


def now() -> int:
    """The time as files have it: their clock goes in steps, and is behind the exact one."""
    return time.clock_gettime_ns(_REALTIME_COARSE)


def files(names: Iterable[str], since: int) -> tuple[tuple[str, int], ...]:
    """The files of these modules, with the times of their last changes; not of Python's own.

    Of one that has been changed since the imports began, nobody knows which text was imported: its time is 0, which
    no file has. A change is told by ``st_ctime``, which nobody can set, as some programs set that of the text.
    """
    found = []
    for name in names:
        origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
        if isinstance(origin, str) and os.path.realpath(origin).startswith(_roots):
            try:
                status = os.stat(origin)
            except OSError:
                continue  # it is in an archive
            found.append((origin, status.st_mtime_ns if status.st_ctime_ns < since else 0))
    return tuple(found)


# ------------------------------------------------------------------ what an import does besides
class Witness:
    """Sees what an import does that each rank must have done for itself, or not at all.

    Ranks that are forked after an import have what it left in the process, whether they import the module or not, and
    lose what they set anew. So packages that read what differs between ranks, or change what all code of a process
    shares, cannot be there before.
    """

    def __init__(self) -> None:
        environment: Any = os.environ
        environment.__class__ = overheard.Environment
        environment.read = self._read = Counter[str]()
        self._plain_arguments = sys.argv
        sys.argv = self._arguments = overheard.Arguments(sys.argv)
        self._not_found = overheard.NotFound()
        sys.meta_path.append(self._not_found)
        self._exits = overheard.Exits()
        self._output = overheard.Output()
        self._finalizers = shared.finalizers()
        self._generators = shared.generators()
        self._state = shared.state()
        self._bindings = Bindings()
        self._references = sys.getrefcount(self._arguments)
        self._arguments.is_read = False

    def close(self) -> None:
        environment: Any = os.environ
        environment.__class__ = os._Environ
        del environment.read
        sys.argv = self._plain_arguments
        sys.meta_path.remove(self._not_found)
        self._exits.close()
        self._output.close()

    def not_found(self) -> tuple[str, ...]:
        """The modules that were looked for, and that ranks may find in a folder of the notebook's own."""
        return tuple(sorted(self._not_found.names - sys.modules.keys()))

    def objection(self) -> str:
        """Why what has been imported cannot be there before ranks are; empty if it can."""
        does = next(filter(None, (look() for look in (self._reads, self._does, self._changes))), "")
        return does and f"it {does} while it is imported"

    def _reads(self) -> str:
        read = [name for name in self._asked_for() if differs(name)]
        if self._arguments.is_read or sys.getrefcount(self._arguments) > self._references:  # or keeps it, to be read
            read.append("sys.argv")
        return f"reads {read[0]}" if read else ""

    def _does(self) -> str:
        if self._output.is_written():
            return "prints"
        new = shared.finalizers().items() - self._finalizers.items()
        if self._exits.packages or any(not home.startswith("torch.") for _, home in new):
            return "arranges something for the exit of the process"
        return "makes generators of random numbers" if shared.generators() - self._generators else ""

    def _changes(self) -> str:
        changed = [name for name, value in shared.state().items() if value != self._state[name]]
        if self._not_found not in sys.meta_path:
            changed.append("sys.meta_path")
        changed = changed or list(filter(None, [self._bindings.changed()]))
        return f"changes {changed[0]}" if changed else ""

    def _asked_for(self) -> list[str]:
        """The variables that were read by their names: fsspec copies them all, and networkx looks for a prefix."""
        copies = min((self._read[name] for name in os.environ), default=0)
        return sorted(self._read - Counter(dict.fromkeys(os.environ, copies)))


_filters: list[Any] = []
"""Warnings' filters that imports of the fork server have added, which ranks would have added by importing."""


def note_filters(before: list[Any]) -> None:
    """Note what has been added to ``warnings.filters``."""
    _filters[:] = [entry for entry in warnings.filters if entry not in before]


def filters() -> list[Any]:
    """The filters that imports have added, the last one first, as Python has them."""
    return list(_filters)
