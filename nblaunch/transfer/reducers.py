"""How objects travel whose own pickling fails, or gives a receiver something else: one row of a table for each type.

To add a row: write a function that takes the object and the `BufferSink` and returns what ``__reduce__`` may return, or
None where the object's own pickling is right; enter it in `_ROWS` under the full name of the class. It also counts for
subclasses, and imports nothing: the class exists, so its module is loaded. Rebuild functions are public to pickle only.

A reduction must be the same for an object that has not changed: sessions send again what pickles differently.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import context, reduction
from typing import Any, NoReturn

from nblaunch.transfer import definitions
from nblaunch.transfer.tensors import BufferSink
from nblaunch.wire import RANK

Reduced = tuple[Any, ...]
Row = Callable[[Any, BufferSink | None], Reduced | None]
CACHED: Any = functools._lru_cache_wrapper
_DISPATCHER = functools.singledispatch(lambda: None).__code__  # type: ignore[attr-defined,misc]  # the wrapper's own


class RefusedError(TypeError):
    """An object cannot be sent. The reason continues "x, …"."""

    def __init__(self, thing: object, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.thing, self.advice = thing, advice


def _refusal(reason: str, advice: str) -> Row:
    def refuse(obj: Any, sink: BufferSink | None) -> NoReturn:
        raise RefusedError(obj, reason, advice)

    return refuse


def row_of(kind: type, *, for_child: bool = False) -> Row | None:
    """Return the reducer of a class, if it has a row. For a rank's child, none that depends on the rank or shares."""
    names = [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__]
    rows = (_ROWS.get(name) for name in names if not (for_child and name.startswith(_NOT_FOR_CHILDREN)))
    return next((row for row in rows if row is not None), None)


def wrapped_by(obj: Any) -> list[Any] | None:
    """Return the functions that a callable of a row is made of, such as a compiled one's original; else None."""
    if isinstance(obj, CACHED):
        return [obj.__wrapped__] if definitions.is_sent_by_value(obj) else []
    if isinstance(obj, types.FunctionType) and definitions.is_sent_by_value(obj) and _compiler_of(obj) is not None:
        return [obj._torchdynamo_orig_callable]  # type: ignore[attr-defined]
    return None


# ------------------------------------------------------------------ functions
def _reduce_function(function: Any, sink: BufferSink | None) -> Reduced | None:
    """Reduce a cell's function that `torch.compile` has made."""
    compiler = _compiler_of(function)
    if function.__code__ is _DISPATCHER and definitions.is_sent_by_value(function):
        advice = "define it inside the function, or in a module"
        raise RefusedError(function, "made by functools.singledispatch in the notebook", advice)
    if compiler is None or not definitions.is_sent_by_value(function):
        return None
    return compiler, (function._torchdynamo_orig_callable,)


def _compiler_of(function: Any) -> Any:
    """Return the context that `torch.compile` has made a function with; calling it compiles another function."""
    if "_torchdynamo_orig_callable" not in vars(function):
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    compiler = cells["self"].cell_contents if "self" in cells else None
    return compiler if type(compiler).__name__ == "OptimizeContext" else None


def _reduce_cached(function: Any, sink: BufferSink | None) -> Reduced | None:
    """Reduce a cell's function with a cache, which pickle sends by name. The receiver's cache is empty."""
    if not definitions.is_sent_by_value(function):
        return None
    return _cached, (function.__wrapped__, function.cache_parameters())


def _cached(function: Any, parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(prop: Any, sink: BufferSink | None) -> Reduced | None:
    if type(prop) is not functools.cached_property:
        return None
    return functools.cached_property, (prop.func,), {"attrname": prop.attrname}  # without its lock


# ------------------------------------------------------------------ the notebook's get_ipython
_shell_provider: Callable[[], Any] | None = None


def provide_shell(shell: Callable[[], Any]) -> None:
    """Set what returns the shell of this process. Ranks have one; others have that of their ``__main__``, if any."""
    global _shell_provider
    _shell_provider = shell


def get_ipython() -> Any:
    """Return the shell of the process that calls this; None if it has none, as IPython's function does."""
    if _shell_provider is not None:
        return _shell_provider()
    own = getattr(sys.modules["__main__"], "get_ipython", None)
    return None if own is None or own is get_ipython else own()


def is_get_ipython(obj: Any) -> bool:
    """Return True for the shell's ``get_ipython``, which a cell's function with a ``!command`` refers to."""
    return isinstance(obj, types.MethodType) and obj.__func__.__qualname__ == "InteractiveShell.get_ipython"


def _reduce_method(method: Any, sink: BufferSink | None) -> Reduced | None:
    return (_get_ipython, ()) if is_get_ipython(method) else None


def _get_ipython() -> Callable[[], Any]:
    return get_ipython


# ------------------------------------------------------------------ references
def _reduce_reference(reference: Any, sink: BufferSink | None) -> Reduced | None:
    if type(reference) is not weakref.ref:
        return None
    target = reference()
    return (_dead_reference, ()) if target is None else (weakref.ref, (target,))


def _dead_reference() -> Any:
    return weakref.ref(type("Gone", (), {})())


# ------------------------------------------------------------------ torch
def _reduce_module(module: Any, sink: BufferSink | None) -> Reduced | None:
    """Reduce a module that is parametrized, which has a class of its own, or compiled in place."""
    kind = type(module)
    is_parametrized = kind.__module__ == "torch.nn.utils.parametrize" and "parametrizations" in module._modules
    if not is_parametrized and module._compiled_call_impl is None:
        return None
    if is_parametrized:
        original = kind.__bases__[0]
        own = getattr(original, "__getstate__", None)
        state = dict(vars(module) if own is None else own(module))
        reduced: Any = _parametrized, (original, tuple(module.parametrizations)), state
    else:
        reduced = module.__reduce_ex__(5)
    if module._compiled_call_impl is not None and len(reduced) > 2 and isinstance(reduced[2], dict):
        reduced = (*reduced[:2], {**reduced[2], "_compiled_call_impl": module._compiled_call_impl}, *reduced[3:])
    return reduced  # type: ignore[no-any-return]


def _parametrized(original: Any, names: tuple[str, ...]) -> Any:
    from torch.nn import Module
    from torch.nn.utils import parametrize

    module = original.__new__(original)
    Module.__init__(module)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _in_ops(name: str) -> Any:
    import torch

    return functools.reduce(getattr, name.split("::"), torch.ops)


def _reduce_operator(operator: Any, sink: BufferSink | None) -> Reduced:
    function = operator._init_fn
    if definitions.is_of_main(function) or function.__module__ == "__main__":
        _refuse_operator(operator, sink)
    return _operator, (function.__module__, operator._qualname)


def _operator(module: str, name: str) -> Any:
    from torch._library.custom_ops import OPDEFS

    importlib.import_module(module)
    return OPDEFS[name]


_refuse_operator = _refusal(
    "a torch operator that is defined only in the notebook",
    "define it with torch.library.custom_op inside the function, or in a module that it imports",
)


# ------------------------------------------------------------------ multiprocessing
class _Child:
    """Stands for the child that multiprocessing's objects believe they are pickled for."""

    def __init__(self, sink: BufferSink) -> None:
        self._sink = sink

    def duplicate_for_child(self, fd: int) -> int:
        return fd

    def DupFd(self, fd: int) -> _Descriptor:  # noqa: N802  # multiprocessing's name
        return _Descriptor(fd, self._sink)


class _Descriptor:
    """A descriptor on its way. It is a duplicate: the user may close the original."""

    def __init__(self, fd: int, sink: BufferSink) -> None:
        self.fd, self._sink = os.dup(fd), sink
        weakref.finalize(self, os.close, self.fd)

    def __reduce__(self) -> Reduced:
        return Received, (self._sink.add_descriptor(self.fd, self),)


class Received:
    """A descriptor that arrived, as multiprocessing's rebuild functions expect it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        return os.dup(self._fd)


@contextlib.contextmanager
def as_for_child(sink: BufferSink | None) -> Iterator[None]:
    """Let queues, locks, pipes and managers' proxies be pickled in this thread, as for a child of the notebook."""
    before = context.get_spawning_popen()
    if sink is not None and RANK not in os.environ:
        context.set_spawning_popen(_Child(sink))  # type: ignore[arg-type]  # what is used of a Popen
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def _check_here(obj: Any, sink: BufferSink | None) -> None:
    if sink is not None and not sink.is_here:
        raise RefusedError(
            obj, "which ranks on other machines cannot share", "return values, or send them with report(...)"
        )


def _check_shareable(obj: Any, sink: BufferSink | None) -> None:
    _check_here(obj, sink)
    if not isinstance(context.get_spawning_popen(), _Child):
        raise RefusedError(
            obj, "which only the notebook can share with its ranks", "create it in the notebook, and return its content"
        )


def _reduce_by_multiprocessing(obj: Any, sink: BufferSink | None) -> Reduced:
    _check_shareable(obj, sink)
    reduced: Reduced = reduction.ForkingPickler._extra_reducers[type(obj)](obj)  # type: ignore[attr-defined]
    return reduced


def _reduce_proxy(proxy: Any, sink: BufferSink | None) -> None:
    """Refuse a manager's proxy where it cannot connect; elsewhere its own pickling is right."""
    if isinstance(proxy._token.address, str):  # of a socket on this machine
        _check_here(proxy, sink)


def _reduce_ctypes(obj: Any, sink: BufferSink | None) -> Reduced | None:
    return _reduce_by_multiprocessing(obj, sink) if hasattr(obj, "_wrapper") else None


def _reduce_arena(arena: Any, sink: BufferSink | None) -> Reduced:
    _check_shareable(arena, sink)
    return _arena, (arena.size, reduction.DupFd(arena.fd))


def _arena(size: int, received: Received) -> Any:
    from multiprocessing.heap import Arena

    arena = Arena(size, received.detach())
    weakref.finalize(arena, os.close, arena.fd)
    return arena


def _check_lock(lock: Any, sink: BufferSink | None) -> None:
    """Refuse a lock or semaphore without a name, which forked processes alone can share; else its pickling is right."""
    _check_shareable(lock, sink)
    if lock._semlock.name is None:
        advice = "create it with multiprocessing.get_context('spawn'), or use multiprocessing.Manager()"
        raise RefusedError(lock, "which only forked processes can share", advice)
    assert sink is not None
    sink.keep_until_received(lock)


# ------------------------------------------------------------------ the table
_NOT_FOR_CHILDREN = ("multiprocessing.", "_ctypes.", "accelerate.", "transformers.")
_refuse_for_one_process = _refusal(
    "which was created for a single process, so every rank would be rank 0 of 1", "create it inside the function"
)
_refuse_script = _refusal("a TorchScript object", "save it with torch.jit.save, and load it inside the function")
_ROWS: dict[str, Row] = {
    "builtins.function": _reduce_function,
    "builtins.method": _reduce_method,
    "functools._lru_cache_wrapper": _reduce_cached,
    "functools.cached_property": _reduce_cached_property,
    "weakref.ReferenceType": _reduce_reference,
    "weakref.WeakKeyDictionary": lambda mapping, sink: (type(mapping), (), None, None, iter(list(mapping.items()))),
    "weakref.WeakValueDictionary": lambda mapping, sink: (type(mapping), (), None, None, iter(list(mapping.items()))),
    "_weakrefset.WeakSet": lambda members, sink: (type(members), (list(members),)),
    "torch.jit._script.ScriptModule": _refuse_script,
    "torch.jit.torch.jit.ScriptFunction": _refuse_script,
    "torch.export.exported_program.ExportedProgram": _refusal(
        "an exported program", "save it with torch.export.save, and load it inside the function"
    ),
    "torch.nn.modules.module.Module": _reduce_module,
    "torch._library.custom_ops.CustomOpDef": _reduce_operator,
    "torch._ops.OpOverload": lambda overload, sink: (getattr, (overload._overloadpacket, overload._overloadname)),
    "torch._ops.OpOverloadPacket": lambda packet, sink: (_in_ops, (packet._qualified_op_name,)),
    "torch._ops._OpNamespace": lambda namespace, sink: (_in_ops, (namespace.name,)),
    "torch.library.Library": _refuse_operator,
    "multiprocessing.synchronize.SemLock": _check_lock,
    "multiprocessing.connection.Connection": _reduce_by_multiprocessing,
    "multiprocessing.heap.Arena": _reduce_arena,
    "multiprocessing.managers.BaseProxy": _reduce_proxy,
    "_ctypes._SimpleCData": _reduce_ctypes,
    "_ctypes.Array": _reduce_ctypes,
    "_ctypes.Structure": _reduce_ctypes,
    "multiprocessing.process.BaseProcess": _refusal(
        "a process, which only its parent can use", "start it inside the function"
    ),
    "accelerate.state.PartialState": _refuse_for_one_process,
    "accelerate.state.AcceleratorState": _refuse_for_one_process,
    "accelerate.accelerator.Accelerator": _refuse_for_one_process,
    "transformers.training_args.TrainingArguments": _refuse_for_one_process,
}
"""By the full name of a class."""
