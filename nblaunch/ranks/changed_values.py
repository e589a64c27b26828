"""Detection of values of the notebook that a rank modifies: the notebook's own stay unchanged.

Runs in ranks, before and after a launch's function, and when a kept rank gets a new value for a name.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_ELEMENTS = 10_000
_MAX_PARTS = 1_000
"""Elements and attributes of a value, and of these, that `content_of` looks at."""
_MAX_SAMPLES = 4_096
"""Elements of an array that it looks at."""
_PLAIN = {bool, int, float, complex, str, bytes, type(None)}
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset)


def content_of(value: Any, *, is_deep: bool = True) -> Any:
    """Return what differs after most changes in place, at little cost: compare it with ``==``.

    That is the versions of tensors, which in-place operations bump, samples of arrays, and the elements and attributes
    of other objects; those of elements and attributes, too, if `is_deep`. None of the user's code runs.
    """
    found: list[Any] = []
    parts, seen = [value], set[int]()
    try:
        while parts and len(found) < _MAX_PARTS:
            part = parts.pop()
            if type(part) in _PLAIN:
                found.append((type(part), part))
                continue
            found.append(id(part))
            if id(part) not in seen:
                seen.add(id(part))
                found += _own_content(part)
                parts += itertools.islice(_parts_of(part), _MAX_PARTS) if is_deep or part is value else ()
    except Exception:  # noqa: BLE001  # a thread of the user changes it meanwhile
        return None
    return found


def _own_content(part: Any) -> list[Any]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(part, torch.Tensor):
        return [_version(part)]
    if torch is not None and isinstance(part, torch.nn.Module):
        return [(id(tensor), _version(tensor)) for tensor in _tensors(part)]
    if numpy is not None and isinstance(part, numpy.ndarray):
        return [part.shape, numpy.asarray(part).flat[:: max(1, part.size // _MAX_SAMPLES)].tobytes()]
    return [kind.__len__(part) for kind in _CONTAINERS if isinstance(part, kind)]  # not the user's


def _parts_of(part: Any) -> Iterator[Any]:
    torch = sys.modules.get("torch")
    if isinstance(part, dict):
        return itertools.chain.from_iterable(dict.items(part))
    for kind in _CONTAINERS:
        if isinstance(part, kind):
            return kind.__iter__(part)  # type: ignore[no-any-return]  # not the user's
    is_opaque = isinstance(part, (type, types.ModuleType, types.FunctionType))
    if is_opaque or (torch is not None and isinstance(part, (torch.Tensor, torch.nn.Module))):
        return iter(())
    try:
        return _parts_of(object.__getattribute__(part, "__dict__"))  # not the user's __getattr__
    except AttributeError:
        return iter(())


def _tensors(module: Any) -> Iterator[Any]:
    kind = sys.modules["torch"].nn.Module
    return itertools.chain(kind.parameters(module), kind.buffers(module))


def _version(tensor: Any) -> int:
    """Return the version of a tensor; 0 if the notebook sees its changes, as torch calls all CUDA tensors shared."""
    try:
        return 0 if tensor.device.type == "cpu" and _has_storage(tensor) and tensor.is_shared() else tensor._version
    except RuntimeError:
        return 0  # inference tensors have no version counter
    except ValueError:
        return int(tensor._version)  # an uninitialized parameter of a lazy module


def unreturned(watched: Mapping[str, Any], before: Mapping[str, Any], result: Any) -> tuple[str, ...]:
    """Return the names of watched values that have changed since `before` and are not part of the result.

    `before` has the `content_of` each that is not deep.
    """
    changed = [name for name, value in watched.items() if content_of(value, is_deep=False) != before[name]]
    parts = list(_walk(result)) if changed else []
    return tuple(name for name in changed if not _is_returned(watched[name], parts))


def _is_returned(value: Any, parts: list[Any]) -> bool:
    """Return True if `value` is one of the parts or, for a module, its state_dict or one of its tensors."""
    if any(part is value for part in parts):
        return True
    if not hasattr(value, "state_dict"):
        return False
    own = set(value.state_dict())
    storages = {tensor.untyped_storage().data_ptr() for tensor in _tensors(value) if _has_storage(tensor)}
    for part in parts:
        if isinstance(part, Mapping) and own and own <= {str(key).removeprefix("module.") for key in part}:
            return True  # a state_dict, possibly copied to the CPU
        if _has_storage(part) and part.untyped_storage().data_ptr() in storages:
            return True
    return False


def _has_storage(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.layout == torch.strided


def _walk(value: Any) -> Iterator[Any]:
    """Yield `value` and the elements of its nested containers."""
    queue = [value]
    seen = 0
    while queue and seen < _MAX_ELEMENTS:
        part = queue.pop()
        seen += 1
        yield part
        if isinstance(part, Mapping):
            queue += part.values()
        elif isinstance(part, (list, tuple, set)):
            queue += part
