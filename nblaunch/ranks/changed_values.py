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


def content_of(value: Any) -> Any:
    """Return what differs after most changes in place, at little cost: compare it with ``==``.

    That is the versions of tensors, samples of arrays, and the elements and attributes of other objects. None of the
    user's code runs.
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
                parts += itertools.islice(_parts_of(part), _MAX_PARTS)
    except Exception:  # noqa: BLE001  # a thread of the user changes it meanwhile
        return None
    return found


def _own_content(part: Any) -> list[Any]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(part, torch.Tensor):
        return [_version(part)]
    if torch is not None and isinstance(part, torch.nn.Module):
        tensors = itertools.chain(torch.nn.Module.parameters(part), torch.nn.Module.buffers(part))
        return [(id(tensor), _version(tensor)) for tensor in tensors]
    if numpy is not None and isinstance(part, numpy.ndarray):
        return [part.shape, numpy.asarray(part).flat[:: max(1, part.size // _MAX_SAMPLES)].tobytes()]
    return []


def _parts_of(part: Any) -> Iterator[Any]:
    torch = sys.modules.get("torch")
    if isinstance(part, dict):
        return itertools.chain.from_iterable(dict.items(part))
    kinds: tuple[Any, ...] = (list, tuple, set, frozenset)
    for kind in kinds:
        if isinstance(part, kind):
            return kind.__iter__(part)  # type: ignore[no-any-return]  # not the user's
    is_opaque = isinstance(part, (type, types.ModuleType, types.FunctionType))
    if is_opaque or (torch is not None and isinstance(part, (torch.Tensor, torch.nn.Module))):
        return iter(())
    try:
        return _parts_of(object.__getattribute__(part, "__dict__"))  # not the user's __getattr__
    except AttributeError:
        return iter(())


def fingerprints(watched: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `unreturned` compares with. Call it before the function runs."""
    return {name: _fingerprint(value) for name, value in watched.items()}


def unreturned(watched: Mapping[str, Any], before: Mapping[str, Any], result: Any) -> tuple[str, ...]:
    """Return the names of watched values that have changed and are not part of the result."""
    changed = [name for name, earlier in before.items() if _fingerprint(watched[name]) != earlier]
    if not changed:
        return ()
    parts = list(_walk(result))
    return tuple(name for name in changed if not _is_returned(watched[name], parts))


def _fingerprint(value: Any) -> Any:
    """Return the tensor versions of a module, which in-place operations bump, or the element ids of a container."""
    if hasattr(value, "state_dict"):
        return [(name, _version(tensor)) for name, tensor in _tensors(value).items() if not _is_shared(tensor)]
    elements = list(value.items()) if isinstance(value, dict) else list(value)
    return [len(elements), [tuple(map(id, e)) if isinstance(value, dict) else id(e) for e in elements[:_MAX_ELEMENTS]]]


def _tensors(module: Any) -> dict[str, Any]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _is_shared(tensor: Any) -> bool:
    """Return True if the notebook sees the tensor's changes. False for CUDA tensors: torch calls all of them shared."""
    try:
        return _is_tensor(tensor) and tensor.device.type == "cpu" and bool(tensor.is_shared())
    except ValueError:
        return False  # an uninitialized parameter of a lazy module


def _version(tensor: Any) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:
        return 0  # inference tensors have no version counter


def _is_returned(value: Any, parts: list[Any]) -> bool:
    """Return True if `value` is one of the parts or, for a module, its state_dict or one of its tensors."""
    if any(part is value for part in parts):
        return True
    if not hasattr(value, "state_dict"):
        return False
    own = _tensors(value)
    storages = {tensor.untyped_storage().data_ptr() for tensor in own.values() if _is_tensor(tensor)}
    for part in parts:
        if isinstance(part, Mapping) and own and set(own) <= {str(key).removeprefix("module.") for key in part}:
            return True  # a state_dict, possibly copied to the CPU
        if _is_tensor(part) and part.untyped_storage().data_ptr() in storages:
            return True
    return False


def _is_tensor(value: Any) -> bool:
    """Return True for a tensor with a storage: sparse tensors have none."""
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
