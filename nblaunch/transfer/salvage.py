"""Rebuilding the parts of a pickle that can be rebuilt, after unpickling it as usual has failed.

An object that cannot be rebuilt costs what refers to it, and nothing else: all other objects stay one object each.
This uses Python's own unpickler, which is many times slower than that of C.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

_PYTHON: Any = pickle._Unpickler
"""Without Any, as typeshed leaves out what follows."""


class Unbuilt:
    """Stands for an object that could not be rebuilt."""

    def __init__(self, args: tuple[Any, ...] = ()) -> None:
        self.args = args
        """What a call that has failed was given."""


@dataclass(frozen=True, slots=True)
class Salvaged:
    """An object that was rebuilt in part."""

    value: Any
    failed: list[tuple[Any, str]]
    """The objects that lack content, and why. A dict or set that lacks content has an `Unbuilt` in it."""


class SalvagingUnpickler(_PYTHON):  # type: ignore[misc]  # Any
    """An unpickler that goes on when the code of a class raises.

    Args:
        file: The pickle.
        buffers: Its out-of-band buffers.

    Attributes:
        failed: See `Salvaged`.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PYTHON.dispatch)

    def __init__(self, file: Any, buffers: Iterable[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self.failed: list[tuple[Any, str]] = []

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except Exception as error:  # noqa: BLE001  # the user's module, too, is code
            return self._unbuilt(error)

    def _unbuilt(self, error: Exception, maker: Any = None, args: tuple[Any, ...] = ()) -> Unbuilt:
        made = Unbuilt(args)
        if type(maker) is Unbuilt:  # the first error is the cause
            self.failed.append((made, self._reason(maker)))
        else:
            self._fail(made, error)
        return made

    def _fail(self, thing: Any, error: Exception) -> None:
        self.failed.append((thing, f"{type(error).__name__}: {error}".rstrip(": ")))

    def _reason(self, unbuilt: Unbuilt) -> str:
        return next(reason for thing, reason in self.failed if thing is unbuilt)

    def _call(self) -> None:
        maker, args = self.stack[-2:]
        try:
            super().load_reduce()
        except Exception as error:  # noqa: BLE001  # any code
            self.stack[-1] = self._unbuilt(error, maker, args)

    def _pop(self) -> None:
        if self.stack and type(self.stack[-1]) is Unbuilt and self.stack[-1].args:
            # A pickle drops what a call returns if the call sets the state of its first argument.
            made = self.stack[-1]
            self.failed.append((made.args[0], self._reason(made)))
        super().load_pop()

    def _create(self, load: Callable[[Any], None], class_at: int = 0) -> None:
        maker = self.stack[class_at] if class_at else None
        try:
            load(self)
        except Exception as error:  # noqa: BLE001  # any code
            self.append(self._unbuilt(error, maker))

    def _fill(self, load: Callable[[Any], None]) -> None:
        try:
            load(self)
        except Exception as error:  # noqa: BLE001  # any code
            thing = self.stack[-1]
            if type(thing) is dict:
                thing[self._unbuilt(error)] = None
            elif type(thing) is set:
                thing.add(self._unbuilt(error))
            else:
                self._fail(thing, error)

    dispatch[pickle.REDUCE[0]] = _call
    dispatch[pickle.POP[0]] = _pop


def _guarded(load: Callable[[Any], None], how: Callable[[Any, Callable[[Any], None]], None]) -> Callable[[Any], None]:
    return lambda unpickler: how(unpickler, load)


for _codes, _how in (
    ((pickle.FROZENSET,), SalvagingUnpickler._create),
    ((pickle.NEWOBJ,), functools.partial(SalvagingUnpickler._create, class_at=-2)),
    ((pickle.NEWOBJ_EX,), functools.partial(SalvagingUnpickler._create, class_at=-3)),
    (
        (pickle.BUILD, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS),
        SalvagingUnpickler._fill,
    ),
):
    for _code in _codes:
        SalvagingUnpickler.dispatch[_code[0]] = _guarded(_PYTHON.dispatch[_code[0]], _how)
