"""Which installed modules a launch has imported: the fork server may have them ready for the next.

Never a module of the notebook's own folders, nor of an editable installation: those are edited between launches.
"""

from __future__ import annotations

import gc
import itertools
import locale
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from nblaunch.installed import is_installed
from nblaunch.ranks.bindings import Bindings

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


def files(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """The files of these modules, with the times of their last changes; not of Python's own."""
    found = []
    for name in names:
        origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
        if isinstance(origin, str) and os.path.realpath(origin).startswith(_roots):
            try:
                found.append((origin, os.stat(origin).st_mtime_ns))
            except OSError:
                continue  # it is in an archive
    return tuple(found)


# ------------------------------------------------------------------ what an import does besides
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "NBLAUNCH_RANK", "NBLAUNCH_LAUNCH_ID")
_OF_RANKS_BEGIN = ("GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_OF_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Of which fork servers have 1, so that libraries start no threads there, and each launch its own."""


class _WatchedEnvironment(os._Environ[str]):
    """The environment, which notes what is read."""

    read: Counter[str]

    def __getitem__(self, name: str) -> str:
        self.read[name] += 1
        return super().__getitem__(name)


class Witness:
    """Sees what an import does that each rank must have done for itself, or not at all.

    Ranks that are forked after an import have what it left in the process, whether they import the module or not, and
    lose what they set anew. So packages that read what differs between ranks, or change what all code of a process
    shares, cannot be there before.
    """

    def __init__(self) -> None:
        environment: Any = os.environ
        environment.__class__ = _WatchedEnvironment
        environment.read = self._read = Counter[str]()
        self._generators = _generators()
        self._shared = _shared()
        self._bindings = Bindings()

    def close(self) -> None:
        environment: Any = os.environ
        environment.__class__ = os._Environ
        del environment.read

    def objection(self) -> str:
        """Why what has been imported cannot be there before ranks are; empty if it can."""
        read = [name for name in self._asked_for() if _differs(name)]
        if read:
            return f"it reads {read[0]} while it is imported"
        if _generators() - self._generators:
            return "it makes generators of random numbers while it is imported"
        now = _shared()
        changed = [name for name, value in now.items() if value != self._shared[name]]
        changed = changed or list(filter(None, [self._bindings.changed()]))
        return f"it changes {changed[0]} while it is imported" if changed else ""

    def _asked_for(self) -> list[str]:
        """The variables that were read by their names: fsspec copies them all, and networkx looks for a prefix."""
        copies = min((self._read[name] for name in os.environ), default=0)
        return sorted(self._read - Counter(dict.fromkeys(os.environ, copies)))


def _differs(name: str) -> bool:
    """Whether ranks have another value of this variable than the process that imports for them."""
    return name in (*_OF_RANKS, *_OF_THREADS) or name.startswith(_OF_RANKS_BEGIN)


def _generators() -> set[int]:
    """The generators of random numbers in this process; those of the operating system are everyone's."""
    import numpy
    import torch

    kinds = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)
    return {
        id(each)
        for each in gc.get_objects()
        if issubclass(kind := type(each), kinds) and not issubclass(kind, random.SystemRandom)  # proxies are left alone
    }


def _shared() -> dict[str, object]:
    """What all code of a process shares, and imports may change; `warnings.filters` are the ranks' to take over."""
    import numpy
    import torch
    from torch import multiprocessing as torch_multiprocessing

    numpy_state: Any = numpy.random.get_state()
    root = logging.getLogger()
    umask = os.umask(0o77)
    os.umask(umask)
    return {
        "os.environ": dict(os.environb),  # which notes nothing as read
        "sys.path": list(sys.path),
        "sys.meta_path": sys.meta_path[:1],  # six appends to it, for names of its own
        "the locale": locale.setlocale(locale.LC_ALL),
        "the timeout of sockets": socket.getdefaulttimeout(),
        "the working directory": os.getcwd(),
        "the umask": umask,
        "random's state": random.getstate(),
        "NumPy's random state": (numpy_state[1].tobytes(), *numpy_state[2:]),
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "torch's settings": (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            vars(torch._tensor_str.PRINT_OPTS).copy(),
            torch_multiprocessing.get_sharing_strategy(),
        ),
        "NumPy's settings": (numpy.geterr(), numpy.get_printoptions()),
        "logging's root": (root.level, list(root.handlers), logging.root.manager.disable),
        "the start method of multiprocessing": multiprocessing.get_start_method(allow_none=True),
        "how signals are handled": [signal.getsignal(number) for number in signal.valid_signals()],
        "sys's hooks": (sys.excepthook, sys.displayhook, sys.getrecursionlimit(), sys.stdout, sys.stderr),
    }


_filters: list[Any] = []
"""Warnings' filters that imports of the fork server have added, which ranks would have added by importing."""


def note_filters(before: list[Any]) -> None:
    """Note what has been added to ``warnings.filters``."""
    _filters[:] = [entry for entry in warnings.filters if entry not in before]


def filters() -> list[Any]:
    """The filters that imports have added, the last one first, as Python has them."""
    return list(_filters)
