"""Pickling of functions and classes by value, so that receiving one never changes a definition of the receiver.

cloudpickle finds a class that it has seen by an id, and sets the sender's state on it. A result would give the
notebook's classes methods that use copies of the notebook's globals, and attributes that a rank has changed. Here,
state is set only on what unpickling has just created:

* A definition that a process was sent and sends back is the receiver's current one under the same name. A class may
  have been redefined meanwhile; a function counts only while its code is the same.
* Else, a class with an id that the receiver knows is that class. Functions without a name, such as lambdas, have ids
  too if they consist of code and globals alone: the sender may have changed a closure, a default or an attribute.
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

_Owner = Literal["sender", "receiver", "none"]
"""The process that has a definition under its name."""

_received: weakref.WeakSet[Any] = weakref.WeakSet()
"""Definitions that another process has under their names, and has sent here."""
_unfinished: weakref.WeakSet[Any] = weakref.WeakSet()
"""Definitions that were created here and have no state yet."""


_home: dict[str, Any] | None = None
"""The globals of every function that a kept rank receives from the notebook."""
_kept: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""Tensors and modules that the notebook has sent to this kept rank, by key."""
_keys: set[str] = set()
"""The keys of `_kept`, and of objects that have gone since `take_lost_keys` was called."""
_new_keys: set[str] = set()
"""Of objects created since `take_new_owners` was called."""
_unset: set[int] = set()
"""Ids of objects in `_kept` that have no state yet."""


class LostReferenceError(LookupError):
    """An object was sent as a reference to one that this rank no longer has."""


def look_up(module: str | None, name: str) -> Any:
    found: Any = sys.modules.get(module or "")
    for part in filter(None, name.split(".")):
        found = getattr(found, part, None)
    return found


def is_sent_by_value(thing: Any) -> bool:
    """Return True if a function or class is sent with all that it refers to, False if ranks import it."""
    name = getattr(thing, "__qualname__", "")  # what wraps a partial has none
    return thing.__module__ == "__main__" or is_of_main(thing) or look_up(thing.__module__, name) is not thing


def is_of_main(thing: Any) -> bool:
    """Return True for a function of ``__main__``, also if `functools.wraps` gave it the name of one of a module."""
    return getattr(thing, "__globals__", None) is vars(sys.modules["__main__"])


def mark_received(names: Mapping[str, Any]) -> None:
    """Treat these definitions as received from another process; for a fork of that process."""
    waiting, seen = list(names.values()), set[int]()
    while waiting:
        thing = waiting.pop()
        if not isinstance(thing, (type, types.FunctionType)) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if thing.__module__ == "__main__" and _has_name(thing):
            with contextlib.suppress(TypeError):  # a metaclass may make it unhashable; it cannot be sent at all
                _received.add(thing)
            waiting += vars(thing).values()


def reduce_by_value(definition: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the reduction of a function or class that is sent by value."""
    make, made_of, state, items, entries, set_state = reduced
    if make is cloudpickle.cloudpickle._make_skeleton_class and _has_slots_of_its_own(definition):
        # cloudpickle creates the class without its slots, and the state of instances would not fit.
        made_of = (*made_of[:3], {**made_of[3], "__slots__": definition.__slots__}, *made_of[4:])
    owner: _Owner = "none"
    if definition in _received:
        owner = "receiver"
    elif _has_name(definition):
        owner = "sender"
    has_id = isinstance(definition, type) or (owner == "none" and _is_plain(definition))
    tracker = cloudpickle.cloudpickle._get_or_create_tracker_id(definition) if has_id else None
    known_by = (definition.__module__, definition.__qualname__, tracker, owner)
    return find_or_create, (make, made_of, *known_by), (set_state, state), items, entries, set_state_if_new


def _has_slots_of_its_own(definition: Any) -> bool:
    """Return True if a class itself defines slots; those of a NamedTuple come from its metaclass."""
    return "__slots__" in vars(definition) and NamedTuple not in getattr(definition, "__orig_bases__", ())


def _has_name(definition: Any) -> bool:
    return look_up(definition.__module__, definition.__qualname__) is definition


def _is_plain(function: types.FunctionType) -> bool:
    return not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function))


# ------------------------------------------------------------------ kept ranks
def set_home(names: dict[str, Any]) -> None:
    """Give every function that arrives from the notebook these globals: for a kept rank."""
    global _home
    _home = names


def home() -> dict[str, Any]:
    return {} if _home is None else _home


def reduce_at_home(definition: Any, reduced: tuple[Any, ...], names: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the reduction of a definition that kept ranks hold, without its globals: the receiver has its own."""
    make, (maker, made_of, *known_by), (set_state, state), items, entries, _ = reduced
    if isinstance(definition, types.FunctionType) and definition.__globals__ is names:
        made_of = (made_of[0], _Home(), *made_of[2:])
        attributes, slots = state
        state = attributes, {**slots, "__globals__": {}}
    return make, (maker, made_of, *known_by), (set_state, state), items, entries, set_state_at_home


class _Home:
    """Pickles as the receiver's `home`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return home, ()


class BoundFirst:
    """Pickles as a call that binds a name in the receiver's `home`: later parts of the pickle may run code with it."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def __reduce__(self) -> tuple[Any, ...]:
        return bind_at_home, (self._name, self._value)


def bind_at_home(name: str, value: Any) -> None:
    home()[name] = value


def set_state_at_home(definition: Any, content: tuple[Callable[[Any, Any], object], Any]) -> None:
    """Set the state of a definition that the notebook has sent, also if this kept rank has an earlier state of it."""
    if definition in _unfinished or definition in _received:
        _unfinished.discard(definition)
        set_state, state = content
        set_state(definition, state)


def keep(key: str, make: Callable[..., Any], made_of: tuple[Any, ...]) -> Any:
    """Return the object that was sent under this key before, else create it."""
    known = _kept.get(key)
    if known is None:
        known = _kept[key] = make(*made_of)
        _unset.add(id(known))
        _keys.add(key)
        _new_keys.add(key)
    return known


def kept_things() -> list[tuple[str, Any]]:
    return list(_kept.items())


def take_new_owners() -> set[str]:
    """Return the names whose objects have been created since the last call, rather than referred to."""
    owners = {key.rpartition("/")[0] for key in _new_keys}
    _new_keys.clear()
    return owners


def take_lost_keys() -> tuple[str, ...]:
    """Return the keys of objects that have gone since the last call: the notebook must not refer to them."""
    lost = _keys.difference(_kept)
    _keys.difference_update(lost)
    return tuple(lost)


def kept(key: str) -> Any:
    """Return the object that was sent under this key before."""
    try:
        return _kept[key]
    except KeyError:
        raise LostReferenceError(
            "an object refers to a tensor or module that this rank has deleted: run the cell again to send both"
        ) from None


def set_kept_state(thing: Any, state: Any) -> None:
    """Set the state of an object that `keep` has just created. An earlier object keeps the rank's changes."""
    if id(thing) not in _unset:
        return
    if hasattr(thing, "__setstate__"):
        thing.__setstate__(state)
    else:
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        vars(thing).update(attributes or {})
        for name, value in (slots or {}).items():
            setattr(thing, name, value)
    _unset.discard(id(thing))  # not if it has failed: another name must see that again


def find_or_create(
    make: Callable[..., Any],
    made_of: tuple[Any, ...],
    module: str | None,
    name: str,
    tracker: str | None,
    owner: _Owner,
) -> Any:
    """Return the receiver's own definition, or a new one without state."""
    own = look_up(module, name) if owner == "receiver" else None
    known = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    if isinstance(made_of[0], types.CodeType):
        if isinstance(own, types.FunctionType) and own.__code__ == made_of[0]:  # a decorator's wrapper has other code
            return own
        if known is not None and known.__code__ == made_of[0] and _is_plain(known):
            return known
    elif isinstance(own, type) and (own.__module__, own.__qualname__) == (
        module,
        name,
    ):  # not one that was imported
        return own
    elif known is not None:
        return known
    new = make(*made_of)
    cloudpickle.cloudpickle._lookup_class_or_track(tracker, new)  # for a class, `make` has done so
    _unfinished.add(new)
    if owner != "none":
        _received.add(new)
    return new


def set_state_if_new(definition: Any, content: tuple[Callable[[Any, Any], object], Any]) -> None:
    if definition in _unfinished:
        _unfinished.discard(definition)
        set_state, state = content
        set_state(definition, state)


def in_file(filename: str, make: Callable[..., Any], parts: tuple[Any, ...]) -> types.CodeType:
    """Make a code object from cloudpickle's `parts`, with this file name."""
    code: types.CodeType = make(*parts)
    return code.replace(co_filename=filename)
