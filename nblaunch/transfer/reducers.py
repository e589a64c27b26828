"""How objects travel whose own pickling fails, or gives a receiver something else: one row of a table for each type.

To add a row: write a function that takes the object and the `BufferSink` and returns what ``__reduce__`` may return, or
None where the object's own pickling is right; enter it in `_ROWS` under the full name of the class. It also counts for
subclasses, and imports nothing: the class exists, so its module is loaded. Rebuild functions are public to pickle only.

A reduction must be the same for an object that has not changed: sessions send again what pickles differently.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import mmap
import multiprocessing
import os
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import context, reduction
from typing import Any

from nblaunch.machine import segments
from nblaunch.transfer import definitions
from nblaunch.transfer.tensors import BufferSink
from nblaunch.wire import RANK

Reduced = tuple[Any, ...]
Row = Callable[[Any, BufferSink | None], Reduced | None]
CACHED: Any = functools._lru_cache_wrapper
_DISPATCHER = functools.singledispatch(lambda: None).__code__  # type: ignore[attr-defined,misc]  # the wrapper's own


class RefusedError(TypeError):
    """An object cannot be sent.

    Args:
        thing: The object.
        reason: Continues "x, ".
        advice: What to do.
    """

    def __init__(self, thing: object, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.thing, self.advice = thing, advice


def row_of(kind: type, *, for_child: bool = False) -> Row | None:
    """Return the reducer of the objects of a class, if it has a row.

    Args:
        kind: The class.
        for_child: For a rank's own child, leave out the rows of what depends on the receiver's rank or is shared.
    """
    names = [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__]
    rows = (_ROWS.get(name) for name in names if not (for_child and name.startswith(_NOT_FOR_CHILDREN)))
    return next((row for row in rows if row is not None), None)


def wrapped_by(obj: Any) -> list[Any] | None:
    """Return the functions that a callable of a row is made of, such as a compiled one's original; else None."""
    if isinstance(obj, CACHED):
        return [obj.__wrapped__] if definitions.is_sent_by_value(obj) else []
    if isinstance(obj, types.FunctionType) and definitions.is_sent_by_value(obj):
        if obj.__code__ is _DISPATCHER:
            return list(obj.registry.values())  # type: ignore[attr-defined]  # singledispatch's
        return None if _compiler_of(obj) is None else [obj._torchdynamo_orig_callable]  # type: ignore[attr-defined]
    if _is_operator(obj):
        return [obj._init_fn]
    return None


# ------------------------------------------------------------------ functions
def _reduce_function(function: Any, sink: BufferSink | None) -> Reduced | None:
    """Reduce a cell's function that a decorator of the standard library or torch has made."""
    if function.__code__ is _DISPATCHER:
        if definitions.is_sent_by_value(function):
            registry = dict(function.registry)
            return _dispatcher, (), registry, None, None, _set_dispatched
    elif (compiler := _compiler_of(function)) is not None and definitions.is_sent_by_value(function):
        return _compiled, (compiler, function._torchdynamo_orig_callable)
    return None


def _dispatcher() -> Any:
    return functools.singledispatch(_unset)


def _unset(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


def _set_dispatched(dispatcher: Any, registry: Mapping[type, Any]) -> None:
    for kind, function in registry.items():
        dispatcher.register(kind, function)
    functools.update_wrapper(dispatcher, registry[object])


def _compiler_of(function: Any) -> Any:
    """Return the context that `torch.compile` has made a function with; calling it compiles another function."""
    if "_torchdynamo_orig_callable" not in vars(function):
        return None
    compiler = _closure_of(function).get("self")
    return compiler if type(compiler).__name__ == "OptimizeContext" else None


def _compiled(compiler: Any, function: Any) -> Any:
    return compiler(function)


def _closure_of(function: Any) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


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
    return _cached_property, (prop.func, prop.attrname)  # without its lock


def _cached_property(function: Any, name: str | None) -> Any:
    made = functools.cached_property(function)
    made.attrname = name
    return made


# ------------------------------------------------------------------ references
def _reduce_reference(reference: Any, sink: BufferSink | None) -> Reduced | None:
    if type(reference) is not weakref.ref:
        return None
    target = reference()
    return (_dead_reference, ()) if target is None else (weakref.ref, (target,))


def _dead_reference() -> Any:
    return weakref.ref(type("Gone", (), {})())


def _reduce_weak_mapping(mapping: Any, sink: BufferSink | None) -> Reduced:
    return type(mapping), (), None, None, iter(list(mapping.items()))


def _reduce_weak_set(members: Any, sink: BufferSink | None) -> Reduced:
    return type(members), (list(members),)


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


def _reduce_script(script: Any, sink: BufferSink | None) -> Reduced:
    on_gpu = any(each.is_cuda for each in getattr(script, "state_dict", dict)().values())
    return _script, (script.save_to_buffer(), on_gpu, operators_in(str(getattr(script, "inlined_graph", ""))))


def _script(data: bytes, on_gpu: bool, operators: object) -> Any:
    import torch

    is_here = on_gpu and RANK in os.environ and torch.cuda.is_available()
    where = torch.device("cuda", torch.cuda.current_device()) if is_here else torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch has told the user already
        return torch.jit.load(io.BytesIO(data), map_location=where if on_gpu else None)


def _reduce_exported(program: Any, sink: BufferSink | None) -> Reduced:
    import torch

    file = io.BytesIO()
    torch.export.save(program, file)
    return _exported, (file.getvalue(), operators_in(program.graph_module.code))


def _exported(data: bytes, operators: object) -> Any:
    import torch

    return torch.export.load(io.BytesIO(data))


def _reduce_graph(module: Any, sink: BufferSink | None) -> Reduced | None:
    operators = operators_in(module.code)
    return (_after, (operators, *module.__reduce_ex__(5)[:2])) if operators else None


def _after(operators: object, make: Callable[..., Any], made_of: tuple[Any, ...]) -> Any:
    """Make an object once its `operators` exist."""
    return make(*made_of)


# ------------------------------------------------------------------ torch's operators
def _is_operator(obj: Any) -> bool:
    return type(obj).__name__ == "CustomOpDef" and type(obj).__module__ == "torch._library.custom_ops"


def _own_operators() -> Mapping[str, Any]:
    """Return the custom operators of this process, by name."""
    found: Mapping[str, Any] = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
    return found


def operators_in(code: types.CodeType | str) -> tuple[Any, ...]:
    """Return the custom operators of cells that code refers to as ``torch.ops.NAMESPACE.NAME``.

    Args:
        code: The code, or its source, or the graph of a script, which has ``NAMESPACE::NAME``.
    """
    if not isinstance(code, str) and "ops" not in code.co_names:
        return ()

    def uses(name: str) -> bool:
        namespace, _, own = name.partition("::")
        if isinstance(code, str):
            return f"ops.{namespace}.{own}" in code or name in code
        return {"ops", namespace, own}.issubset(code.co_names)

    return _operators_of_cells(uses)


def _operators_of_cells(is_wanted: Callable[[str], bool]) -> tuple[Any, ...]:
    operators = sorted(_own_operators().items())
    return tuple(op for name, op in operators if is_wanted(name) and definitions.is_sent_by_value(op._init_fn))


def _reduce_operator(operator: Any, sink: BufferSink | None) -> Reduced:
    """Reduce what `torch.library.custom_op` has made, with its kernels and rules."""
    kernels = {
        device: _closure_of(getattr(kernel, "__wrapped__", kernel)).get("fn", kernel)
        for device, kernel in operator._backend_fns.items()
    }
    content = (
        operator._init_fn,
        kernels,
        operator._abstract_fn,
        (operator._backward_fn, operator._setup_context_fn),
        dict(getattr(operator, "_torch_dispatch_fns", {})),
        getattr(operator, "_vmap_fn", None),
        {device: kind for device, kind in getattr(operator, "_autocast_dtype", {}).items() if kind is not None},
    )
    about = (operator._namespace, operator._name, operator._schema, tuple(getattr(operator, "_tags", None) or ()))
    return _operator, about, content, None, None, _set_operator


def _operator(namespace: str, name: str, schema: str, tags: tuple[Any, ...]) -> Any:
    from torch._library.custom_ops import CustomOpDef

    own = _own_operators().get(f"{namespace}::{name}")
    if own is not None and RANK not in os.environ:
        return own  # the notebook's, which comes back
    return CustomOpDef(namespace, name, schema, _unset, tags)


def _set_operator(operator: Any, content: tuple[Any, ...]) -> None:
    if operator._init_fn is not _unset:
        return
    operator._init_fn, kernels, fake, (backward, setup), by_mode, vmap, autocast = content
    for device, kernel in kernels.items():
        operator.register_kernel(device)(kernel)
    if fake is not None:
        operator.register_fake(fake)
    if backward is not None:
        operator.register_autograd(backward, setup_context=setup)
    for mode, rule in by_mode.items():
        operator.register_torch_dispatch(mode)(rule)
    if vmap is not None:
        operator.register_vmap(vmap)
    for device, kind in autocast.items():
        operator.register_autocast(device, kind)


def _reduce_overload(overload: Any, sink: BufferSink | None) -> Reduced:
    return getattr, (overload._overloadpacket, overload._overloadname)


def _reduce_packet(packet: Any, sink: BufferSink | None) -> Reduced:
    operator = _own_operators().get(packet._qualified_op_name)
    is_cells = operator is not None and definitions.is_sent_by_value(operator._init_fn)
    return _packet, (packet._qualified_op_name, operator if is_cells else None)


def _packet(name: str, operator: Any) -> Any:
    """Return the packet of ``torch.ops`` under this name; the operator has just been defined, if a cell defines it."""
    import torch

    namespace, _, own = name.partition("::")
    return getattr(getattr(torch.ops, namespace), own)


def _reduce_namespace(namespace: Any, sink: BufferSink | None) -> Reduced:
    return _namespace, (namespace.name, _operators_of_cells(lambda name: name.startswith(f"{namespace.name}::")))


def _namespace(name: str, operators: object) -> Any:
    """Return a namespace of ``torch.ops``, whose `operators` of cells have just been defined."""
    import torch

    return getattr(torch.ops, name)


def _refuse_library(library: Any, sink: BufferSink | None) -> Reduced:
    raise RefusedError(
        library,
        "a torch.library.Library, whose operators exist in the notebook alone",
        "define them with torch.library.custom_op, inside the function, or in a module that it imports",
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
    """A descriptor that arrived, as multiprocessing's rebuild functions expect it.

    Args:
        fd: The descriptor, which its owner closes once all is unpickled.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        """Return a duplicate."""
        return os.dup(self._fd)


@contextlib.contextmanager
def as_for_child(sink: BufferSink | None) -> Iterator[None]:
    """Let queues, locks, pipes and managers' proxies be pickled in this thread, as for a child of the notebook."""
    before = context.get_spawning_popen()
    if sink is not None and _may_share():
        context.set_spawning_popen(_Child(sink))  # type: ignore[arg-type]  # what is used of a Popen
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def _may_share() -> bool:
    return RANK not in os.environ


def _check_here(obj: Any, sink: BufferSink | None) -> None:
    if sink is not None and not sink.is_here:
        raise RefusedError(
            obj, "which ranks on other machines cannot share", "return values, or report(...) them while the ranks run"
        )


def _check_shareable(obj: Any, sink: BufferSink | None) -> None:
    _check_here(obj, sink)
    if not isinstance(context.get_spawning_popen(), _Child):
        raise RefusedError(
            obj, "which only the notebook can share with its ranks", "create it in the notebook, and return its content"
        )


def _reduce_by_multiprocessing(obj: Any, sink: BufferSink | None) -> Reduced:
    """Reduce a pipe's end or shared memory as multiprocessing does for its children."""
    _check_shareable(obj, sink)
    reduced: Reduced = reduction.ForkingPickler._extra_reducers[type(obj)](obj)  # type: ignore[attr-defined]
    return reduced


def _reduce_proxy(proxy: Any, sink: BufferSink | None) -> None:
    """Refuse a manager's proxy where it cannot connect; elsewhere its own pickling is right."""
    if isinstance(proxy._token.address, str):  # of a socket on this machine
        _check_here(proxy, sink)


def _reduce_ctypes(obj: Any, sink: BufferSink | None) -> Reduced | None:
    """Reduce a value of `multiprocessing.sharedctypes`."""
    return _reduce_by_multiprocessing(obj, sink) if hasattr(obj, "_wrapper") else None


def _reduce_arena(arena: Any, sink: BufferSink | None) -> Reduced:
    _check_shareable(arena, sink)
    return _arena, (arena.size, reduction.DupFd(arena.fd))


def _arena(size: int, received: Received) -> Any:
    from multiprocessing.heap import Arena

    arena = Arena(size, received.detach())
    weakref.finalize(arena, os.close, arena.fd)
    return arena


class _Page:
    """The memory file that holds a semaphore."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)


_pages: weakref.WeakKeyDictionary[Any, _Page] = weakref.WeakKeyDictionary()
"""By lock."""


def _reduce_lock(lock: Any, sink: BufferSink | None) -> Reduced:
    """Reduce a lock or semaphore: by its name, or, with the start method fork, by the memory that it is in."""
    _check_shareable(lock, sink)
    assert sink is not None
    semaphore = lock._semlock
    if semaphore.name is not None:
        sink.keep_until_received(lock)
        return _lock, (type(lock), semaphore.kind, semaphore.maxvalue, semaphore.name, None)
    if not sys.platform.startswith("linux"):
        advice = "create it with multiprocessing.get_context('spawn'), or use multiprocessing.Manager()"
        raise RefusedError(lock, "which only forked processes can share here", advice)
    if lock not in _pages:
        # `sem_open` maps a page for each semaphore; the name in that page's file is gone, with the start method fork
        advice = "create it with multiprocessing.get_context('spawn')"
        if int.from_bytes(ctypes.string_at(semaphore.handle + 4, 4), sys.byteorder):  # `sem_t` counts who waits
            raise RefusedError(lock, "which a thread or process waits for", f"launch once it does not, or {advice}")
        children = [each for each in multiprocessing.active_children() if "Manager" not in each.name]
        if any(isinstance(each, context.ForkProcess) for each in children):
            raise RefusedError(lock, "which processes that the notebook has forked may share already", advice)
        _pages[lock] = _Page(segments.create_file(mmap.PAGESIZE).leave_writable())
        segments.move_page(semaphore.handle, _pages[lock].fd)
    page = _Descriptor(_pages[lock].fd, sink)
    return _lock, (type(lock), semaphore.kind, semaphore.maxvalue, None, page)


def _lock(kind: Any, *about: Any) -> Any:
    """Rebuild a lock or semaphore."""
    *limits, name, received = about
    lock, address, memory = kind.__new__(kind), 0, None
    if received is not None:
        memory = segments.map_segment(received._fd, mmap.PAGESIZE, is_shared=True)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    lock.__setstate__((address, *limits, name))
    lock._memory = memory  # lives as long as the lock
    return lock


def _refuse_process(process: Any, sink: BufferSink | None) -> Reduced:
    raise RefusedError(process, "a process, which only its parent can use", "start it inside the function")


# ------------------------------------------------------------------ accelerate and transformers
def _reduce_partial_state(state: Any, sink: BufferSink | None) -> Reduced:
    return _partial_state, (type(state), vars(state).get("_cpu", False))


def _partial_state(kind: Any, cpu: bool) -> Any:
    return kind(cpu or os.environ.get("ACCELERATE_USE_CPU") == "true")  # which only an Accelerator reads


def _reduce_accelerator_state(state: Any, sink: BufferSink | None) -> Reduced:
    content = vars(state)
    if any(os.environ.get(f"ACCELERATE_USE_{engine}") == "true" for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM")):
        advice = "create it inside the function"
        raise RefusedError(state, "of an Accelerator with a plugin for several processes", advice)
    about = content.get("_mixed_precision"), content.get("_cpu", False), content.get("dynamo_plugin")
    return _accelerator_state, (type(state), *about)


def _accelerator_state(kind: Any, precision: str | None, cpu: bool, dynamo_plugin: Any) -> Any:
    return kind(precision, cpu, dynamo_plugin, _from_accelerator=True)


def _reduce_gradient_state(state: Any, sink: BufferSink | None) -> Reduced:
    return _gradient_state, (type(state), dict(vars(state).get("plugin_kwargs", {})))


def _gradient_state(kind: Any, settings: dict[str, Any]) -> Any:
    state = kind()
    state.plugin_kwargs = settings
    return state


def _reduce_accelerator(accelerator: Any, sink: BufferSink | None) -> Reduced | None:
    if any(getattr(accelerator, name, None) for name in ("_models", "_optimizers", "_dataloaders")):
        raise RefusedError(
            accelerator,
            "an Accelerator that has prepared objects for the notebook's one process",
            "create it, and call prepare(), inside the function",
        )
    return None


def _reduce_training_arguments(arguments: Any, sink: BufferSink | None) -> Reduced:
    """Reduce transformers' TrainingArguments. Which rank and device it is for, the receiver finds out."""
    state = {name: value for name, value in vars(arguments).items() if not name.endswith("_setup_devices")}
    return _new, (type(arguments),), state, None, None, _set_training_arguments


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _set_training_arguments(arguments: Any, state: dict[str, Any]) -> None:
    vars(arguments).update(state)
    placed = state.get("distributed_state")
    if placed is not None:
        for name in ("_setup_devices", "__cached__setup_devices"):  # of functools, and of transformers before 5
            vars(arguments)[name] = placed.device
        vars(arguments)["_n_gpu"] = int(placed.device.type == "cuda")


# ------------------------------------------------------------------ the table
_NOT_FOR_CHILDREN = ("multiprocessing.", "_ctypes.", "accelerate.", "transformers.")
_ROWS: dict[str, Row] = {
    "builtins.function": _reduce_function,
    "functools._lru_cache_wrapper": _reduce_cached,
    "functools.cached_property": _reduce_cached_property,
    "weakref.ReferenceType": _reduce_reference,
    "weakref.WeakKeyDictionary": _reduce_weak_mapping,
    "weakref.WeakValueDictionary": _reduce_weak_mapping,
    "_weakrefset.WeakSet": _reduce_weak_set,
    "torch.jit._script.ScriptModule": _reduce_script,
    "torch.jit.torch.jit.ScriptFunction": _reduce_script,
    "torch.export.exported_program.ExportedProgram": _reduce_exported,
    "torch.fx.graph_module.GraphModule": _reduce_graph,
    "torch.nn.modules.module.Module": _reduce_module,
    "torch._library.custom_ops.CustomOpDef": _reduce_operator,
    "torch._ops.OpOverload": _reduce_overload,
    "torch._ops.OpOverloadPacket": _reduce_packet,
    "torch._ops._OpNamespace": _reduce_namespace,
    "torch.library.Library": _refuse_library,
    "multiprocessing.synchronize.SemLock": _reduce_lock,
    "multiprocessing.connection.Connection": _reduce_by_multiprocessing,
    "multiprocessing.heap.Arena": _reduce_arena,
    "multiprocessing.managers.BaseProxy": _reduce_proxy,
    "_ctypes._SimpleCData": _reduce_ctypes,
    "_ctypes.Array": _reduce_ctypes,
    "_ctypes.Structure": _reduce_ctypes,
    "multiprocessing.process.BaseProcess": _refuse_process,
    "accelerate.state.PartialState": _reduce_partial_state,
    "accelerate.state.AcceleratorState": _reduce_accelerator_state,
    "accelerate.state.GradientState": _reduce_gradient_state,
    "accelerate.accelerator.Accelerator": _reduce_accelerator,
    "transformers.training_args.TrainingArguments": _reduce_training_arguments,
}
"""By the full name of a class."""
