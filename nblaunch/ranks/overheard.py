"""What an import asks for and says, each noted by something that stands in for what it uses."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any


class Environment(os._Environ[str]):
    """``os.environ``, which notes what is read."""

    read: Counter[str]

    def __getitem__(self, name: str) -> str:
        if isinstance(name, str):  # subprocess looks for b"PATH" too
            self.read[name] += 1
        return super().__getitem__(name)


class Arguments(list[str]):
    """``sys.argv``, which notes that it is read: a fork server's is not that of a launch."""

    is_read = False


def _noting(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def noting(self: Arguments, *args: object) -> Any:
        self.is_read = True
        return method(self, *args)

    return noting


for _name in ("__getitem__", "__iter__", "__len__", "__contains__", "__eq__", "__add__", "copy", "index", "pop"):
    setattr(Arguments, _name, _noting(_name))


class NotFound:
    """The last of ``sys.meta_path``, which notes the names that no other has found."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """None: there is no such module, or submodule of what is at `path`."""
        if path is None:
            self.names.add(name)


_TIDY_EXITS = {*sys.stdlib_module_names, "torch", "PIL", "filelock", "huggingface_hub", "matplotlib"}
"""Packages whose exit functions do nothing where they have not been used: they clear caches, and close what is open."""


class Exits:
    """``atexit.register``, which notes the packages that use it, but for a few."""

    def __init__(self) -> None:
        self.packages: list[str] = []
        self._register = atexit.register
        atexit.register = self._note

    def _note(self, function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        package = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        if package not in _TIDY_EXITS:
            self.packages.append(package)
        return self._register(function, *args, **kwargs)

    def close(self) -> None:
        atexit.register = self._register


class Output:
    """A file in the place of the standard streams' own, which notes that anything is written, by whatever code."""

    def __init__(self) -> None:
        self._file = os.memfd_create("nblaunch-imports")
        self._before = {fd: os.dup(fd) for fd in (1, 2)}
        for fd in self._before:
            os.dup2(self._file, fd)

    def is_written(self) -> bool:
        """Whether there is any; what waits in a buffer is written first, or each rank would write it."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        ctypes.CDLL(None).fflush(None)
        return os.fstat(self._file).st_size > 0

    def close(self) -> None:
        for fd, before in self._before.items():
            os.dup2(before, fd)
            os.close(before)
        os.close(self._file)
