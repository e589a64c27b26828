"""Functions and classes that travel by value, so that nothing that the receiver has already is ever rewritten.

cloudpickle finds a class that it has seen by an id, and sets the sender's state on it: a result would give the
notebook's class methods that work on copies of the notebook's globals, and attributes that a rank has changed. Here
the state goes only into what has just been made for it:

* What a process was sent and sends back is the receiver's own, as that has it now under the same name: a class
  that was redefined meanwhile counts, a function only while its code is still the same.
* Else a class that the receiver knows by cloudpickle's id is that class. Functions without a name of their own, such
  as lambdas, have such ids, too, but only those whose code and globals are all that they have: a variable of an
  enclosing function, a default value or an attribute may have been changed by the sender.
* All else is new to the receiver, with globals of its own.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import cloudpickle

_Whose = Literal["sender's", "receiver's", "nobody's"]
"""Who has a definition under its name."""

_borrowed: weakref.WeakSet[Any] = weakref.WeakSet()
"""What another process has under its name, and has sent here."""
_unfinished: weakref.WeakSet[Any] = weakref.WeakSet()
"""What was made here, and has not got its state yet."""


def look_up(module: str | None, name: str) -> Any:
    """What this process has under a qualified name; None if nothing."""
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def borrow(names: Mapping[str, Any]) -> None:
    """Regard what is defined there as sent by another process: this one is a fork of that."""
    waiting, seen = list(names.values()), set[int]()
    while waiting:
        thing = waiting.pop()
        if not isinstance(thing, (type, types.FunctionType)) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if thing.__module__ == "__main__" and _has_name(thing):
            with contextlib.suppress(TypeError):  # its metaclass may leave it without a hash: it cannot be sent at all
                _borrowed.add(thing)
            waiting += vars(thing).values()


def is_by_value(reduced: Any) -> bool:
    """Whether cloudpickle sends a function or class that it reduces so by value."""
    return isinstance(reduced, tuple) and len(reduced) == 6


def reduce(definition: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """How to pickle a function or class by value.

    Args:
        definition: The function or class.
        reduced: cloudpickle's own way.
    """
    make, made_of, state, items, entries, set_state = reduced
    if make is cloudpickle.cloudpickle._make_skeleton_class and _has_slots_of_its_own(definition):
        # cloudpickle makes a class without its slots: its objects' state would not fit those of the sender's class.
        made_of = (*made_of[:3], {**made_of[3], "__slots__": definition.__slots__}, *made_of[4:])
    whose: _Whose = "nobody's"
    if definition in _borrowed:
        whose = "receiver's"
    elif _has_name(definition):
        whose = "sender's"
    has_id = isinstance(definition, type) or (whose == "nobody's" and _is_plain(definition))
    tracker = cloudpickle.cloudpickle._get_or_create_tracker_id(definition) if has_id else None
    known_by = (definition.__module__, definition.__qualname__, tracker, whose)
    return begin, (make, made_of, *known_by), (set_state, state), items, entries, complete


def _has_slots_of_its_own(definition: Any) -> bool:
    """Return True if a class names its slots, and not a NamedTuple's metaclass for it."""
    return "__slots__" in vars(definition) and NamedTuple not in getattr(definition, "__orig_bases__", ())


def _has_name(definition: Any) -> bool:
    return look_up(definition.__module__, definition.__qualname__) is definition


def _is_plain(function: types.FunctionType) -> bool:
    """Whether a function has nothing but its code and its globals."""
    return not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function))


def begin(
    make: Callable[..., Any],
    made_of: tuple[Any, ...],
    module: str | None,
    name: str,
    tracker: str | None,
    whose: _Whose,
) -> Any:
    """The receiver's own function or class; else a new one, for `complete` to fill."""
    own = look_up(module, name) if whose == "receiver's" else None
    known = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    if isinstance(made_of[0], types.CodeType):
        if isinstance(own, types.FunctionType) and own.__code__ == made_of[0]:  # not the wrapper that a decorator made
            return own
        if known is not None and known.__code__ == made_of[0] and _is_plain(known):
            return known
    elif isinstance(own, type) and (own.__module__, own.__qualname__) == (module, name):  # not one that was imported
        return own
    elif known is not None:
        return known
    new = make(*made_of)
    cloudpickle.cloudpickle._lookup_class_or_track(tracker, new)  # of a class `make` has done so
    _unfinished.add(new)
    if whose != "nobody's":
        _borrowed.add(new)
    return new


def complete(definition: Any, content: tuple[Callable[[Any, Any], object], Any]) -> None:
    """Give a function or class its state, if `begin` has just made it."""
    if definition in _unfinished:
        _unfinished.discard(definition)
        set_state, state = content
        set_state(definition, state)
