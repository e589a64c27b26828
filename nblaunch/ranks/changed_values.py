"""Noticing that a rank changed what the notebook sent, and did not return it: the notebook's own stays as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

_MOST = 10_000
"""Elements of a container that are looked at."""


def fingerprints(watched: Mapping[str, Any]) -> dict[str, Any]:
    """What `unreturned` compares with, taken before the function runs."""
    return {name: _fingerprint(value) for name, value in watched.items()}


def unreturned(watched: Mapping[str, Any], before: Mapping[str, Any], result: Any) -> tuple[str, ...]:
    """The names of watched things that have changed and are no part of the result."""
    changed = [name for name, earlier in before.items() if _fingerprint(watched[name]) != earlier]
    if not changed:
        return ()
    parts = list(_walk(result))
    return tuple(name for name in changed if not _is_in(watched[name], parts))


def _fingerprint(value: Any) -> Any:
    """Module: the versions of its tensors, which every change in place raises. Container: its elements' identity."""
    if hasattr(value, "state_dict"):
        return [(name, _version(tensor)) for name, tensor in _tensors(value).items() if not _is_shared(tensor)]
    elements = list(value.items()) if isinstance(value, dict) else list(value)
    return [len(elements), [tuple(map(id, e)) if isinstance(value, dict) else id(e) for e in elements[:_MOST]]]


def _tensors(module: Any) -> dict[str, Any]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _is_shared(tensor: Any) -> bool:
    """Whether the notebook sees its changes; of a tensor on a GPU torch always says that it is shared."""
    try:
        return _is_tensor(tensor) and tensor.device.type == "cpu" and bool(tensor.is_shared())
    except ValueError:
        return False  # a lazy module's, which has no memory yet


def _version(tensor: Any) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:
        return 0  # made in inference_mode, it keeps no count


def _is_in(value: Any, parts: list[Any]) -> bool:
    if any(part is value for part in parts):
        return True
    if not hasattr(value, "state_dict"):
        return False
    own = _tensors(value)
    storages = {tensor.untyped_storage().data_ptr() for tensor in own.values() if _is_tensor(tensor)}
    for part in parts:
        if isinstance(part, Mapping) and own and set(own) <= {str(key).removeprefix("module.") for key in part}:
            return True  # a state_dict, copied to the CPU perhaps
        if _is_tensor(part) and part.untyped_storage().data_ptr() in storages:
            return True
    return False


def _is_tensor(value: Any) -> bool:
    """Whether it is a tensor with a storage, which a sparse one has not."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.layout == torch.strided


def _walk(value: Any) -> Iterator[Any]:
    queue = [value]
    seen = 0
    while queue and seen < _MOST:
        part = queue.pop()
        seen += 1
        yield part
        if isinstance(part, Mapping):
            queue += part.values()
        elif isinstance(part, (list, tuple, set)):
            queue += part
