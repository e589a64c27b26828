"""The names of a kept rank: what its tasks share, what the notebook has sent, and answers to questions about them."""

from __future__ import annotations

import builtins
import itertools
import rlcompleter
import secrets
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from nblaunch.ranks.changed_values import content_of
from nblaunch.transfer import definitions, pickling
from nblaunch.transfer.parameters import PROVIDED
from nblaunch.transfer.tensors import needs_unwrapping
from nblaunch.wire.messages import MAX_BOUND, Bound, NamesTaken, Payload, Question, SentName, Settings

_MAX_COMPLETIONS = 500
_MAX_REPR_CHARS = 100_000
_OF_GROUPS = {
    *("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DTensor", "DeviceMesh", "ProcessGroup"),
    "ZeroRedundancyOptimizer",
}
"""Types whose objects hold a process group."""
_known_types: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
"""Whether they do: each cell's names are looked at."""
_MAX_SEARCHED = 100
"""Attributes or elements of one value that are searched for such an object."""
_OF_ARRAYS = {"cupy", "jax", "jaxlib", "numpy", "pandas", "polars", "pyarrow", "scipy", "xarray"}
"""Packages whose arrays and tables say their shape at once."""


class Namespace(pickling.Home):
    """The names that live in one kept rank."""

    def __init__(self, rank: int) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        """The globals of its tasks."""
        self.main: dict[str, Any] = {}
        """Further definitions of the notebook's ``__main__``."""
        self.is_set_up = False
        """The first task has set threads, device and ``__main__``; later ones leave what cells have made of them."""
        self._rank = rank
        self._has_settings = False
        self._digests: dict[str, bytes] = {}
        """Of the value that the notebook had when it last sent a name, or would have sent it."""
        self._notebooks: dict[str, _OfNotebook] = {}
        """The names that have the notebook's value. The others are this rank's own."""
        self._lost: tuple[str, ...] = ()
        """Names of the last task that could not be rebuilt, and why."""
        self._keys: dict[int, str] = {}
        self._token = secrets.token_hex(8)
        """Of this process: a restarted rank knows keys of the one before."""
        self._shared: list[object] = []
        """Keeps what `key_of` has named alive: ids are used again."""
        self._error: BaseException | None = None
        """What the last task has raised, with its frames."""
        self.examine: Callable[[BaseException], None] = lambda error: None
        """Opens the debugger on an exception."""
        definitions.set_home(self.names)

    def take(self, payload: Payload) -> NamesTaken:
        """Bind the notebook's names. A name that the rank has bound itself stays, until it is pushed.

        What the rank did to a value in place stays until the notebook's value changes.
        """
        self._shared.clear()  # of a restart that was given up
        if not isinstance(payload.function, Question):
            self._error = None
        self.main.update(payload.main)
        names = {n: sent for n, sent in payload.names.items() if sent.ranks is None or self._rank in sent.ranks}
        unbuilt = {name: sent.value.reason for name, sent in names.items() if type(sent.value) is pickling.Unbuilt}
        lost = (f"`{name}` could not be rebuilt ({why})" for name, why in unbuilt.items() if _is_shown(name))
        self._lost = (*payload.kwargs.get("lost", ()), *lost) if isinstance(payload.function, Question) else ()
        names = {name: sent for name, sent in names.items() if name not in unbuilt}
        forced = {name for name, sent in names.items() if sent.is_forced}
        new_owners = definitions.take_new_owners()  # of tensors that were sent, not referred to
        concerned = new_owners.union(names) - forced
        own = {name for name in concerned if name in self.names and not self._is_notebooks(name)}
        kept: list[str] = []
        replaced: list[str] = []
        bound: list[str] = []
        for name, sent in names.items():
            has_changed = self._digests.get(name) != sent.digest
            self._digests[name] = sent.digest
            if name in own:
                kept += [name] * (has_changed and self.names[name] is not sent.value)  # as an imported module is
            elif has_changed or sent.is_forced or name not in self.names:
                if not sent.is_forced and name in self.names:
                    replaced += [name] * (self._notebooks[name].content != content_of(self.names[name]))
                self.names[name] = sent.value
                self._notebooks.pop(name, None)
                if sent.digest:
                    self._notebooks[name] = _OfNotebook(sent.value)
                bound.append(name)
        apart = [(name, owner) for name in bound for owner in (new_owners & own).intersection(names[name].holds)]
        apart += [(name, owner) for owner in kept for name in bound if name in names[owner].holds]
        return NamesTaken(tuple(kept), tuple(replaced), tuple(apart))

    def end_task(self) -> None:
        """Release the notebook's values that the task has replaced: their names are this rank's own from now on."""
        self._notebooks = {name: each for name, each in self._notebooks.items() if self._is_notebooks(name)}

    def keep_error(self, error: BaseException) -> None:
        """Keep what a task has raised for ``%distributed debug``, unless that itself was interrupted."""
        if self._error is None:
            self._error = error

    def takes_settings(self, settings: Settings) -> bool:
        """Return True if this rank is to apply the notebook's settings: once, then it goes on with its own."""
        if self._has_settings or self._rank not in (settings.ranks or ()):
            return False
        self._has_settings = True
        return True

    def _is_notebooks(self, name: str) -> bool:
        return name in self._notebooks and self._notebooks[name].is_value(self.names.get(name, _OfNotebook))

    # -------------------------------------------------------------- descriptions
    def describe(self) -> tuple[Bound, ...]:
        shown = [(name, value) for name, value in self._named().items() if _is_shown(name)]
        return tuple(_describe(name, value) for name, value in shown[-MAX_BOUND:])

    def private(self) -> tuple[str, ...]:
        return tuple(name for name in self._named() if name.startswith("_"))

    def _named(self) -> dict[str, Any]:
        """Return the names as they are now: a thread of the user may bind others, and ``globals()[5] = 1`` is none."""
        found: list[tuple[Any, Any]] = list(self.names.items())
        return {name: value for name, value in found if isinstance(name, str)}

    def answer(self, question: Question) -> Any:
        match question.kind:
            case "value":
                return eval(question.text, self.names)
            case "repr":
                return repr(eval(question.text, self.names))[:_MAX_REPR_CHARS]
            case "complete":
                completer, text = rlcompleter.Completer(self._named()), question.text
                found = completer.attr_matches(text) if "." in text else completer.global_matches(text)
                return sorted({name.rstrip("() ") for name in found})[:_MAX_COMPLETIONS]
            case "debug":
                if self._error is not None:
                    self.examine(self._error)
                return self._error is not None
            case "dump":
                return self._dump()
            case "restore":
                return self._lost
        return None  # "names" and "push": `Names` follows in any case

    def _why_not(self, name: str, value: Any) -> str:
        probe = _Probe()
        probe.names = self.names
        error = pickling.explain(value, f"`{name}`", probe)
        ends = f"`{name}` holds a {probe.found}, which needs the old process group: store what it wraps separately"
        return ends if probe.found else str(error or "")

    def _dump(self) -> Payload:
        """Return a payload that binds all names that can be sent, pickled by themselves, and names the others."""
        named = {n: value for n, value in self._named().items() if not n.startswith("__") and n not in PROVIDED}
        values = {name: value.module if needs_unwrapping(value) else value for name, value in named.items()}
        lost = {name: reason for name, value in values.items() if (reason := self._why_not(name, value))}
        values = {name: value for name, value in values.items() if name not in lost}
        changed = {name: f"only the module inside `{name}` was kept: wrap it again" for name in values}
        lost |= {name: said for name, said in changed.items() if values[name] is not named[name]}
        said = [reason for name, reason in lost.items() if _is_shown(name)]
        digests = {name: self._digests[name] if self._is_notebooks(name) else b"" for name in values}
        names = {
            name: SentName(pickling.ByItself(value), digests[name], True, (self._rank,))
            for name, value in values.items()
        }
        question = Question("restore", ranks=(self._rank,))
        code = (types.ModuleType, types.FunctionType, type)  # a __setstate__ may use them
        bound = (definitions.BoundFirst(name, each) for name, each in values.items() if isinstance(each, code))
        first = tuple(map(pickling.ByItself, bound))
        self._keys = {id(thing): key for key, thing in definitions.kept_things()}
        return Payload(question, first, {"lost": said}, None, Settings(), {}, main=dict(self.main), names=names)

    # -------------------------------------------------------------- a `pickling.Home`, for `_dump`: all is dumped
    def key_of(self, obj: object) -> tuple[str, bool]:
        torch = sys.modules.get("torch")
        key = self._keys.get(id(obj), "")
        if not key and torch is not None and isinstance(obj, (torch.Tensor, torch.nn.Module)):
            self._shared.append(obj)
            key = f"{id(obj)} of {self._token}"
        return key, False


class _OfNotebook:
    """A value of the notebook in a kept rank, and what it held when it arrived."""

    def __init__(self, value: Any) -> None:
        self.content = content_of(value)
        try:
            self._value: Callable[[], Any] = weakref.ref(value)  # large ones are not kept alive
        except TypeError:
            self._value = lambda: value

    def is_value(self, other: object) -> bool:
        value = self._value()
        return value is other and (value is not None or not isinstance(self._value, weakref.ref))


class _Probe(pickling.Home):
    """A `pickling.Home` that looks for objects that hold a process group. `found`: the type of the last."""

    found = ""

    def key_of(self, obj: object) -> tuple[str, bool]:
        self.found = type(obj).__name__ if _holds_group(type(obj)) else self.found
        return "", False


def _holds_group(kind: type) -> bool:
    found = _known_types.get(kind)
    if found is None:
        found = _known_types[kind] = not _OF_GROUPS.isdisjoint(each.__name__ for each in kind.__mro__)
    return found


def _group_holder(value: Any) -> str:
    """Return the type that makes a value stale with its process group, itself or one level below; empty if none."""
    below: Any = ()
    if type(value) in (list, tuple, set):
        below = value
    elif type(value) is dict:
        below = value.values()
    try:
        if not isinstance(value, (type, types.ModuleType, types.FunctionType, list, tuple, set, dict)):
            below = object.__getattribute__(value, "__dict__").values()  # not the user's __getattr__
        found = [value, *itertools.islice(below, _MAX_SEARCHED)]
    except Exception:  # noqa: BLE001  # it has none, the user's property raises, or a thread changes it
        found = [value]
    return next((type(each).__name__ for each in found if _holds_group(type(each))), "")


def _is_shown(name: str) -> bool:
    return not name.startswith("_") and name not in PROVIDED


def _describe(name: str, value: Any) -> Bound:
    kind = type(value)
    try:
        detail, size = _measure(value)
    except Exception:  # noqa: BLE001  # an array without memory, a module without parameters
        detail, size = "", 0
    return Bound(name, kind.__name__, detail, size, _group_holder(value))


def _measure(value: Any) -> tuple[str, int]:
    """Return what describes a value, and its memory in bytes. No code of the user runs: it may take forever."""
    torch = sys.modules.get("torch")
    kind = type(value)
    if kind in (bool, int, float, complex, str, bytes):
        return repr(value[:40] if isinstance(value, (str, bytes)) else value)[:60], sys.getsizeof(value)
    if torch is not None and isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{where}", int(value.nbytes)
    if torch is not None and isinstance(value, torch.nn.Module):
        module = torch.nn.Module
        parts = [*module.parameters(value), *module.buffers(value)]
        return f"{sum(part.numel() for part in parts):,} values", sum(int(part.nbytes) for part in parts)
    if kind in (list, tuple, dict, set, frozenset):
        return f"{len(value)} elements", sys.getsizeof(value)
    if kind.__module__.partition(".")[0] not in _OF_ARRAYS or not hasattr(value, "shape"):
        return "", 0
    if hasattr(value, "dtype"):
        return f"{tuple(value.shape)} {value.dtype}", int(getattr(value, "nbytes", 0))
    return str(tuple(value.shape)), 0  # a table
